"""What a run measures: sums over micro-batches, epochs and ranks, and metrics.jsonl, where they are kept."""

import json
import logging
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from lib.utils import distributed
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError
from lib.utils.monitoring import console

log = logging.getLogger(__name__)

# Waiting tensors are folded into one when there are this many: a device's allocator spends 512 bytes on a 0-d tensor.
FOLD = 256
LESS = {"loss", "bits_per_byte"}  # what is to fall


class MetricsTracker:
    """Named sums: `update` gathers on this process, `reduce` adds up all ranks, `end_epoch` files the epoch away.

        metrics.update({"loss": loss_sum, "samples": len(batch)})    # each micro-batch: nothing waits for the device
        interval = metrics.reduce()                                  # at the log interval, on every rank
        mean(interval, "loss"), mean(metrics.agg, "loss")            # of the interval, of the epoch so far
        metrics.end_epoch()                                          # after a last reduce(); see epoch_reports

    `local` is what this process gathered since the last `reduce()` or, while there is nothing new, what that reduce()
    gave. `agg` holds the epoch's sums over all ranks, `epoch_reports` those of the epochs before. The interface
    is that of cycling_utils (github.com/StrongResearch/cycling_utils), except that reduce() returns the sums and
    begins a new interval by itself, so that nothing is counted twice.

    Ranks may know different names, or none: names are matched by name. Values are added in float64 where the device
    has it, and Python integers exactly. Every rank of `group` (default: all) must call reduce() equally often;
    without a process group it only adds up. One tracker belongs to one process group.
    """

    def __init__(self, group=None):
        self.agg = defaultdict(float)
        self.epoch_reports: list[dict[str, float]] = []
        self._group = group
        self.reset_local()

    def update(self, metrics: dict):
        """Add to the local sums: numbers, or 0-d tensors on any device, which must not be changed in place later.

        Tensors are kept and added up later: 0.4 us each instead of a kernel launch, and in float64.
        """
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                self._numbers[name] += value
                continue
            waiting = self._tensors[name]
            waiting.append(value.detach() if value.requires_grad else value)
            if len(waiting) == FOLD:
                self._folded[name] = self._folded[name] + _sum(name, waiting)
                waiting.clear()
        return self

    def reduce(self) -> dict[str, float]:
        """The sums of this interval over all ranks, as floats; they are added to `agg`, and a new interval begins.

        Waits for the device and, with more than one rank, for the others: one exchange of some hundred
        bytes. Raises ValueError for a tensor that is not a single value.
        """
        reduced = self.pending()
        self.reset_local()
        self._reduced = reduced
        for name, value in reduced.items():
            self.agg[name] += value
        return dict(reduced)

    def pending(self) -> dict[str, float]:
        """What `reduce` would give, on every rank; the interval goes on."""
        totals = {}
        world = distributed.world_in(self._group)
        for sums in distributed.gather_json(self._local_sums(), world, self._group):
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    @property
    def local(self) -> dict[str, float]:
        """The sums of this process since the last reduce(), or else what that gave. Waits for the device."""
        return self._local_sums() or dict(self._reduced)

    def reset_local(self):
        """Forget what was gathered since the last reduce()."""
        self._numbers = defaultdict(int)
        self._tensors = defaultdict(list)
        self._folded = defaultdict(int)
        self._reduced = {}
        return self

    def end_epoch(self):
        """File the epoch's sums in `epoch_reports` and begin a new epoch. What is not yet reduced is dropped."""
        self.epoch_reports.append(dict(self.agg))
        self.agg = defaultdict(float)
        return self.reset_local()

    def state_dict(self) -> dict:
        """The reduced sums, alike on all ranks and ready for JSON; call reduce() first to have everything in it."""
        return {"agg": dict(self.agg), "epoch_reports": [dict(report) for report in self.epoch_reports]}

    def load_state_dict(self, state: dict):
        """Go on from what `state_dict` gave, or its "agg" alone, on any number of ranks."""
        self.agg = defaultdict(float, state["agg"])
        self.epoch_reports = [dict(report) for report in state.get("epoch_reports", ())]
        return self.reset_local()

    def _local_sums(self):
        names = self._numbers.keys() | self._tensors.keys()
        return {name: float(self._numbers.get(name, 0)) + self._tensor_sum(name) for name in sorted(names)}

    def _tensor_sum(self, name):
        waiting = self._tensors.get(name)
        return float(self._folded.get(name, 0) + (_sum(name, waiting) if waiting else 0))


