"""Reads the optional attributes of a dataset, which lib/dataset/__init__.py describes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.utils.data import Dataset, Subset, default_collate


@dataclass(frozen=True)
class Options:
    """A dataset's optional attributes, or their defaults."""

    whole_batches: bool  # whether it has __getitems__
    collate_fn: Callable
    fixed: bool
    on_device: Callable | None
    classes: Sequence[str] | None


def options_of(dataset: Dataset) -> Options:
    """Return the options of a dataset; a Subset has those of the dataset that it is a part of."""
    dataset = whole_dataset(dataset)
    return Options(
        whole_batches=callable(getattr(dataset, "__getitems__", None)),
        collate_fn=getattr(dataset, "collate_fn", default_collate),
        fixed=bool(getattr(dataset, "fixed", False)),
        on_device=getattr(dataset, "on_device", None),
        classes=getattr(dataset, "classes", None),
    )


def whole_dataset(dataset: Dataset) -> Dataset:
    """Return the dataset that a Subset, or a Subset of one, is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
