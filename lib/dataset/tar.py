"""Images in tar shards, as WebDataset names them: DATA/train*.tar, DATA/val*.tar and, if there, DATA/test*.tar.

The files of one sample share their name up to the first dot: 17.jpg is the image, and 17.cls has its class number.
A dataset of your own takes others, as 17.txt: a subclass of `Shards` (docs/data.md). scripts/tar_index.py finds out
once where each sample lies; scripts/pack.py makes shards of class folders. scripts/remote.py reads them from a URL.
"""

import zlib

from torch.utils.data import Dataset

import scripts.tar_index as tar_index
from lib.dataset import folder
from lib.dataset.folder import get_transform  # noqa: F401  # of predict.py and export.py
from lib.utils.data import photos
from lib.utils.errors import UsageError


def add_args(parser):
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """Return the number of classes: the lines of DATA/classes.txt, or else what all labels need.

    All indexes are made here, where no watchdog counts minutes yet. Raises UsageError as get_dataset does.
    """
    return {"num_classes": tar_index.count_classes(args.data, args.cache_dir)}


def get_dataset(args, dataset_class=None) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, and class numbers, as -dataset folder does.

    With a subclass of Shards as `dataset_class`, what its __getitem__ gives; samples then need no class. Raises
    UsageError naming what is missing or damaged: a shard, an image, a class, classes.txt or the index.
    """
    found = tar_index.find(args.data, args.cache_dir)
    names = found["classes"] or [str(number) for number in range(args.num_classes)]
    index = tar_index.open_index(found, with_classes=dataset_class is None)
    tar_index.copy_shards(found, args.data, args.cache_dir, args.cache_gb)
    return {split: (dataset_class or Shards)(args, split, names, *parts) for split, parts in index.items()}


class Shards(folder.Images):
    """The samples of a split, each read from its shard when it is needed."""

    def __init__(self, args, split: str, classes: list[str], rows, shards: list[str]):
        super().__init__([], classes, args, drawn=split == "train" and args.augment)
        self.files, self.labels, self.shards = rows, rows["label"], shards
        self.fetched: dict[tuple[str, int, int], bytes] = {}  # of the current micro-batch, from URLs
        self.listing = zlib.crc32(rows)
        if type(self) is Shards:  # of a subclass three samples are read, which shows whether they are always the same
            self.fingerprint = zlib.crc32(rows)  # sizes, places and classes of all samples, and three of them
            for index in (0, len(rows) // 2, len(rows) - 1):
                self.fingerprint = zlib.crc32(self.read_bytes(index), self.fingerprint)

    def __getitem__(self, index):
        """Return the image as a tensor, and its class number. Raises UsageError naming a file that is no image."""
        name, files = self.read(index)
        ending = next((one for one in files if tar_index.kind_of(one) == "image"), "jpg")
        return photos.read(f"{name}.{ending}", self.to_tensor, files[ending]), int(self.labels[index])

    def sample_name(self, index: int) -> str:
        """Return the shard and the name of a sample, for lists of bad files. Raises what `read` raises."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Return a sample's name, and its files by ending. Raises OSError, or UsageError if the shard changed."""
        return tar_index.read_files(self.read_bytes(index), self.place(index)[0], int(self.files[index]["label"]))

    def read_bytes(self, index: int) -> bytes:
        """Return the bytes of a sample's files, with their headers. Raises OSError, or UsageError if one is gone."""
        place = self.place(index)
        data = self.fetched.get(place) or tar_index.read([place])[0]
        if len(data) < place[2]:
            raise UsageError(f"{place[0]}: shorter than when its index was written, or gone")
        return data

    def prefetch_samples(self, indices: list[int]) -> None:
        """Fetch the samples of a micro-batch at once, if they come from a URL; else let the disk begin."""
        self.fetched = tar_index.prefetch([self.place(index) for index in indices])

    def place(self, index: int) -> tuple[str, int, int]:
        """Return the shard of a sample, where its first header begins, and the size of all its files."""
        offset, size, number, _ = self.files[index].tolist()
        return self.shards[number], offset, size
