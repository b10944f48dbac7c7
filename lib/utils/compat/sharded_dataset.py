"""cycling_utils' dataset of class folders of which each process holds its own share in memory."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

from lib.utils.data.plan import order


class DistributedShardedDataset(DatasetFolder):
    """One rank's share of a folder of class folders, loaded once.

    Of the n samples, shuffled by the seed, a rank takes every world_size-th and then, if `samples_pct_per_replica` (a
    fraction of n) asks for more, those of the ranks after it. With 1 / world_size each sample is on exactly one rank.

    The load transforms are applied once, the getitem transforms at each access. With a `device_id` ("cpu" is one)
    `samples` and `targets` are stacked into one tensor each and kept there; without it they are lists. Indices are
    this rank's own: go through them with an `InterruptableSampler`. Raises ValueError for a share that cannot be.
    """

    def __init__(
        self,
        root: str | Path,
        rank: int,
        world_size: int,
        samples_pct_per_replica: float,
        device_id: str | int | torch.device | None = None,
        seed: int = 0,
        shuffle: bool = True,
        loader: Callable = pil_loader,
        extensions: tuple[str, ...] | None = IMG_EXTENSIONS,
        sample_load_transform: Callable | None = None,
        target_load_transform: Callable | None = None,
        sample_getitem_transform: Callable | None = None,
        target_getitem_transform: Callable | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ):
        super().__init__(str(root), loader, None if is_valid_file else extensions, is_valid_file=is_valid_file)
        self.sample_getitem_transform = sample_getitem_transform
        self.target_getitem_transform = target_getitem_transform
        places = shard_places(len(self.samples), rank, world_size, pct=samples_pct_per_replica)
        files = [self.samples[index] for index in order(len(self.samples), seed, 0, shuffle).take(places).tolist()]

        self.samples = [_applied(sample_load_transform, loader(path)) for path, _ in files]
        self.targets = [_applied(target_load_transform, target) for _, target in files]
        if device_id is not None:
            self.samples = torch.stack(self.samples).to(device_id)
            self.targets = torch.stack([torch.as_tensor(target) for target in self.targets]).to(device_id)

    def __getitem__(self, index: int) -> tuple:
        sample = _applied(self.sample_getitem_transform, self.samples[index])
        return sample, _applied(self.target_getitem_transform, self.targets[index])


def shard_places(n: int, rank: int, world_size: int, *, pct: float) -> Tensor:
    """Which of n places a rank holds, (k,) int64: every world_size-th, then those of the ranks after it."""
    if not (0 <= rank < world_size and 0 < pct <= 1):
        raise ValueError(f"rank {rank} of {world_size} with a share of {pct}: 0 <= rank < world_size, 0 < share <= 1")
    everything = torch.arange(n)
    if pct == 1:
        return everything  # in its own order on every rank
    turns = [everything[(rank + turn) % world_size :: world_size] for turn in range(world_size)]
    exact = math.isclose(pct * world_size, 1)
    places = turns[0] if exact else torch.cat(turns)[: math.ceil(pct * n - 1e-9)]
    if not len(places):
        raise ValueError(f"rank {rank} of {world_size} has no share of {n} samples: more are needed, or fewer ranks")
    return places


def _applied(transform, value):
    return transform(value) if transform else value
