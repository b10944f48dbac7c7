"""How an epoch is ordered, and cut into steps and micro-batches, and which of them are this rank's.

Everything here is a function of (seed, epoch, step, micro-batch): nothing is stored, replayed or repeated to fill up.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def order(samples: int, seed: int, epoch: int, shuffle: bool = True, block: int = 1) -> Tensor:
    """Return the indices of an epoch's samples, (samples,) int64, in the order of torch's DistributedSampler.

    Blocks of so many neighbours stay together. 10^8 samples take some seconds an epoch, and 800 MB in each process.
    """
    if not shuffle:
        return torch.arange(samples, device="cpu")
    blocks = torch.randperm(-(-samples // block), generator=torch.Generator().manual_seed(seed + epoch), device="cpu")
    indices = (blocks[:, None] * block + torch.arange(block, device="cpu")).flatten() if block > 1 else blocks
    return indices[indices < samples] if samples % block else indices


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are cut into steps of `batch` and micro-batches of `micro` samples at most."""

    samples: int
    batch: int
    micro: int
    drop_last: bool = False
    data: dict = field(default_factory=dict)  # what the samples are: fingerprint.describe
    engine: str = "exact"  # which one sums the micro-batches: a module of lib/core
    total_steps: int = 0  # of the run

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.samples // self.batch if self.drop_last else math.ceil(self.samples / self.batch)

    @property
    def epochs(self) -> int:
        """Epochs of the run; -steps may end it within the last one."""
        return math.ceil(self.total_steps / self.steps)

    def cut(self, step: int) -> list[range]:
        """Return the micro-batches of an epoch's step, of all ranks, as places in the epoch's order.

        Their sizes differ by one at most. A short last batch is spread over as many micro-batches as leave two
        samples in each, as BatchNorm needs two. None holds more than `micro`, what a device has memory for: so one
        sample stays alone where there are no others, and where an odd number of samples is cut by two.
        """
        start = step * self.batch
        count = min(self.batch, self.samples - start)
        parts = max(math.ceil(count / self.micro), min(math.ceil(self.batch / self.micro), count // 2))
        edges = [start + number * count // parts for number in range(parts + 1)]
        return [range(*pair) for pair in itertools.pairwise(edges)]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this rank: where it stands in the run, and its samples."""

    step: int  # of the epoch
    number: int  # within the step, over all ranks; of padding the last one's, of which it is a copy
    indices: list[int]  # of its samples; higher by the length of the dataset each time that one comes again
    count: int  # samples that count; 0 for padding
    step_samples: int  # samples of the whole step, over all ranks
    step_parts: int  # micro-batches of the whole step, over all ranks
    first: bool  # of this rank's in the step
    last: bool


def rank_share(count: int, rank: int, size: int, round_robin: bool = False) -> range:
    """Return which of `count` micro-batches a rank computes, rank 0 if there is one: in a row, or in turn."""
    first, end = (math.ceil(place * count / size) for place in (rank, rank + 1))  # as many as others, or one fewer
    return range(rank, count, size) if round_robin else range(first, end)
