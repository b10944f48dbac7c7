"""Figures of a run: sums over micro-batches and processes, a confusion matrix, the best evaluation, metrics.jsonl."""

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from lib.utils import distributed, files
from lib.utils.errors import UsageError, suggest

log = logging.getLogger(__name__)
MAX_TERMS = 1000  # of a sum, before they are added up
MAX_LINE = 1 << 20  # bytes, of metrics.jsonl
MAX_CLASSES = 100  # of a confusion matrix
LOWER_IS_BETTER = ("loss", "bits_per_token")


class Sums:
    """Named sums of this process; `reduce`, which every rank calls equally often, adds up those of all ranks.

    They are exact until they are rounded once: no order of additions changes a bit. Ranks may have different names.
    With `alone`, all ranks have the same sums, and each reduces its own.
    """

    def __init__(self, alone: bool = False):
        self.alone = alone
        self.terms: dict[str, list] = {}
        self.counts = True  # whether `update` does anything: not for padding

    def update(self, values: dict[str, Any]) -> Any:
        """Add numbers or 0-d tensors, and return these sums. Waits for the device once in many calls."""
        for name, value in values.items() if self.counts else ():
            if isinstance(value, Tensor) and value.ndim:
                raise UsageError(f"metric {name!r} has the shape {tuple(value.shape)}: it must be one value")
            terms = self.terms.setdefault(name, [])
            terms.append(value.detach() if isinstance(value, Tensor) else value)
            if len(terms) > MAX_TERMS:
                terms[:] = exact_terms(terms)
        return self

    def reduce(self) -> Any:
        """Return the sums over all ranks since the last call. Waits for the device and the other ranks."""
        totals = self.pending()
        self.terms = {}
        return {name: math.fsum(terms) for name, terms in totals.items()}

    def pending(self) -> dict[str, list[float]]:
        """Return the sums over all ranks before they are rounded, each as a few terms, and keep them."""
        mine = {name: exact_terms(terms) for name, terms in sorted(self.terms.items())}
        total = Sums()
        for sums in distributed.gather(mine, distributed.World() if self.alone else distributed.current_world()):
            total.add(sums)
        return {name: exact_terms(terms) for name, terms in total.terms.items()}

    def add(self, sums: dict[str, list[float]]) -> None:
        """Add what `pending` returned."""
        for name, terms in sums.items():
            self.terms.setdefault(name, []).extend(terms)


def exact_terms(terms: list) -> list[float]:
    """Return few terms with the same sum, exactly: the sum, what its rounding left out, and so on."""
    values, parts = [float(term) for term in terms], []
    if not math.isfinite(sum(values)):
        return [sum(values)]
    while part := math.fsum([*values, *(-part for part in parts)]):
        parts.append(part)
    return parts


class Predictions:
    """Count what a classifier with cross-entropy and at most 100 classes answers in an evaluation."""

    def __init__(self, loss: nn.Module, classes: int, world: distributed.World):
        self.classes = classes if isinstance(loss, nn.CrossEntropyLoss) and classes <= MAX_CLASSES else 0
        self.warned = not self.classes
        self.ignored, self.world = getattr(loss, "ignore_index", -100), world
        self.reset()

    def reset(self) -> None:
        """Forget everything, for the next evaluation."""
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=self.world.device)

    def add(self, targets: Any, outputs: Any, count: Any) -> None:
        """Add a batch with the model's outputs (B, classes). Does not wait for the device."""
        are_tensors = isinstance(targets, Tensor) and isinstance(outputs, Tensor)
        if not are_tensors or targets.ndim != 1 or targets.is_floating_point() or outputs.ndim != 2:
            return
        if (given := outputs.shape[1]) != self.classes:
            if not self.warned:
                log.warning("the model gives %d outputs, and -num_classes is %d: no f1", given, self.classes)
            self.warned = True
            return
        answers, targets = outputs.detach().argmax(1), targets.long()  # uint8 has no room for class times classes
        # The loss ignores others, as -100. A batch of padding has the count 0.
        counted = (targets >= 0) & (targets < self.classes) & (targets != self.ignored) & (count > 0)
        place = targets.clamp(0, self.classes - 1) * self.classes + answers
        self.counts.view(-1).index_add_(0, place, counted.long())

    def figures(self) -> dict[str, float]:
        """Return the macro F1 of all ranks' answers, or nothing if there are none. Every rank calls this once.

        A class that is neither a target nor an answer does not count. `counts` are then those of all ranks.
        """
        if not self.classes:
            return {}
        mine = distributed.gather(self.counts.tolist(), self.world)
        self.counts = torch.tensor(mine).sum(0)
        counts = self.counts.double()
        both = counts.sum(0) + counts.sum(1)
        return {"f1": (2 * counts.diag() / both)[both > 0].mean().item()} if both.any() else {}


