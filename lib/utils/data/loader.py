"""Which samples a step holds, which of its micro-batches are this rank's, and how they are fetched.

Everything here is a function of (seed, epoch, step, micro-batch): nothing is stored, nothing replayed, and no sample
is repeated to fill a share.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils.data import Dataset, IterableDataset, Subset

from lib.utils.data import fetch, permutation, prefetch
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
AHEAD = 4096  # samples that keys are made for at once


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


class Loader:
    """The samples of a split, dealt out to the ranks micro-batch by micro-batch; all take equally many turns."""

    def __init__(self, dataset: Dataset, plan: Plan, world: World, *, seed: int, shuffle: bool, workers: int):
        self.dataset, self.plan, self.world = dataset, plan, world
        self.seed, self.shuffle = seed, shuffle
        self.fetched = fetch.Fetcher(dataset, seed, workers, pin=world.device.type == "cuda")
        self.finish = prefetch.Finish(dataset, seed, world.device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Key, object]]:
        """This rank's micro-batches of an epoch from a step on, in order, on the device."""
        made = in_blocks(self.keys(epoch, first_step), max(1, AHEAD // self.plan.grain))
        keys, wanted = itertools.tee(made)
        return prefetch.ready(zip(keys, self.fetched(epoch, wanted), strict=True), epoch, self.finish)

    def keys(self, epoch: int, first_step: int = 0) -> Iterator[Key]:
        """What `epoch` will fetch, without fetching it."""
        order = permutation.order(self.plan.samples, self.seed, epoch, self.shuffle)
        for step in range(first_step, self.plan.steps):
            yield from share(step, self.plan.cut(step), order, self.world)

    def sample(self):
        """The first micro-batch of the run: what training data looks like."""
        key = next(self.keys(0))
        return self.finish(0, key.indices, next(iter(self.fetched(0, [key]))))

    def indices(self, epoch: int, step: int) -> list[int]:
        """The samples of one step over all ranks, by their index in the dataset."""
        parts = self.plan.cut(step)
        order = permutation.order(self.plan.samples, self.seed, epoch, self.shuffle)
        return order[parts[0][0] : parts[-1][1]].tolist()


def in_blocks(items: Iterator, size: int) -> Iterator:
    """The same items, made `size` at once: a processor forgets code that runs once a step, and is slow to take it up
    again."""
    while block := list(itertools.islice(items, size)):
        yield from block


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


def splits(dataset, name: str, overfit: int | None = None) -> dict[str, Dataset]:
    """What get_dataset gave as {"train": ..., "val": ..., "test": ...}; to `overfit` the first so many training
    samples, evaluated on as well. Raises UsageError for what cannot be trained on."""
    if isinstance(dataset, (tuple, list)):
        raise UsageError(f"-dataset {name}: get_dataset gives a {type(dataset).__name__}: a dataset or a dict of "
                         "splits is needed, as {'train': ..., 'val': ...}")  # fmt: skip
    parts = dataset if isinstance(dataset, dict) else {"train": dataset}
    if "train" not in parts or not set(parts) <= {"train", "val", "test"}:
        raise UsageError(
            f"-dataset {name}: gives the splits {sorted(parts)}; train, val and test are known, train needed"
        )
    for split, part in parts.items():
        if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            kind = type(part).__name__
            raise UsageError(
                f"-dataset {name}: its {split} split is a {kind}; a dataset with len() and [index] is needed"
            )
        if len(part) == 0:
            raise UsageError(f"-dataset {name}: its {split} split is empty")
    if overfit is None:
        return parts
    few = Subset(parts["train"], range(min(overfit, len(parts["train"]))))
    return {"train": few, "val": few}


@contextlib.contextmanager
def opened(*parts):
    """The loaders that `get_loaders` gives; their worker processes end with the block, however it ends."""
    loaders = get_loaders(*parts)
    try:
        yield loaders
    finally:
        for one in loaders.values():
            one.fetched.close()


def get_loaders(splits: dict[str, Dataset], plan: Plan, world: World, args) -> dict:
    """A Loader for each split: "train" by the plan, the others in their order, a micro-batch for each rank at a
    time."""
    if world.is_main and plan.grain < plan.micro:
        log.warning(
            "more processes than micro-batches: cut finer, %d samples instead of %d; the order of the samples stays "
            "exact, dropout and BatchNorm see other micro-batches", plan.grain, plan.micro,
        )  # fmt: skip
    loaders = {}
    for name, part in splits.items():
        trained = name == "train"
        loaders[name] = Loader(
            part,
            plan if trained else Plan(len(part), plan.micro * world.size, plan.micro),
            world,
            seed=args.seed,
            shuffle=args.shuffle and trained,
            workers=fetch.workers(0 if args.debug else args.workers, part, world),
        )
    return loaders
