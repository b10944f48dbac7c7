"""Images in class folders, cut into shards: each process holds its own in memory, or on its device.

DATA/train/CLASS/*.png (or jpg, webp, ...), and where there are any DATA/val/ and DATA/test/, which every process
holds whole. What `get_dataset` gives for training is the folder as such: global indices, files read when asked for.
A loader that finds a method `shard` on it calls `dataset.shard(world)` in each process and goes on with what comes
back: this process's share in memory, fetched by whole batches. Its attribute `local` says whose its indices are:

- False: all samples are here, under the same global indices.
- True: they are the process's own, 0 to `len()` - 1, and what another process holds cannot be fetched. Shares differ
  by one sample where the processes do not divide the samples. A run goes on exactly on the same number of processes
  only: for another the shards are cut anew.
"""

import math
import struct
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset, pil_loader

from lib.utils.data.permutation import order
from lib.utils.data.tensors import Tensors
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

SCALED = Pixels((0.5,), (0.5,))  # from -1 to 1
# What Pillow raises for damaged files.
BROKEN = (OSError, SyntaxError, TypeError, ValueError, struct.error, Image.DecompressionBombError)


def add_args(parser):
    parser.add_argument(
        "-sharded_pct",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the training samples that each process holds, up to 1; 0: 1 / number of processes",
    )
    parser.add_argument(
        "-sharded_in",
        choices=("memory", "device"),
        default="memory",
        help="where each process holds its shard: main memory, or its own device",
    )
    parser.set_defaults(arch="resnet", channels=3)


def describe(args) -> dict[str, int]:
    """Number of classes and image size (the shorter side of the first image, pixels) of the training folder."""
    root = Path(args.data) / "train"
    with _needed(root):
        classes, _ = find_classes(str(root))
        first, _ = make_dataset(str(root), {classes[0]: 0}, IMG_EXTENSIONS)[0]
    with _readable(first), Image.open(first) as image:
        return {"num_classes": len(classes), "image_size": min(image.size)}


def get_dataset(args) -> dict[str, Tensors | DatasetFolder]:
    """Images (channels, image_size, image_size), uint8, and class numbers, each item always the same.

    On the device the pixels become floats from -1 to 1.

    An image is cropped at its centre to a square and resized when it is read. Raises UsageError naming the flag, the
    folder or the file that does not fit.
    """
    _check(args)
    data, loader = Path(args.data), partial(_pixels, channels=args.channels, size=args.image_size)
    train = ShardedFolder(data / "train", loader, seed=args.seed, pct=args.sharded_pct, place=args.sharded_in)
    if len(train.classes) > args.num_classes:
        raise UsageError(f"-num_classes {args.num_classes}: {train.root} has {len(train.classes)} class folders")
    others = [split for split in ("val", "test") if (data / split).is_dir()]
    return {"train": train, **{split: _whole(data / split, train) for split in others}}


class ShardedFolder(DatasetFolder):
    """The images of class folders, each read when it is asked for; `shard(world)` gives one process's share."""

    fixed, on_device = True, SCALED

    def __init__(self, root: Path, loader: Callable, *, seed: int, pct: float, place: str):
        with _needed(root):
            super().__init__(str(root), loader, IMG_EXTENSIONS)
        self.seed, self.pct, self.place = seed, pct, place

    def shard(self, world) -> Tensors:
        """The share of process world.rank of world.size, loaded. Raises UsageError if it would be empty."""
        if len(self) < world.size:
            raise UsageError(f"{world.size} processes: {self.root} has {len(self)} images, one for each is needed")
        pct = self.pct or 1 / world.size
        held = DistributedShardedDataset(
            self.root,
            rank=world.rank,
            world_size=world.size,
            samples_pct_per_replica=pct,
            device_id=world.device if self.place == "device" else "cpu",
            seed=self.seed,
            shuffle=pct < 1,  # all samples: under their global indices
            loader=self.loader,
        )
        return _in_memory(held, local=pct < 1)


class DistributedShardedDataset(DatasetFolder):
    """One rank's share of a folder of class folders, loaded once: cycling_utils' dataset, by the same arguments.

    Of the n samples, shuffled by the seed alike on all ranks, a rank takes every world_size-th and then, if
    `samples_pct_per_replica` (a fraction of n, above 0 and up to 1) asks for more, those of the ranks after it. With
    1 / world_size every sample is on exactly one rank, and shares differ by one sample at most; otherwise each is
    ceil(pct * n) samples, all different.

    The load transforms are applied once, the getitem transforms at each access. With a `device_id` ("cpu" is one)
    `samples` and `targets` are stacked into one tensor each and kept there; without it they are lists. Indices are
    this rank's own: go through them with an `InterruptableSampler`. Raises ValueError for a share that cannot be.
    """

    local = True

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


def _check(args):
    if not 0 <= args.sharded_pct <= 1:
        raise UsageError(f"-sharded_pct {args.sharded_pct}: a fraction from 0 to 1 is needed")
    if args.sharded_in == "device" and args.workers:
        raise UsageError(f"-sharded_in device goes with -workers 0, not {args.workers}: samples need no loading")
    if args.channels not in (1, 3):
        raise UsageError(f"-channels {args.channels}: -dataset sharded reads images in 1 (grey) or 3 (colour)")


def _whole(root, train):
    """A split that every process holds whole, its class numbers those of the training folder."""
    with _needed(root):
        classes, _ = find_classes(str(root))
    unknown = sorted(set(classes) - set(train.classes))
    if unknown:
        raise UsageError(f"-data {root.parent}: {root / unknown[0]} is a class that train has not")
    numbers = [train.class_to_idx[name] for name in classes]
    with _needed(root):
        held = DistributedShardedDataset(
            root,
            rank=0,
            world_size=1,
            samples_pct_per_replica=1,
            device_id="cpu",
            shuffle=False,
            loader=train.loader,
            target_load_transform=numbers.__getitem__,
        )
    return _in_memory(held, local=False)


def _in_memory(held, local):
    dataset = Tensors(held.samples, held.targets, on_device=SCALED)
    dataset.local = local
    return dataset


def _pixels(path, channels, size):
    """The image as uint8, (channels, size, size)."""
    with _readable(path), Image.open(path) as image:
        image = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (size, size))
    return torch.from_numpy(np.array(image)).reshape(size, size, channels).permute(2, 0, 1).contiguous()


@contextmanager
def _readable(path):
    try:
        yield
    except BROKEN as error:
        raise UsageError(f"{path}: not a readable image ({error}); mend it, or take it away") from None


@contextmanager
def _needed(root):
    """What torchvision says of a folder without class folders or without images, as the user's to mend."""
    try:
        yield
    except OSError as error:
        needed = "-dataset sharded reads DATA/train/CLASS/*.png and, if there, DATA/val and DATA/test"
        raise UsageError(f"-data {root.parent}: {' '.join(str(error).split())}; {needed}") from None


def _applied(transform, value):
    return transform(value) if transform else value
