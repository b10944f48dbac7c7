"""Finds a loss of one's own that stretches outputs (N, 1) and targets (N,) against each other, to (N, N)."""

from collections.abc import Callable

import torch
from torch import Tensor

from lib.utils.errors import UsageError

seen: set[type] = set()  # classes of losses that are right


@torch.no_grad()
def check(criterion: Callable, outputs: Tensor, targets: Tensor) -> None:
    """Raise UsageError unless the loss of a batch is the mean over those of its samples, each by itself."""
    if type(criterion) in seen or not targets.is_floating_point():
        return
    whole, rows = criterion(outputs, targets), range(len(outputs))
    each = [criterion(outputs[row : row + 1], targets[row : row + 1]) for row in rows]
    if not torch.isclose(whole, torch.stack(each).mean(), rtol=1e-3, atol=1e-6):
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        fault = "is not the mean over the samples: does it stretch them against each other? Give both one shape"
        raise UsageError(f"{shapes}: {type(criterion).__name__} {fault}")
    seen.add(type(criterion))
