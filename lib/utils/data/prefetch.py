"""Batches made ready on the device: copied there and finished, on a GPU one ahead of the step."""

import functools
from collections.abc import Iterator

import torch
from torch.utils.data import Dataset

from lib.utils import seeding
from lib.utils.data import fetch, tensors


class Finish:
    """What makes a fetched batch of a dataset ready: a copy on the device and, where the dataset has it, `on_device`.

    `dataset.on_device(batch, draws)` gives the batch that the model sees. The batch is a tuple that begins with a
    tensor (B, ...), on the device; `draws` (B, 8) are numbers from 0 to below 1, those of a sample a function of
    (seed, epoch, its index) alone: the same on any number of processes and -workers, and after any stop.
    """

    def __init__(self, dataset: Dataset, seed: int, device: torch.device):
        self.change, self.seed, self.device = getattr(fetch.inner(dataset), "on_device", None), seed, device

    def __call__(self, epoch: int, indices: list[int], batch):
        batch = tensors.to_device(batch, self.device)
        if self.change:
            draws = seeding.uniform(self.seed, epoch, indices)
            batch = tensors.to_device(self.change(batch, tensors.to_device(draws, batch[0].device)), self.device)
        return batch


def ready(pairs: Iterator, epoch: int, finish: Finish) -> Iterator:
    """The (key, batch) pairs with their batches finished; on a GPU while the step before is still computed."""
    made = ((key, finish(epoch, key.indices, batch)) for key, batch in pairs)
    return _overlapped(made, finish.device) if finish.device.type == "cuda" else made


def _overlapped(made, device):
    stream, waiting = _beside(device), None
    while True:
        with torch.cuda.stream(stream):
            pair = next(made, None)
            event = stream.record_event()
        if waiting:
            yield _taken(*waiting)
        if pair is None:
            return
        waiting = pair, event


@functools.cache
def _beside(device):
    """One stream for all that is copied ahead: the memory of one epoch's batches serves the next."""
    return torch.cuda.Stream(device)


def _taken(pair, event):
    current = torch.cuda.current_stream()
    current.wait_event(event)
    tensors.each(
        pair[1], lambda tensor: tensor.record_stream(current)
    )  # its memory is not another's before it is used
    return pair
