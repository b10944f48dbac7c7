"""Copies on the CPU of tensors that training goes on changing."""

from typing import NamedTuple

import torch
from torch import Tensor

from lib.utils.checkpoint.shards import Piece


class Copies(NamedTuple):
    """Copies by name, and for those from a GPU the event after which they may be read."""

    blocks: list[tuple[str, Tensor]]
    copied: torch.cuda.Event | None


def copy(pieces: list[Piece]) -> Copies:
    """Return copies of the pieces, which may change as soon as this returns.

    Those from a GPU are then in its queue, before all that follows, into pinned memory, which torch keeps for later.
    """
    copied = torch.cuda.Event(blocking=True) if any(piece.values.is_cuda for piece in pieces) else None
    blocks = []
    for name, values, _ in pieces:
        block = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        blocks.append((name, block.copy_(values, non_blocking=values.is_cuda)))
    if copied:
        copied.record()
    return Copies(blocks, copied)
