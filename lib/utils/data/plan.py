"""How an epoch is cut into steps and micro-batches, and which of them are this rank's.

Everything here is a function of (seed, epoch, step, micro-batch): nothing is stored, nothing replayed, and no sample
is repeated to fill a share.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
    def grain(self) -> int:
        """Samples of a micro-batch: `micro`, or fewer where there are more ranks than micro-batches."""
        return self.micro if self.batch >= self.micro * self.ranks else divisor(self.batch, self.batch // self.ranks)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.samples // self.batch if self.drop_last else math.ceil(self.samples / self.batch)

    def step_in_epoch(self, state) -> int:
        """Return how many steps of its epoch a run has done; `state` holds its epoch and step."""
        return state.step - state.epoch * self.steps

    def cut(self, step: int) -> list[tuple[int, int]]:
        """The micro-batches of an epoch's step: (start, stop) positions in the epoch's order.

        A short last batch is spread over as many micro-batches as leave two samples in each, as BatchNorm needs two;
        none holds more than `micro`, what a device has memory for.
        """
        start, grain = step * self.batch, self.grain
        count = min(self.batch, self.samples - start)
        if count == self.batch:
            return [(start + at, start + at + grain) for at in range(0, count, grain)]
        parts = max(math.ceil(count / self.micro), min(self.batch // grain, count // 2))
        edges = [start + part * count // parts for part in range(parts + 1)]
        return list(itertools.pairwise(edges))


class Key(NamedTuple):
    """One micro-batch of this rank: where it stands in the run, and its samples."""

    step: int  # of the epoch
    micro: int  # of the step, over all ranks
    count: int  # samples that count; 0: another's sample, borrowed so that this rank takes part
    of: int  # samples of the whole step, over all ranks
    first: bool  # of this rank's in the step
    last: bool
    indices: list[int]


def share(step: int, parts: list, order, world: World) -> Iterator[Key]:
    """The keys of this rank's share of a step's micro-batches."""
    low, high = (rank * len(parts) // world.size for rank in (world.rank, world.rank + 1))
    of, number = parts[-1][1] - parts[0][0], math.ceil(len(parts) / world.size)
    begin, end = parts[-1]  # the largest: two of its samples are enough for BatchNorm
    yield from turns(step, parts[low:high], low, (begin, min(begin + 2, end)), order, of=of, number=number)


def turns(step: int, parts: list, first: int, spare: tuple, order, *, of: int, number: int) -> Iterator[Key]:
    """A key for each of the parts, micro-batches from the `first` on, and for as many more as make up the `number`
    that all ranks take, as sharded models need it: those borrow the samples at `spare` and count 0."""
    for turn in range(number):
        begin, end = parts[turn] if turn < len(parts) else spare
        count = end - begin if turn < len(parts) else 0
        yield Key(step, first + turn, count, of, turn == 0, turn == number - 1, order[begin:end].tolist())


def divisor(number: int, at_most: int) -> int:
    """The largest divisor of a number up to a limit."""
    return next(part for part in range(at_most, 0, -1) if number % part == 0)
