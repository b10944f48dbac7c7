"""How an epoch is cut into steps and micro-batches, and which of them are this rank's.

Everything here is a function of (seed, epoch, step, micro-batch): nothing is stored, nothing replayed, and no sample
is repeated to fill a share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.utils.distributed import World


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are cut into steps of `batch` and micro-batches of `micro` samples, shared by
    `ranks`."""

    samples: int
    batch: int
    micro: int
    drop_last: bool = False
    ranks: int = 1

    @property
    def pass_size(self) -> int:
        """Samples of one forward pass: `micro`, or fewer where there are more ranks than micro-batches."""
        return self.micro if self.batch >= self.micro * self.ranks else divisor(self.batch, self.batch // self.ranks)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.samples // self.batch if self.drop_last else math.ceil(self.samples / self.batch)

    def step_in_epoch(self, state) -> int:
        """Return how many steps of its epoch a run has done; `state` holds its epoch and step."""
        return state.step - state.epoch * self.steps

    def spans(self, step: int) -> "Spans":
        """Return the micro-batches of an epoch's step, of all ranks, as positions in the epoch's order.

        A short last batch is spread over as many micro-batches as leave two samples in each, as BatchNorm needs two;
        none holds more than `micro`, what a device has memory for.
        """
        start = step * self.batch
        count = min(self.batch, self.samples - start)
        parts = self.batch // self.pass_size
        if count < self.batch:
            parts = max(math.ceil(count / self.micro), min(parts, count // 2))
        return Spans(start, count, parts)


@dataclass(frozen=True)
class Spans(Sequence):
    """`places` from `start` on, cut into `parts` ranges of equal length, or one place more.

    A range is made when it is wanted: a rank needs its own, of the thousands of a large run.
    """

    start: int
    places: int
    parts: int

    def __len__(self):
        return self.parts

    def __getitem__(self, number: int) -> range:
        number = range(self.parts)[number]
        first, end = (self.start + part * self.places // self.parts for part in (number, number + 1))
        return range(first, end)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this rank: where it stands in the run, and its samples."""

    step: int  # of the epoch
    number: int  # within the step, over all ranks
    indices: list[int]  # of its samples in the dataset
    count: int  # samples that count; 0 for padding
    step_samples: int  # samples of the whole step, over all ranks
    first: bool  # of this rank's in the step
    last: bool


def rank_share(count: int, world: World) -> range:
    """Return which of a step's `count` micro-batches this rank computes: consecutive ones, as many as others or one
    fewer."""
    return range(world.rank * count // world.size, (world.rank + 1) * count // world.size)


def divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    return next(part for part in range(at_most, 0, -1) if number % part == 0)
