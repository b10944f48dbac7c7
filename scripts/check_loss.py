"""Finds a loss of one's own that stretches outputs (N, 1) and targets (N,) against each other, to (N, N)."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from lib.utils.errors import UsageError

seen: set[type] = set()  # classes of losses that were checked


@torch.no_grad()
def check(criterion: Callable, outputs: Tensor, targets: Tensor) -> None:
    """Raise UsageError for a loss that has another value for one shape of both, whichever of the two that is."""
    if type(criterion) in seen:
        return
    seen.add(type(criterion))
    try:
        with torch.random.fork_rng(devices=[]):
            pairs = (outputs, targets), (outputs, targets[:, None]), (outputs[:, 0], targets)
            found, rows, row = (copy.deepcopy(criterion)(*pair) for pair in pairs)
        stretches = found.numel() == 1 and bool(torch.isclose(rows, row)) and not torch.isclose(found, row)
    except Exception:  # noqa: BLE001  # it takes no other shapes, and so stretches none, or is no plain loss
        return
    if stretches and len(targets) > 1:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        fault = "stretches them against each other: give both one shape"
        raise UsageError(f"{shapes}: the loss {type(criterion).__name__} {fault}")
