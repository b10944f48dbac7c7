"""Data, one file each: EDIT, add your own.

A file NAME.py is `-dataset NAME`. It has get_dataset(args) -> Dataset, or {"train": Dataset, "val": Dataset, "test":
Dataset}. It may have add_args(parser), for its own flags and for defaults of shared flags. It may have describe(args)
-> dict, for defaults that follow from the data, such as the number of classes. For predictions it may have
get_transform(args), which returns a function from one PIL image, or one text, to the tensor that the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the command line imports this file, and answers without torch
    from torch import Tensor


class Dataset(Protocol):
    """All attributes of a dataset that Baton uses. Only `__len__` and `__getitem__` are required.

    Nothing needs to inherit from this: any torch Dataset or list will do. Read by lib/utils/data/options.py.
    """

    fixed: bool = False  # items are the same every time; otherwise generators are seeded for each item
    classes: Sequence[str] | None = None  # names for predictions and the pictures in TensorBoard

    fingerprint: str | None = None  # of all samples, by which a run finds other data; without it, three are read

    def __len__(self) -> int: ...

    def __getitem__(self, index: int): ...

    def __getitems__(self, indices: list[int]):
        """Return a whole batch, or a list of items for `collate_fn`. Default: one item at a time."""

    def collate_fn(self, items: list):
        """Return the batch that these items make. Default: torch's default_collate."""

    def on_device(self, batch: tuple, draws: Tensor) -> tuple:
        """Return the batch as the model sees it, from one on the device that begins with a tensor (B, ...).

        `draws` (B, 8) are random numbers in [0, 1). A row is a function of (seed, epoch, the sample's index).
        Default: the batch stays as it is.
        """
