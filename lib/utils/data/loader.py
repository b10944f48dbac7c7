"""The samples of a split, fetched and put on the device: this rank's micro-batches, in their order."""

import contextlib
import functools
import logging
import math
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, Subset

from lib.utils import seeding, watchdog
from lib.utils.data import fetch, tensors
from lib.utils.data.plan import MicroBatch, Plan, order, rank_share
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
SPLIT = re.compile(r"train|test|val(_\w+)?")
COMPUTING = "computing a batch, summing over the processes, or compiling"


@dataclass(frozen=True)  # its processes have the dataset already: another one would be read by none of them
class Loader:
    """The samples of a split, shared out to the ranks by whole micro-batches; `round_robin` as in `rank_share`."""

    dataset: fetch.MapDataset
    plan: Plan
    world: World
    seed: int
    shuffle: bool
    workers: int
    round_robin: bool = False
    block: int = 1  # neighbours that stay together when shuffled
    stream: int = seeding.PASS  # of what is drawn for a micro-batch from its arrival on

    @functools.cached_property
    def fetcher(self) -> fetch.Fetcher:
        """Make the reader of the samples, once."""
        return fetch.Fetcher(self.dataset, self.seed, self.workers, pin=self.world.device.type == "cuda")

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches of an epoch, in order, each with its batch on the device."""
        for micro_batch, batch in self.fetcher(epoch, self.micro_batches(epoch, first_step)):
            watchdog.begin(COMPUTING)
            batch = tensors.to_device(batch, self.world.device)
            step = epoch * self.plan.steps + micro_batch.step
            if on_device := fetch.option(self.dataset, "on_device"):
                self.fetcher.fetch.set_epoch(epoch)  # a loader process has a dataset of its own
                draws = seeding.uniform(self.seed, epoch, micro_batch.indices)
                seeding.seed(self.stream, self.seed, step, micro_batch.number, 1, device=self.world.device)
                batch = on_device(batch, tensors.to_device(draws, self.world.device))
            seeding.seed(self.stream, self.seed, step, micro_batch.number, 2, device=self.world.device)
            yield micro_batch, tensors.to_device(batch, self.world.device)
        watchdog.begin(COMPUTING)

    def micro_batches(self, epoch: int, first_step: int = 0) -> Iterator[MicroBatch]:
        """Yield what `epoch` will fetch, without fetching it."""
        own = fetch.draw_order(self.dataset, self.seed, epoch) if self.shuffle else None
        indices = order(self.plan.samples, self.seed, epoch, self.shuffle, self.block) if own is None else own
        if len(indices) != self.plan.samples:
            raise UsageError(f"the order of an epoch has {len(indices)} places for {self.plan.samples} samples")
        for step in range(first_step, self.plan.steps):
            parts = self.plan.cut(step)
            mine = rank_share(len(parts), self.world.rank, self.world.size, self.round_robin)
            rounds = math.ceil(len(parts) / self.world.size)  # the same on all ranks: each joins every collective
            for turn in range(rounds):
                padding = turn >= len(mine)  # the step's last micro-batch again: as finite as that is
                number = len(parts) - 1 if padding else mine[turn]
                yield MicroBatch(
                    step=step,
                    number=number,
                    indices=indices[parts[number].start : parts[number].stop].tolist(),
                    count=0 if padding else len(parts[number]),
                    step_samples=parts[-1].stop - parts[0].start,
                    step_parts=len(parts),
                    first=turn == 0,
                    last=turn == rounds - 1,
                )


def splits(dataset: Any, name: str, overfit: int | None = None) -> dict[str, fetch.MapDataset]:
    """Return what get_dataset gave as {"train": ..., "val": ..., "test": ...}; val_NAME are more validation sets.

    `overfit`: so many training samples, evaluated on as well. Raises UsageError for what cannot be trained on.
    """
    parts = dataset if isinstance(dataset, dict) else {"train": dataset}
    if isinstance(dataset, (tuple, list)) or "train" not in parts or not all(map(SPLIT.fullmatch, map(str, parts))):
        given = f"the splits {sorted(parts)}" if isinstance(dataset, dict) else f"a {type(dataset).__name__}"
        wanted = "a dataset or a dict of splits is needed: train is required, val, val_NAME and test may be there"
        raise UsageError(f"-dataset {name}: get_dataset returns {given}; {wanted}")
    for split, part in parts.items():
        is_table = hasattr(part, "iloc") or (isinstance(part, dict) and 0 not in part)  # columns, and no samples
        if isinstance(part, IterableDataset | tuple) or is_table or not {"__len__", "__getitem__"} <= {*dir(part)}:
            kind = type(part).__name__
            raise UsageError(f"-dataset {name}: its {split} split is a {kind}, not data with len() and [index]")
        if len(part) == 0:
            raise UsageError(f"-dataset {name}: its {split} split is empty")
        for one in fetch.nested(part, wrapped=False):
            first = next(iter(one.indices), 0) if isinstance(one, Subset) else 0
            if "bool" in str(getattr(first, "dtype", type(first))):  # which are read as the samples 1 and 0
                raise UsageError(f"-dataset {name}: its {split} split has a Subset of True and False: give numbers")
    if overfit is None:
        return parts
    whole, count = parts["train"], min(overfit, len(parts["train"]))
    few = Subset(whole, [number * len(whole) // count for number in range(count)])  # of all classes
    vars(few)["sampler"] = None  # theirs draws from all samples
    return {"train": few, "val": few}


def open_loaders(
    splits: dict[str, fetch.MapDataset], plan: Plan, world: World, args: Namespace, stack: contextlib.ExitStack
) -> dict[str, Loader]:
    """Return a Loader for each split; their worker processes end with the stack."""
    for line in fetch.option(splits["train"], "log_lines", ()) if world.is_main else ():
        log.warning("%s", line)
    idle = world.size - len(plan.cut(0))
    if world.is_main and idle > 0:
        log.warning("%d of %d processes idle: lower -micro_batch (and -allow_change it)", idle, world.size)
    loaders = {}
    for name, part in splits.items():
        loaders[name] = Loader(
            part,
            plan if name == "train" else Plan(len(part), len(part), plan.micro),
            world,
            seed=args.seed,
            shuffle=args.shuffle and name == "train",
            workers=fetch.count_workers(args, name, part, world),
            round_robin=args.parallel == "fsdp",  # sharded models compute in turns of all ranks
            block=args.shuffle_block,
            stream=seeding.PASS if name == "train" else seeding.EVALUATION,
        )
        stack.callback(loaders[name].fetcher.close)
    return loaders
