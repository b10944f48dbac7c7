"""How fast a run is, and what holds it up."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator

import torch


class Rate:
    """Speed, share of time spent waiting for data, and time left, by the monotonic clock."""

    def __init__(self, total_steps: int, start_step: int = 0):
        self._left = total_steps - start_step
        self._base = self._began = time.monotonic()
        self._done, self._waited, self._warm = 0, 0.0, False

    def waiting(self, batches: Iterable) -> Iterator:
        """The same batches; the time that each takes to come is counted as waiting for data (0.3 us a batch)."""
        clock = time.monotonic
        began = clock()
        for batch in batches:
            self._waited += clock() - began
            yield batch
            began = clock()

    def interval(self, steps: int, samples: float) -> dict[str, float]:
        """samples_per_s, data_share and left_s of the interval that ends now; steps and samples are over all ranks.

        Time left goes by the wall time since the first interval, which may hold a compilation: evaluation and saving
        are in it.
        """
        now = time.monotonic()
        taken = max(now - self._began, 1e-9)
        self._left -= steps
        self._done += steps
        figures = {
            "samples_per_s": samples / taken,
            "data_share": min(self._waited / taken, 1.0),
            "left_s": (now - self._base) / max(self._done, 1) * self._left,
        }
        if not self._warm:
            self._base, self._done, self._warm = now, 0, True
        self._began, self._waited = now, 0.0
        return figures

    def restart(self):
        """Begin the interval anew: what lies between, such as an evaluation, is no training speed."""
        self._began, self._waited = time.monotonic(), 0.0


def memory(device) -> int:
    """Peak memory in bytes: what torch allocated on the accelerator, or what this process held if that is the CPU."""
    device = torch.device(device)
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated(device)
