"""Data in memory, fetched by whole batches; functions over all tensors of a batch."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class Tensors(TensorDataset):
    """torch's TensorDataset, fetched by whole batches. `listing`: checksums, of 256 MB of each at most."""

    def __init__(self, *tensors: Tensor, on_device: Callable | None = None, classes: Sequence[str] | None = None):
        super().__init__(*tensors)
        self.on_device, self.classes = on_device, classes
        few = [one.data[:: one.nbytes // 2**28 + 1].cpu() for one in tensors if one.layout is torch.strided]
        values = [one.resolve_conj().contiguous().view(torch.uint8).numpy() for one in few]
        self.listing = str([zlib.crc32(one.data) for one in values])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the batch of these rows: a tuple of tensors (len(indices), ...)."""
        rows = torch.from_numpy(np.array(indices)).to(self.tensors[0].device)  # faster than torch.tensor
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch (a tensor, or a tuple, list or dict of batches) on the device; the copy is queued there."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        is_cuda = device.type == "cuda"
        if is_cuda and batch.device.type == "cpu":
            batch = batch.contiguous().pin_memory()  # itself if it is both already; else the copy would block
        return batch.to(device, non_blocking=is_cuda)  # MPS might read freed memory
    if isinstance(batch, Mapping):
        return {name: to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch.to(device) if hasattr(batch, "to") else batch  # an object of its own, as a batch of graphs


def named_tensors(batch: Any, place: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in a batch, in order, each with its place there: "0", "image", "pair.1"."""
    if isinstance(batch, Tensor):
        return [(place or "0", batch)]
    named = isinstance(batch, Mapping)
    parts = batch.items() if named else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    return [one for name, part in parts for one in named_tensors(part, f"{place}.{name}".lstrip("."))]
