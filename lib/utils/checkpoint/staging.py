"""CPU copies of tensors that go on changing: made by another thread, on a GPU in a stream of their own."""

import threading

import torch

from lib.utils.checkpoint.shards import Piece


class Copies:
    """Copies of pieces as they were at the moment of `request`, by name; their memory is used again for the next.

    The thread that changes the tensors calls `request`, and `wait` before it changes them; another one calls `make`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.values: dict[str, torch.Tensor] = {}
        self.layout: list[tuple] = []  # of the pieces that `values` has room for
        self.made = threading.Event()
        self.made.set()
        self.stream = self.requested = self.queued = None  # on a GPU: a stream and events of the device

    def request(self):
        """Mark the moment whose values are wanted."""
        self.made.clear()
        if self.device.type == "cuda":
            self.requested = torch.cuda.current_stream().record_event()

    def wait(self):
        """Return once the tensors may change: the copies are made, or in the device's queue before what follows."""
        self.made.wait()
        if self.queued is not None:
            torch.cuda.current_stream().wait_event(self.queued)
            self.queued = None

    def make(self, pieces: list[Piece]) -> list[tuple[str, torch.Tensor]]:
        """Return name and copy of each piece, once they are made."""
        try:
            self._make(pieces)
        finally:
            self.made.set()
        if self.stream is not None:
            self.stream.synchronize()
        return [(piece.name, self.values[piece.name]) for piece in pieces]

    def _make(self, pieces):
        if self.requested is None:
            self._copy(pieces)
            return
        if self.stream is None:
            torch.cuda.set_device(self.device)  # a thread begins on device 0, and would take memory there
            self.stream = torch.cuda.Stream()
        self.stream.wait_event(self.requested)
        with torch.cuda.stream(self.stream):
            self._copy(pieces)
        self.queued = self.stream.record_event()

    def _copy(self, pieces):
        layout = [(name, values.shape, values.dtype, values.is_cuda) for name, values, _ in pieces]
        if layout != self.layout:
            self._make_room(pieces)
            self.layout = layout
        for name, values, _ in pieces:
            self.values[name].copy_(values, non_blocking=values.is_cuda)

    def _make_room(self, pieces):
        """Make one buffer for all values of a dtype: pinned memory costs a call of the driver each time."""
        self.values, kinds = {}, {}
        for piece in pieces:
            kinds.setdefault((piece.values.dtype, piece.values.is_cuda), []).append(piece)
        for (dtype, pinned), alike in kinds.items():
            sizes = [piece.values.numel() for piece in alike]
            buffer = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)
            for piece, room in zip(alike, buffer.split(sizes), strict=True):
                self.values[piece.name] = room.view(piece.values.shape)