def mean(totals: dict, name: str) -> float:
    """A sum over samples, totals[name], as the mean of a sample; NaN where nothing was counted."""
    count = totals.get("samples", 0)
    return totals.get(name, math.nan) / count if count else math.nan


def better(best: dict | None, figures: dict, asked: str | None, epoch: int) -> dict | None:
    """The best validation so far if these figures are it, else None. By the metric that was asked for, as `rec` or
    `rec:min`, or accuracy, or loss; of LESS and of a NAME:min, less is better. None, too, where the loss is NaN.

    Raises UsageError if the metric that was asked for is not there.
    """
    name, _, way = (asked or ("accuracy" if "accuracy" in figures else "loss")).partition(":")
    if asked and name not in figures:
        raise UsageError(f"-best {asked}: the evaluation on val gives {', '.join(figures)}")
    if name not in figures and epoch == 1:
        log.warning("no weights are kept as the best: the evaluation gives %s; name one by -best NAME, or NAME:min",
                    ", ".join(figures) or "nothing")  # fmt: skip
    score = figures.get(name, math.nan) * (-1 if way == "min" or (name in LESS and not way) else 1)
    if math.isnan(figures.get("loss", 0.0)):  # outputs that are NaN have an accuracy, too
        return None
    last = best["score"] if best and best["metric"] == name else -math.inf
    return {"metric": name, "value": figures[name], "score": score, "epoch": epoch} if score > last else None


def _sum(name, tensors):
    stacked = torch.stack(tensors)
    if stacked.ndim != 1:
        raise ValueError(f"metric {name!r} is a tensor of shape {tuple(stacked.shape[1:])}: a single value is needed")
    return stacked.sum(dtype=_wide(stacked.device) if stacked.is_floating_point() else torch.int64)


def _wide(device):
    return torch.float32 if device.type == "mps" else torch.float64


class Lines:
    """metrics.jsonl: one JSON object a line, there as soon as it is written; off rank 0 nothing is written."""

    def __init__(self, path: Path, main: bool):
        self._file = console.Appender(path) if main else None

    def write(self, figures: dict):
        """Append one line: text and numbers, also nested; NaN and infinity, which JSON does not know, become null."""
        if self._file is not None:
            self._file.append((json.dumps(_plain(figures), allow_nan=False) + "\n").encode())

    def close(self):
        """Close the file; training may go on without."""
        if self._file is not None:
            self._file.close()


def cut_back(path: Path, step: int) -> set[str]:
    """Drop the lines of metrics.jsonl beyond a step: for rank 0 on resume, before `Lines` writes there again. Returns
    the names of the figures of that step, which need not be logged again.

    Objects without a step stay. Lines that are no JSON objects go, with a warning, unless it is the last one, cut
    short by a kill. The file is replaced as a whole; where that fails it stays as it was, with a warning.
    """
    path = Path(path)
    if not path.exists():
        return set()
    old = path.read_bytes()
    lines = [(line, _parsed(line)) for line in old.split(b"\n") if line]
    unreadable = [line for line, record in lines if record is None]
    if unreadable and unreadable != [old.split(b"\n")[-1]]:
        log.warning("%s: %d unreadable lines are left out", path, len(unreadable))
    kept = [(line, record) for line, record in lines if record is not None and _step(record) <= step]
    new = b"".join(line + b"\n" for line, _ in kept)
    try:
        if new != old:
            atomic.write_file(path, new)
    except OSError as error:
        log.warning("cannot cut back %s (%s): steps that are done again will stand in it twice", path, error)
    return {name for _, record in kept if _step(record) == step for name in record}


def _parsed(line):
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _step(record):
    step = record.get("step")
    return step if isinstance(step, (int, float)) else -math.inf


def _plain(value):
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return float(value) if math.isfinite(value) else None
