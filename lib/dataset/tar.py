"""Images in tar shards, as WebDataset names them: DATA/train*.tar, DATA/val*.tar and, if there, DATA/test*.tar.

The files of one sample share their name up to the first dot: 17.jpg is the image, and 17.cls has its class number.
scripts/tar_index.py finds out once where each lies; scripts/pack.py makes shards of class folders.
"""

import os
import tarfile
import zlib
from pathlib import Path

from torch.utils.data import Dataset

import scripts.tar_index as tar_index
from lib.dataset import folder
from lib.dataset.folder import get_transform  # noqa: F401  # of predict.py and export.py
from lib.utils.data import photos
from lib.utils.errors import UsageError, printable

MOST_OPEN = 256  # shards at a time, of each process


def add_args(parser):
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """Return the number of classes: the lines of DATA/classes.txt, or else what the labels of train need.

    All indexes are made here, where no watchdog counts minutes yet. Raises UsageError as get_dataset does.
    """
    names = tar_index.class_names(args.data)
    train, *_ = [tar_index.open_index(args, split)[0] for split in ("train", "val", "test")]
    return {"num_classes": len(names) or int(train["label"].max()) + 1}


def get_dataset(args) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, and class numbers, as -dataset folder does.

    Raises UsageError naming what is missing or damaged: a shard, an image, a class, classes.txt or the index.
    """
    names = tar_index.class_names(args.data) or [str(number) for number in range(args.num_classes)]
    indexed = {split: tar_index.open_index(args, split) for split in ("train", "val", "test")}
    return {split: Shards(args, split, names, *index) for split, index in indexed.items() if index[1]}


class Shards(folder.Images):
    """The images of a split, each read from its shard when it is needed."""

    def __init__(self, args, split: str, classes: list[str], rows, shards: list[Path]):
        super().__init__([], classes, args, drawn=split == "train" and args.augment)
        self.files, self.labels, self.shards = rows, rows["label"], shards
        self.opened: dict[int, int] = {}  # descriptors of this process, by the shard's number
        if type(self) is Shards:  # of a subclass three samples are read, which shows whether they are always the same
            self.fingerprint = zlib.crc32(rows)  # sizes, places and classes of all images, and three of them
            for offset, size, shard, _ in rows[[0, len(rows) // 2, -1]].tolist():
                self.fingerprint = zlib.crc32(self.read(shard, offset, size), self.fingerprint)

    def __getitem__(self, index):
        """Return the image as a tensor, and its class number. Raises UsageError naming a file that is no image."""
        offset, size, shard, label = self.files[index].tolist()
        data = self.read(shard, offset, size)
        return photos.read(self.sample_name(index), self.to_tensor, data), label

    def __getstate__(self):
        return {**vars(self), "opened": {}}

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return bytes of a shard. Raises OSError, or UsageError if it has become shorter."""
        if shard not in self.opened:
            if len(self.opened) >= MOST_OPEN:
                os.close(self.opened.pop(next(iter(self.opened))))
            self.opened[shard] = os.open(self.shards[shard], os.O_RDONLY)
        data = os.pread(self.opened[shard], size, offset)
        if len(data) < size:
            raise UsageError(f"{self.shards[shard]}: shorter than when its index was written")
        return data

    def sample_name(self, index: int) -> str:
        """Return the shard and the name of a file in it, for lists of bad files. Raises UsageError if it changed."""
        offset, size, shard, _ = self.files[index].tolist()
        header = self.read(shard, offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
        name = tar_index.member_name(header, offset, size, self.shards[shard])
        return printable(f"{self.shards[shard].name}/{name}")
