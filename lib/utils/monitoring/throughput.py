"""How fast a run is: samples per second, waiting for data, time left, memory."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Throughput:
    """Measure speed from one log line to the next; `state` says how far the run is."""

    def __init__(self, total_steps: int, state: Any, device: torch.device):
        self._total_steps, self.device = total_steps, device
        self.begin(state)

    def begin(self, state: Any) -> None:
        """Measure from now on."""
        self._start, self._start_step = time.monotonic(), state.step
        self._samples = state.samples  # as of the last log line
        self._interval_start, self._waited = self._start, 0.0

    def time_data_loading(self, batches: Iterable) -> Iterator:
        """Yield an epoch's batches, and add up the time that the device waits for them."""
        self._interval_start = began = time.monotonic()  # an evaluation may lie before it
        for batch in batches:
            # Batches are launched ahead on a GPU: while it works, nobody waits.
            if self.device.type != "cuda" or torch.cuda.current_stream().query():
                self._waited += time.monotonic() - began
            yield batch
            began = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the time of the interval."""
        began = time.monotonic()
        yield
        self._interval_start += time.monotonic() - began

    def interval(self, state: Any) -> dict[str, float]:
        """Return the figures since the last call, and the time left by that since the start, evaluations included."""
        now = time.monotonic()
        seconds = max(now - self._interval_start, 1e-9)
        figures = {
            "samples_per_s": (state.samples - self._samples) / seconds,
            "data_share": min(self._waited / seconds, 1.0),
            "memory_gb": memory(self.device) / 1e9,
            "left_s": (self._total_steps - state.step) * (now - self._start) / max(state.step - self._start_step, 1),
        }
        self._samples, self._interval_start, self._waited = state.samples, now, 0.0
        return figures


def memory(device: torch.device) -> int:
    """Return peak memory in bytes: of torch on an accelerator, of this process on the CPU, with what it shares."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated(device)
