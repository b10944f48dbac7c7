"""Images in tar shards, as WebDataset names them: DATA/train*.tar, DATA/val*.tar and, if there, DATA/test*.tar.

The files of one sample share their name up to the first dot: 17.jpg is the image, and 17.cls has its class number.
scripts/tar_index.py finds out once where each lies; scripts/pack.py makes shards of class folders. DATA may be a URL,
which scripts/remote.py reads.
"""

import os
import tarfile
import zlib

from torch.utils.data import Dataset

import scripts.tar_index as tar_index
from lib.dataset import folder
from lib.dataset.folder import get_transform  # noqa: F401  # of predict.py and export.py
from lib.utils.data import photos
from lib.utils.errors import UsageError, printable


def add_args(parser):
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """Return the number of classes: the lines of DATA/classes.txt, or else what the labels of train need.

    All indexes are made here, where no watchdog counts minutes yet. Raises UsageError as get_dataset does.
    """
    found = tar_index.find(args.data, args.cache_dir)
    train, _ = tar_index.open_index(found)["train"]
    return {"num_classes": len(found["classes"]) or int(train["label"].max()) + 1}


def get_dataset(args) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, and class numbers, as -dataset folder does.

    Raises UsageError naming what is missing or damaged: a shard, an image, a class, classes.txt or the index.
    """
    found = tar_index.find(args.data, args.cache_dir)
    names = found["classes"] or [str(number) for number in range(args.num_classes)]
    return {split: Shards(args, split, names, *index) for split, index in tar_index.open_index(found).items()}


class Shards(folder.Images):
    """The images of a split, each read from its shard when it is needed."""

    def __init__(self, args, split: str, classes: list[str], rows, shards: list[str]):
        super().__init__([], classes, args, drawn=split == "train" and args.augment)
        self.files, self.labels, self.shards = rows, rows["label"], shards
        self.fetched: dict[tuple[str, int, int], bytes] = {}  # of the current micro-batch, from URLs
        if type(self) is Shards:  # of a subclass three samples are read, which shows whether they are always the same
            self.fingerprint = zlib.crc32(rows)  # sizes, places and classes of all images, and three of them
            for index in (0, len(rows) // 2, len(rows) - 1):
                self.fingerprint = zlib.crc32(self.read(index)[1], self.fingerprint)

    def __getitem__(self, index):
        """Return the image as a tensor, and its class number. Raises UsageError naming a file that is no image."""
        name, data = self.read(index)
        return photos.read(name, self.to_tensor, data), int(self.labels[index])

    def sample_name(self, index: int) -> str:
        """Return the shard and the name of a file in it, for lists of bad files. Raises UsageError if it changed."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[str, bytes]:
        """Return the name of an image, and its bytes. Raises OSError, or UsageError if the shard changed."""
        shard, begin, size = place = self.place(index)
        if tar_index.is_url(shard):
            data = self.fetched.get(place) or tar_index.read_remote([place])[0]
        else:
            with open(shard, "rb", buffering=0) as file:  # noqa: PTH123  # a fork shares no place in it
                data = os.pread(file.fileno(), size, begin)
        if len(data) < size:
            raise UsageError(f"{shard}: shorter than when its index was written")
        header, data = data[: tarfile.BLOCKSIZE], data[tarfile.BLOCKSIZE :]
        name = tar_index.member_name(header, begin + tarfile.BLOCKSIZE, len(data), shard)
        return printable(f"{tar_index.name_of(shard)}/{name}"), data

    def prefetch_samples(self, indices: list[int]) -> None:
        """Fetch the images of a micro-batch at once, if they come from a URL."""
        if tar_index.is_url(self.shards[0]):
            places = [self.place(index) for index in indices]
            self.fetched = dict(zip(places, tar_index.read_remote(places)))

    def place(self, index: int) -> tuple[str, int, int]:
        """Return the shard of an image, where its header begins, and the size of both."""
        offset, size, number, _ = self.files[index].tolist()
        return self.shards[number], offset - tarfile.BLOCKSIZE, size + tarfile.BLOCKSIZE
