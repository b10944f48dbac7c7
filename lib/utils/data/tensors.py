"""Data in memory, fetched by whole batches; functions over all tensors of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class Tensors(TensorDataset):
    """torch's TensorDataset, fetched by whole batches."""

    def __init__(self, *tensors: Tensor, on_device: Callable | None = None, classes: Sequence[str] | None = None):
        super().__init__(*tensors)
        self.on_device, self.classes = on_device, classes

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the batch of these rows: a tuple of tensors (len(indices), ...)."""
        rows = torch.from_numpy(np.array(indices)).to(self.tensors[0].device)  # faster than torch.tensor
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch (a tensor, or a tuple, list or dict of batches) on the device; the copy is queued there."""
    return batch if device.type == "cpu" else map_tensors(batch, lambda tensor: _copy(tensor, device))


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()  # the same tensor if it is both already; else the copy would block
    return tensor.to(device, non_blocking=device.type == "cuda")  # MPS might read freed memory


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with `change` applied to each of its tensors."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [map_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def named_tensors(batch: Any, place: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in a batch, in order, each with its place there: "0", "image", "pair.1"."""
    if isinstance(batch, Tensor):
        return [(place or "0", batch)]
    named = isinstance(batch, Mapping)
    parts = batch.items() if named else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    return [one for name, part in parts for one in named_tensors(part, f"{place}.{name}".lstrip("."))]
