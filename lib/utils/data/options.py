"""Reads the optional attributes of a dataset, which docs/extending.md describes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Subset, default_collate


class MapDataset(Protocol):
    """What a dataset must have. torch's Dataset does not declare its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class Options:
    """A dataset's optional attributes, or their defaults."""

    whole_batches: bool  # whether it has __getitems__
    collate_fn: Callable
    fixed: bool
    on_device: Callable | None
    classes: Sequence[str] | None
    fingerprint: str | None


def read_options(dataset: MapDataset) -> Options:
    """Return the options of a dataset; a Subset has those of the dataset that it is a part of."""
    whole: object = dataset
    while isinstance(whole, Subset):
        whole = whole.dataset
    classes = getattr(whole, "classes", None)  # of other people's datasets: also a number
    fingerprint = getattr(whole, "fingerprint", None)  # likewise: also a method
    return Options(
        whole_batches=callable(getattr(whole, "__getitems__", None)),
        collate_fn=getattr(whole, "collate_fn", default_collate),
        fixed=bool(getattr(whole, "fixed", False)),
        on_device=getattr(whole, "on_device", None),
        classes=classes if isinstance(classes, Sequence) else None,
        fingerprint=fingerprint if isinstance(fingerprint, str) else None,
    )
