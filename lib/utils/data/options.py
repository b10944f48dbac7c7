"""Reads the optional attributes of a dataset, which docs/extending.md describes."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import Subset


class MapDataset(Protocol):
    """What a dataset must have. torch's Dataset does not declare its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def option(dataset: Any, name: str, default: Any = None) -> Any:
    """Return an optional attribute of a dataset; a Subset has its own, or those of what it is a part of."""
    if isinstance(dataset, Subset) and name not in vars(dataset):
        return option(dataset.dataset, name, default)
    return getattr(dataset, name, default)


def has_whole_batches(dataset: MapDataset) -> bool:
    """Return whether a dataset gives a whole batch at once. Each Subset has __getitems__, too."""
    return callable(option(dataset, "__getitems__"))


def class_names(dataset: MapDataset) -> list[str]:
    """Return the names of the classes; none where `classes` is a number, as in other people's datasets."""
    classes = option(dataset, "classes")
    return [str(name) for name in classes] if isinstance(classes, Sequence) else []
