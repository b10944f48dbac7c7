"""How fast a run is, and in plain words what holds it up."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from lib.utils.distributed import World

SHORT_S = 5.0  # an epoch that trains no longer is not worth words
WAITS, SLOWER, EMPTY = 0.2, 1.3, 0.5  # what is: share of time waiting for data, times slower, share of memory used


class Rate:
    """Speed, share of time spent waiting for data, and time left, by the monotonic clock. A batch is waited for where
    the device is `starving` when it comes."""

    def __init__(self, total_steps: int, start_step: int = 0, starving: Callable[[], bool] = lambda: True):
        self._starving = starving
        self._left = total_steps - start_step
        self._base = self._began = time.monotonic()
        self._done, self._waited, self._warm = 0, 0.0, False
        self.epoch_taken = self.epoch_waited = 0.0

    def waiting(self, batches: Iterable) -> Iterator:
        """The same batches; the time that each takes to come is counted as waiting for data (0.3 us a batch)."""
        clock = time.monotonic
        began = clock()
        for batch in batches:
            if self._starving():
                self._waited += clock() - began
            yield batch
            began = clock()

    def waited(self, seconds: float):
        """Count seconds that the loop waited for a batch, if the device has nothing to do now that it is here."""
        if self._starving():
            self._waited += seconds

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
        self.epoch_taken += taken
        self.epoch_waited += self._waited
        self._began, self._waited = now, 0.0
        return figures

    def end_epoch(self) -> tuple[float, float]:
        """Seconds of training and of waiting for data in the intervals since the last call."""
        figures = self.epoch_taken, self.epoch_waited
        self.epoch_taken = self.epoch_waited = 0.0
        return figures

    def restart(self):
        """Begin the interval anew: what lies between, such as an evaluation, is no training speed."""
        self._began, self._waited = time.monotonic(), 0.0


def starving(device: torch.device) -> Callable[[], bool]:
    """A function that says whether the device has nothing to do: a GPU has often been given more than it has done."""
    return (lambda: torch.cuda.current_stream().query()) if device.type == "cuda" else (lambda: True)


class OwnTime:
    """What a rank needs by itself for its steps: from a step's begin, its data included, to the first time that it
    waits for the others. On a GPU it is the GPU's time. Nothing is measured alone, nor where parts of the model are
    `gathered` from the others (FSDP): its forward pass waits for them already."""

    def __init__(self, world: World, gathered: bool = False):
        self.on, self.device = world.size > 1 and not gathered, world.device
        self.seconds, self.began, self.pairs = 0.0, None, []

    def begin(self, anew: bool = False):
        """At the begin of a step, or of a later micro-batch of it; `anew`: of the first after something else."""
        if self.on and (anew or self.began is None):
            self.began = self._now()

    def end(self):
        """Just before the first collective of the step."""
        if self.on and self.began is not None:
            self.pairs.append((self.began, self._now()))
            self.began = None

    def read(self):
        """Adds up what was measured; after the device was waited for."""
        if self.device.type == "cpu":
            self.seconds += sum(end - began for began, end in self.pairs)
        else:
            self.seconds += sum(began.elapsed_time(end) for began, end in self.pairs) / 1000
        self.pairs = []

    def _now(self):
        if self.device.type == "cpu":
            return time.monotonic()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


def advice(ranks: list[dict], workers: int, cores: int) -> dict[str, str]:
    """In plain words what is worth changing, by kind, after an epoch.

    ranks: of each rank the seconds of training, `taken`; of waiting for data, `waited`; of its own, `own`, 0 for
    unknown; the share of its GPU's memory, `memory`, or None. workers: of each process; cores: for each.
    """
    words = {}
    if max(rank["taken"] for rank in ranks) < SHORT_S:
        return words
    waits = max(rank["waited"] / max(rank["taken"], 1e-9) for rank in ranks)
    if waits > WAITS:
        words["data"] = f"{waits:.0%} of the time is spent waiting for data".replace("%", " %") + _more(
            waits, workers, cores
        )
    own = [rank["own"] for rank in ranks]
    slowest = max(range(len(own)), key=own.__getitem__)
    rest = (sum(own) - own[slowest]) / max(len(own) - 1, 1)
    if (
        len(own) > 1
        and rest
        and own[slowest] > SLOWER * rest
        and own[slowest] - rest > 0.05 * ranks[slowest]["taken"]
    ):
        words[f"rank {slowest}"] = f"rank {slowest} is {own[slowest] / rest:.1f} times slower than the rest"
    used = [rank["memory"] for rank in ranks if rank["memory"] is not None]
    if used and max(used) < EMPTY:
        words["memory"] = f"GPU memory {max(used):.0%} used: a larger -micro_batch fits".replace("%", " %")
    return words


def _more(waits, workers, cores):
    # Workers work beside the step: w of them keep up once they are 1 / (1 - share) times as many.
    work = max(1 - waits, 0.01)
    wanted = math.ceil(workers / work - 1e-6) if workers else max(2, math.ceil(waits / work - 1e-6))
    wanted = min(wanted, max(1, cores - 1))
    if wanted > workers:
        return f": try -workers {wanted}"
    return f", and {workers} workers are all that {cores} cores can feed: try smaller files or cheaper augmentation"


def memory_share(device: torch.device) -> float | None:
    """The largest share of a CUDA device's memory that torch held so far; None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory


def memory(device) -> int:
    """Peak memory in bytes: what torch allocated on the accelerator, or what this process held if that is the CPU."""
    device = torch.device(device)
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated(device)
