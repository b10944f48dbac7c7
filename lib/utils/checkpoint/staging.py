"""Copies on the CPU of tensors that training goes on changing; every save uses the same memory."""

import torch
from torch import Tensor

from lib.utils.checkpoint.shards import Piece


class Copies:
    """Copies of pieces, by name."""

    def __init__(self):
        self.values: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None

    def make_room(self, pieces: list[Piece]) -> None:
        """Allocate memory for these pieces, unless they have some. The first write to it takes longer than a copy."""
        for name, values, _ in pieces:
            there = self.values.get(name)
            if there is None or (there.shape, there.dtype) != (values.shape, values.dtype):
                self.values[name] = torch.zeros(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)

    def make(self, pieces: list[Piece]) -> list[tuple[str, Tensor]]:
        """Return name and copy of each piece. The pieces may change as soon as this returns.

        Copies from a GPU are then in its queue, before all that follows; call `wait` before you read them.
        """
        self.make_room(pieces)
        for name, values, _ in pieces:
            self.values[name].copy_(values, non_blocking=values.is_cuda)
        if any(piece.values.is_cuda for piece in pieces):
            self.copied = torch.cuda.Event(blocking=True)
            self.copied.record()
        return [(piece.name, self.values[piece.name]) for piece in pieces]

    def wait(self) -> None:
        """Return once the copies are made; any thread may wait."""
        if self.copied is not None:
            self.copied.synchronize()
