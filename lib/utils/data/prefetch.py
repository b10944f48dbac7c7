"""Copies batches to the device and finishes them there; on a GPU one batch ahead of the step."""

import functools
from collections.abc import Iterator

import torch

from lib.utils import seeding
from lib.utils.data import tensors
from lib.utils.data.options import MapDataset, options_of


class Finish:
    """Copies a fetched batch to the device and calls the dataset's `on_device(batch, draws)`, if it has one.

    `draws` (B, 8) are numbers from 0 to below 1. Those of a sample are a function of (seed, epoch, its index) alone:
    the same on any number of processes and -workers, and after any stop.
    """

    def __init__(self, dataset: MapDataset, seed: int, device: torch.device):
        self.on_device, self.seed, self.device = options_of(dataset).on_device, seed, device

    def __call__(self, epoch: int, indices: list[int], batch):
        batch = tensors.to_device(batch, self.device)
        if self.on_device:
            draws = tensors.to_device(seeding.uniform(self.seed, epoch, indices), self.device)
            batch = tensors.to_device(self.on_device(batch, draws), self.device)
        return batch


def prefetch(pairs: Iterator, epoch: int, finish: Finish) -> Iterator:
    """Finish the batches of (micro-batch, batch) pairs; on a GPU while the step before is still computed."""
    finished = ((one, finish(epoch, one.indices, batch)) for one, batch in pairs)
    return _one_ahead(finished, finish.device) if finish.device.type == "cuda" else finished


def _one_ahead(pairs, device):
    stream, ahead = _copy_stream(device), None
    while True:
        with torch.cuda.stream(stream):
            following = next(pairs, None)
            copied = stream.record_event()
        if ahead:
            pair, event = ahead
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for _, tensor in tensors.tensors(pair[1]):
                tensor.record_stream(current)  # so that its memory serves no other tensor before it is used
            yield pair
        if following is None:
            return
        ahead = following, copied


@functools.cache
def _copy_stream(device):
    """One stream for all copies: the memory of one epoch's batches serves the next."""
    return torch.cuda.Stream(device)
