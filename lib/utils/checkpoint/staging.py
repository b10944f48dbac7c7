"""Copies on the CPU of tensors that go on changing, in memory that each save uses again."""

import torch
from torch import Tensor

from lib.utils.checkpoint.shards import Piece


class Copies:
    """Copies of pieces, by name."""

    def __init__(self):
        self.values: dict[str, Tensor] = {}
        self.layout: list[tuple] = []  # of the pieces that `values` has room for
        self.copied: torch.cuda.Event | None = None

    def make_room(self, pieces: list[Piece]):
        """Make one buffer for all values of a dtype: pinned memory costs a call of the driver each time.

        The first write to new memory takes several times as long as a copy, so it is done here.
        """
        layout = [(name, values.shape, values.dtype, values.is_cuda) for name, values, _ in pieces]
        if layout == self.layout:
            return
        self.values, self.layout, kinds = {}, layout, {}
        for piece in pieces:
            kinds.setdefault((piece.values.dtype, piece.values.is_cuda), []).append(piece)
        for (dtype, pinned), alike in kinds.items():
            sizes = [piece.values.numel() for piece in alike]
            buffer = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)
            buffer.view(torch.uint8).zero_()
            for piece, room in zip(alike, buffer.split(sizes), strict=True):
                self.values[piece.name] = room.view(piece.values.shape)

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

    def wait(self):
        """Return once the copies are made; any thread may wait."""
        if self.copied is not None:
            self.copied.synchronize()