def mean(totals: dict[str, float], name: str) -> float:
    """Return the mean over samples of a sum over samples, or NaN if nothing was counted."""
    count = totals.get("samples", 0)
    return totals.get(name, math.nan) / count if count else math.nan


def check_same(figures: dict[str, Any], world: distributed.World) -> None:
    """Raise UsageError, on all ranks, if they have other figures, as those of what each has collected by itself."""
    texts = distributed.gather({name: str(value) for name, value in figures.items()}, world)  # NaN is like NaN
    for name in sorted(set().union(*texts)):
        values = [one.get(name, "not there") for one in texts]
        if len({*values}) > 1:
            wanted = "compute it from sums over all ranks, as metric_sums returns them"
            raise UsageError(f"the figure {name} differs between the ranks, by rank {', '.join(values)}: {wanted}")


def new_best(best: dict | None, figures: dict[str, float], metric: str | None, number: int) -> dict | None:
    """Return the new best validation, or None if these figures are not better than `best` or the loss is NaN.

    `number`: of this validation, from 1. `metric` is the one to go by: a name, or NAME:min if less is better; without
    one it is accuracy, or else the loss. Raises UsageError if the evaluation does not give it.
    """
    name, _, direction = (metric or ("accuracy" if "accuracy" in figures else "loss")).partition(":")
    given = ", ".join(figures) or "nothing"
    if name not in figures:
        if metric:
            raise UsageError(f"-best {metric}: the validation gives {given}{suggest(name, figures)}")
        if number == 1:
            log.warning("no best weights: the validation gives %s; choose one by -best NAME or NAME:min", given)
        return None
    less = direction == "min" or (not direction and name.rpartition("/")[2] in LOWER_IS_BETTER)
    score = -figures[name] if less else figures[name]
    loss = "/".join([*name.split("/")[:-1], "loss"])  # outputs that are NaN have an accuracy, too
    for figure in (name, loss):
        if math.isnan(figures.get(figure, 0.0)):
            log.warning("no best weights of this validation: its %s is NaN", figure)
            return None
    if best and best["metric"] == name and score <= best["score"]:
        return None
    return {"metric": name, "value": figures[name], "score": score, "evaluation": number}


def write_line(file: TextIO, figures: dict[str, Any]) -> None:
    """Append a line to metrics.jsonl. NaN and infinity, which JSON does not know, become null."""
    odd = {name: None for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    try:
        file.write(json.dumps(figures | odd) + "\n")
    except OSError as error:
        log.warning("cannot write %s (%s): training continues", file.name, error)


def truncate_lines(path: Path, step: int) -> set[str]:
    """Cut off what follows the last line of metrics.jsonl up to a step: later ones, or what a kill left of one.

    Lines before it that are odd stay. Returns the names of the figures that are logged at this very step.
    """
    end, names = 0, set()
    with files.open_regular(path, "a+b") as file:
        file.seek(0)
        while line := file.readline(MAX_LINE):
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                record = json.loads(line)
                if record["step"] <= step and line.endswith(b"\n"):
                    names |= record.keys() if record["step"] == step else set()
                    end = file.tell()
        file.truncate(end)
    return names
