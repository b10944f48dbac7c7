"""Compares the loss and the metrics of a few samples with their means over two parts of these samples.

A step is cut into micro-batches, and an evaluation into batches. What is no mean over samples, as the root of a
mean, a Dice loss, or one that compares the samples of a batch, has another value where they are cut in another way.
A forked process computes it, whose changes and output are lost: so not on GPUs.
"""

import contextlib
import copy
import inspect
import logging
import math
import os
import resource
import stat
import sys
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from lib.core import loss
from lib.utils import seeding
from lib.utils.checkpoint.state import find_parts
from lib.utils.data import fetch
from lib.utils.data.loader import Loader
from lib.utils.data.plan import MicroBatch
from lib.utils.monitoring import metrics
from scripts import check_samples

log = logging.getLogger(__name__)
ROWS = 24  # samples, a third of them in the first part
METHODS = "training_step", "evaluation_step", "compute_metrics", "count_targets"
# The checksum of the source of these methods and of the loss. Others are compared, which takes a tenth of a second.
AS_SHIPPED = 0x27FCEC6A
SAME = 5e-4  # share by which rounding, or what a detector draws of its boxes, may part two values
LOSS = (
    "the loss of %d samples is %.6g, and the mean over two parts of them %.6g: it changes with the number of "
    "micro-batches, and so of processes: let count_targets return what it is a mean over, or choose -micro_batch"
)
METRIC = (
    "the metric %s of %d samples is %.6g, and of two parts of them %.6g: it changes with how evaluations are cut "
    "into batches: return the sums that it is made of, each as a Ratio(sum, count)"
)


def warn(trainer: Any) -> None:
    """Warn of metrics that change with the cut of a batch, and of such a loss, unless -micro_batch says the cut."""
    args, world = trainer.args, trainer.world
    is_plain = sys.platform == "linux" and world.device.type == "cpu" and args.parallel == "ddp" and not args.compile
    found = None
    with contextlib.suppress(Exception):  # of a model without a source or a signature
        if world.is_main and is_plain and is_own(trainer):
            split = (*trainer.val_splits, "train")[0]  # whose samples are not drawn
            found = check_samples.in_fork(compare, trainer, trainer.loaders[split])
    for name, values in (found or {}).items():
        if name != "loss":
            log.warning(METRIC, name, *values)
        elif not args.micro_batch:
            log.warning(LOSS, *values)


def is_own(trainer: Any) -> bool:
    """Return whether the loss or the metrics may be others than the template has: by a plugin, or an edit of it."""
    methods = [getattr(type(trainer), name) for name in METHODS]
    functions = loss.forward, loss.compute_metrics, loss.count_targets, loss.CrossEntropy.forward
    sources = "".join(inspect.getsource(one) for one in (*methods, *functions))
    returns_loss = {*loss.signature(type(loss.unwrap(trainer.model)).forward).parameters} & {*loss.TARGETS}
    is_known = type(trainer.loss) in (loss.CrossEntropy, *loss.PAIRWISE) and not returns_loss
    return not is_known or zlib.crc32(sources.encode()) != AS_SHIPPED


class Reader:
    """Reads the micro-batches of a loader in this process."""

    def __init__(self, loader: Loader):
        self.fetch = fetch.Fetch(loader.dataset, loader.seed)

    def __call__(self, epoch: int, micro_batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        return (self.fetch[epoch, one] for one in micro_batches)


def batches_of(loader: Loader) -> list[tuple[MicroBatch, Any]]:
    """Return samples as one batch, as two, and as one again, as an epoch has them."""
    count, few, cut = min(ROWS, len(loader.dataset)), copy.copy(loader), []
    rows = [number * (len(loader.dataset) - 1) // max(1, count - 1) for number in range(count)]
    for number, part in enumerate((rows, rows[: count // 3], rows[count // 3 :], rows)):
        cut.append(MicroBatch(0, number, part, len(part), len(part), 1, first=True, last=True))
    vars(few).update(fetcher=Reader(loader), micro_batches=lambda *_: cut)
    return [*few.epoch(0)]


def compare(trainer: Any, loader: Loader) -> dict[str, tuple[int, float, float]]:
    """Return the loss and the metrics that are not the mean over the parts: the samples, and both values.

    For a forked process. Not what is drawn, and so differs each time.
    """
    leave_alone()
    torch.set_num_threads(1)
    batches = batches_of(loader)
    if not check_samples.are_alike(batches[0][1], batches[-1][1]):
        return {}
    found = {}
    for measure in (measure_loss, measure_metrics):
        with contextlib.suppress(Exception):  # where training fails, too, or only here, as for want of a file
            measured = [measure(trainer, *one) for one in batches]
            whole, parts, again = (mean(measured[places]) for places in (slice(1), slice(1, 3), slice(3, 4)))
            for name, value in whole.items():
                if is_same(value, again[name]) and not is_same(value, parts[name]):
                    found.setdefault(name, (batches[0][0].count, value, parts[name]))
    return found


def measure_loss(trainer: Any, micro_batch: MicroBatch, batch: Any) -> tuple[dict[str, Any], int]:
    """Return the loss of a batch, by itself: without dropout and the statistics of norm layers."""
    for module in modules_of(trainer):
        module.training = not isinstance(module, _NormBase | _DropoutNd)
    trainer.micro_batch, trainer.checks = micro_batch, SimpleNamespace()
    seeding.seed(seeding.PASS, trainer.args.seed, micro_batch.number)
    value = trainer.training_step(copy.deepcopy(batch))
    count = trainer.count_targets(batch, micro_batch.count)
    return {"loss": metrics.Ratio(value.detach() * count, count)}, micro_batch.count


@torch.no_grad()
def measure_metrics(trainer: Any, micro_batch: MicroBatch, batch: Any) -> tuple[dict[str, Any], int]:
    """Return the metrics of a batch."""
    for module in modules_of(trainer):
        module.training = False
    trainer.micro_batch, trainer.is_evaluating = micro_batch, True
    seeding.seed(seeding.EVALUATION, trainer.args.seed, micro_batch.number)
    count = trainer.count_targets(batch, micro_batch.count)
    return trainer.evaluation_step(trainer.model, copy.deepcopy(batch), count), micro_batch.count


def modules_of(trainer: Any) -> Iterator[nn.Module]:
    """Yield all modules of a trainer, of the model and others."""
    for root in find_parts(trainer).modules.values():
        yield from root.modules()


def mean(measured: list[tuple[dict[str, Any], int]]) -> dict[str, float]:
    """Return the figures of some batches together, as an evaluation has them."""
    sums = metrics.Sums(alone=True)
    for figures, samples in measured:
        sums.update(figures, samples)
    return metrics.means(sums.reduce())


def is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME, abs_tol=1e-6) or not math.isfinite(one + other)


def leave_alone() -> None:
    """Let this process write and send nothing, whatever a user's code does with files that are open."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nothing, number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
