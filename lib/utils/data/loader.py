"""The samples of a split, fetched and put on the device: this rank's micro-batches, in their order."""

import contextlib
import itertools
import logging
from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset, Subset

from lib.utils.data import fetch, permutation, prefetch
from lib.utils.data.plan import Key, Plan, share
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
AHEAD = 4096  # samples that keys are made for at once


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
