"""Checks that all ranks train the same model, and that checkpoints have all that training changes."""

import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.utils import distributed
from lib.utils.checkpoint import shards
from lib.utils.checkpoint.state import find_parts, unwrap
from lib.utils.distributed import World

MOST_BYTES = 1 << 22  # of a value that `plain_values` compares


def check(tensors: dict[str, Tensor], world: World, step: int, agreed: int) -> None:
    """Compare a digest of each tensor that is not sharded. All ranks call this at the same step.

    Raises RuntimeError on all ranks; it names the first tensor that differs, the ranks, and the step at which all
    `agreed`.
    """
    if world.size == 1:
        return
    mine = {name: digest(tensor) for name, tensor in tensors.items() if not shards.is_sharded(tensor)}
    first = distributed.broadcast(mine, world)
    odd = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
    parted = [(rank, names[0]) for rank, names in enumerate(distributed.gather(odd, world)) if names]
    if parted:
        name, ranks = parted[0][1], ", ".join(str(rank) for rank, _ in parted)
        raise RuntimeError(
            f"the copies of {name} differ: rank {ranks} and rank 0 have other values at step {step}; at step "
            f"{agreed} all were the same. Each process must change weights and buffers in the same way"
        )


def plain_values(trainer: Any) -> dict[str, Any]:
    """Return a mark, the same for equal values, of what training may change and no checkpoint has, by name.

    They are the attributes that a trainer adds, and of modules: numbers, tensors, and whether they train.
    """
    parts = find_parts(trainer)
    skipped = {id(trainer), *(number for _, number in parts.ids())}
    storages = {one.untyped_storage().data_ptr() for one in parts.weights().values() if not shards.is_sharded(one)}
    named = {f"trainer.{key}": value for key, value in vars(trainer).items() if key not in trainer.of_base}
    for part, root in parts.modules.items():
        for name, module in unwrap(root).named_modules(prefix=part):
            plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | Tensor)}
            named |= {f"{name}.{key}": value for key, value in plain.items()}
    return {name: Mark(skipped, storages).of(value) for name, value in named.items()}


class Mark(pickle.Pickler):
    """Computes the CRC32 of a value's pickle. What has a state itself is no part of it."""

    def __init__(self, skipped: set[int], storages: set[int]):
        super().__init__(self)
        self.fast = True  # without references, which depend on more than the value
        self.crc, self.size, self.skipped, self.storages = 0, 0, skipped, storages

    def of(self, value: Any) -> Any:
        """Return the CRC32; None for what is large or cannot be pickled, and an iterator is always another one."""
        if isinstance(value, Iterator):
            return object()
        try:
            self.dump(value)
        except Exception:  # noqa: BLE001  # that of any class
            return None
        return self.crc

    def write(self, data: Any) -> None:
        """Take a part of the pickle."""
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + len(data)
        if self.size > MOST_BYTES:
            raise ValueError("too large")

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object: of a tensor its digest, unless it is the model's or has a gradient."""
        is_large = isinstance(value, Tensor | np.ndarray) and value.nbytes > MOST_BYTES
        if is_large or id(value) in self.skipped:
            return ""
        if not isinstance(value, Tensor):
            return None
        is_other = value.requires_grad or shards.is_sharded(value) or value.layout is not torch.strided
        return "" if is_other or value.untyped_storage().data_ptr() in self.storages else str(digest(value))


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names whose marks differ, once each: `before` gets the marks of new names, and None for these."""
    before |= {name: mark for name, mark in now.items() if name not in before}
    changed = [name for name, mark in now.items() if None not in (mark, before[name]) and mark != before[name]]
    before |= dict.fromkeys(changed)
    return changed


def digest(tensor: Tensor) -> int:
    """Return the CRC32 of a tensor's bytes."""
    return zlib.crc32(shards.as_bytes(tensor.detach().cpu()))
