"""Finds a loss of one's own that stretches (N, 1) and (N,) to (N, N), outputs and targets, and terms no loss has."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.core import loss as losses
from lib.utils.checkpoint.state import unwrap
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)

seen: set[type] = set()  # classes of losses that were checked


@torch.no_grad()
def check(criterion: Callable, outputs: Tensor, targets: Tensor) -> None:
    """Raise UsageError for a loss that has another value for one shape of both, whichever of the two that is."""
    if type(criterion) in seen:
        return
    seen.add(type(criterion))
    try:
        with torch.random.fork_rng(devices=[]):
            columns = outputs.reshape(-1, 1), targets.reshape(-1, 1)
            pairs = (outputs, targets), columns, (outputs.flatten(), targets.flatten())
            found, rows, row = (copy.deepcopy(criterion)(*pair) for pair in pairs)
        stretches = found.numel() == 1 and bool(torch.isclose(rows, row)) and not torch.isclose(found, row)
    except Exception:  # noqa: BLE001  # it takes no other shapes, and so stretches none, or is no plain loss
        return
    if stretches and len(targets) > 1:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        fault = "stretches them against each other: give both one shape"
        raise UsageError(f"{shapes}: the loss {type(criterion).__name__} {fault}")


def check_metrics(criterion: Callable, batch: Any, figures: Any) -> None:
    """Raise UsageError for a metric with a value for each target, (B, ...), where some of these are ignored."""
    _, targets = losses.split_batch(batch)
    ignored = getattr(criterion, "ignore_index", None)
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return
    for name, value in figures.items() if isinstance(figures, dict) else ():
        is_each = isinstance(value, Tensor) and value.ndim > 1 and value.shape == targets.shape
        if is_each and (targets.long() == ignored).any():
            fault = f"has a value for each target, {tuple(value.shape)}, also for those that are ignored"
            raise UsageError(f"metric {name!r} {fault}: give Ratio(sum, count) of the others")


def warn_lost_terms(trainer: Any, loss: Any) -> None:
    """Warn of numbers with a gradient that modules keep and the loss lacks, as the load of a mixture of experts.

    `loss`: what training_step has returned. Not under -recompute, whose backward pass computes such numbers again.
    """
    named = () if trainer.args.recompute else unwrap(trainer.model).named_modules(prefix="model")
    kept = {f"{name}.{key}": one for name, module in named for key, one in vars(module).items() if is_term(one)}
    seen, left = set(), [loss.grad_fn] if kept else []
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [one for one, _ in node.next_functions]
    if lost := [name for name, one in kept.items() if one.grad_fn not in seen]:
        hint = (
            "add it in forward, which then returns the whole loss, or in training_step; detach() it if it is a figure"
        )
        log.warning("%s (%d in all) has a gradient, and is no part of the loss: %s", lost[0], len(lost), hint)


def is_term(value: Any) -> bool:
    """Return whether an attribute may be a part of a loss: a number that a pass has computed with a gradient."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None
