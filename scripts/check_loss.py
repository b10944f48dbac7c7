"""Finds losses that stretch (N, 1) and (N,) to (N, N), lack a term, or are means over numbers that nobody counts."""

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lib.core import loss as losses
from lib.utils.checkpoint.state import unwrap
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)

seen: set[type] = set()  # classes of losses that were checked
sizes: WeakKeyDictionary[Any, dict] = WeakKeyDictionary()  # by trainer: of how many values its means are at first
LINEAR = {"AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0"}
STEPS = 10  # of a start whose losses are watched
OTHER_SIZE = 0.05  # share by which the sizes of means may differ, as of those over samples that a model draws
MEAN = (
    "the loss has a mean over %g values in one micro-batch of %d samples, and over %g in another: it changes with "
    "the number of micro-batches and processes: let count_targets return their number"
)


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


def check_pass(trainer: Any, loss: Tensor, count: Tensor | int) -> None:
    """Look at what training_step has returned, and at its targets' `count`, before a micro-batch's backward pass.

    Warns of a mean over another number of values in one micro-batch than in another where `count` is that of samples.
    """
    micro_batch, steps = trainer.micro_batch, trainer.checks.steps
    if not steps and micro_batch.last:
        warn_lost_terms(trainer, loss)
    known = sizes.setdefault(trainer, {})
    is_watched = steps < STEPS and micro_batch.step_parts > 1 and micro_batch.count and trainer.world.is_main
    if not is_watched or MEAN in known:
        return
    found = []
    with contextlib.suppress(Exception):  # of a graph that torch shows in another way
        found = list(sizes_of_means(loss.grad_fn))
    for place, size in enumerate(found):
        before = known.setdefault((loss.grad_fn.name(), len(found), place, micro_batch.count), size)
        if abs(size - before) > OTHER_SIZE * before and MEAN not in known:
            known[MEAN] = float(count) == micro_batch.count  # waits for the device, once
            if known[MEAN]:
                log.warning(MEAN, before, micro_batch.count, size)


def sizes_of_means(node: Any, depth: int = 30) -> Iterator[float]:
    """Yield over how many values each mean in a loss is, as far as the graph of its gradient shows that."""
    below = [one for one, _ in getattr(node, "next_functions", ()) if one is not None]
    if not below or not depth:
        return
    name, of_input = node.name(), getattr(below[0], "_input_metadata", ())
    if name == "MeanBackward0":
        yield node._saved_self_sym_numel
    elif getattr(node, "_saved_reduction", None) == 1 and of_input:
        shape = of_input[node.next_functions[0][1]].shape
        yield math.prod(shape) / (shape[1] if name.startswith("NllLoss") and len(shape) > 1 else 1)
    elif name == "DivBackward0" and is_sum(below[0]):
        other = node._saved_other
        if len(below) == 1 and other.numel() == 1 and other.device.type == "cpu":  # else it would wait for a device
            yield float(other)
    elif name in LINEAR or name == "DivBackward0":
        for one in below:
            yield from sizes_of_means(one, depth - 1)


def is_sum(node: Any) -> bool:
    """Return whether a node of a gradient's graph is a sum over all values, of a loss or by itself."""
    return node.name() in ("SumBackward0", "NansumBackward0") or getattr(node, "_saved_reduction", None) == 2


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
