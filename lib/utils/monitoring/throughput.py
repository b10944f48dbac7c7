"""How fast a run is: samples per second, waiting for data, time left, memory."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator

import torch


class Rate:
    """Measure speed from one log line to the next; `state` says how far the run is."""

    def __init__(self, total_steps: int, state, device: torch.device):
        self._total_steps, self._device = total_steps, device
        self._step, self._samples = state.step, state.samples  # as of the last log line
        self._interval_start, self._waited = time.monotonic(), 0.0
        self._after_warm_up = None  # time and step of the first log line: before it a model may be compiled

    def waiting(self, batches: Iterable) -> Iterator:
        """Yield an epoch's batches, and add up the time that the device waits for them."""
        clock = time.monotonic
        self._interval_start = began = clock()  # an evaluation may lie before it
        for batch in batches:
            if self._device_is_idle():
                self._waited += clock() - began
            yield batch
            began = clock()

    def interval(self, state) -> dict[str, float]:
        """Return the figures since the last call: samples_per_s, data_share, memory and left_s.

        The time left follows from the wall time since the first call, with evaluation and saving in it.
        """
        now = time.monotonic()
        seconds = max(now - self._interval_start, 1e-9)
        start_time, start_step = self._after_warm_up or (self._interval_start, self._step)
        step_seconds = (now - start_time) / max(state.step - start_step, 1)
        figures = {
            "samples_per_s": (state.samples - self._samples) / seconds,
            "data_share": min(self._waited / seconds, 1.0),
            "memory": memory(self._device),
            "left_s": step_seconds * (self._total_steps - state.step),
        }
        self._after_warm_up = self._after_warm_up or (now, state.step)
        self._step, self._samples = state.step, state.samples
        self._interval_start, self._waited = now, 0.0
        return figures

    def _device_is_idle(self):
        # Batches are launched ahead on a GPU: while it works, nobody waits.
        return self._device.type != "cuda" or torch.cuda.current_stream().query()


def memory(device: torch.device) -> int:
    """Return peak memory in bytes: of torch on an accelerator, of this process on the CPU, with all that it shares.

    Its share of shared pages (Linux's PSS) would take 40 ms a call for 0.7 GB, and more for more.
    """
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated(device)
