"""Reads the optional attributes of a dataset, which docs/extending.md describes."""

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
