"""Figures of a run: sums over micro-batches and processes, the best evaluation, metrics.jsonl."""

import contextlib
import json
import logging
import math
import numbers
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from lib.utils import distributed, files
from lib.utils.errors import UsageError, suggest

log = logging.getLogger(__name__)
MAX_TERMS = 1000  # of a sum, before they are added up
LOWER_IS_BETTER = "loss logloss nll bits mae mse rmse msle mape error errors perplexity ppl wer cer eer fid ece"
LOWER_IS_BETTER += " brier err kl nrmse rmsle smape entropy crossentropy distance lpips"
COUNT = "\0count"  # after a metric's name: the sum of its counts


class Ratio(NamedTuple):
    """A metric of a batch: its totals and its counts, summed over batches and processes, are divided at the end.

    Both are one number, or one for each class, (classes,): then the metric is the mean of those with a count above 0.
    """

    total: Any
    count: Any


def ratio(value: Any) -> Ratio:
    """Return the mean of a tensor's values, or of a single number, as a Ratio; a Ratio as it is."""
    if isinstance(value, Tensor) and value.ndim:
        return Ratio(value.sum(dtype=torch.float32 if value.dtype.itemsize == 2 else None), value.numel())
    return value if isinstance(value, Ratio) else Ratio(value, 1)


class Sums:
    """Named sums of this process; `reduce`, which every rank calls equally often, adds up those of all ranks.

    They are exact until they are rounded once: no order of additions changes a bit. Ranks may have different names.
    With `alone`, all ranks have the same sums, and each reduces its own.
    """

    def __init__(self, alone: bool = False):
        self.alone = alone
        self.terms: dict[str, list] = {}
        self.shapes: dict[str, tuple] = {}

    def update(self, values: dict[str, Any], samples: int | None = None) -> Any:
        """Add numbers, 0-d tensors or Ratios; return these sums. A batch of `samples` may also have tensors (B, ...).

        Raises UsageError for anything else, as a batch's mean or sum, and for another shape than before.
        """
        if not isinstance(values, dict):
            raise UsageError(f"evaluation_step returns {values!r:.40}: it must return a dict of metrics")
        for name, value in values.items():
            if samples is not None and not isinstance(value, Ratio):
                if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
                    given = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
                    found = f"metric {name!r} of a batch of {samples} samples is {given}"
                    raise UsageError(f"{found}: give a tensor with a value for each, (B,), or Ratio(sum, count)")
                value = ratio(value)
            is_ratio = isinstance(value, Ratio)
            for key, part in zip((name, f"{name}{COUNT}"), value if is_ratio else [value]):
                shape = getattr(part, "shape", ())
                is_plain = isinstance(part, Tensor | numbers.Real) and not hasattr(part, "full_tensor")
                is_known = is_plain and len(shape) <= is_ratio and "[" not in name
                if not is_known or self.shapes.setdefault(name, shape) != shape:
                    raise UsageError(f"metric {name!r} is made of {part!r:.40}: give numbers, or a Ratio of vectors")
                self.terms.setdefault(key, []).append(part.detach().clone() if isinstance(part, Tensor) else part)
                if len(self.terms[key]) > MAX_TERMS:
                    self.add(exact({key: self.terms.pop(key)}))
        return self

    def reduce(self) -> Any:
        """Return the sums over all ranks since the last call. Waits for the device and the other ranks."""
        totals, self.terms = self.pending(), {}
        return {name: math.fsum(terms) for name, terms in totals.items()}

    def pending(self) -> dict[str, list[float]]:
        """Return the sums over all ranks before they are rounded, each as a few terms, and keep them."""
        mine, total = exact(self.terms), Sums()
        for sums in distributed.gather(mine, distributed.World() if self.alone else distributed.current_world()):
            total.add(sums)
        return exact(total.terms)

    def add(self, sums: dict[str, list[float]]) -> None:
        """Add what `pending` returned."""
        for name, terms in sums.items():
            self.terms.setdefault(name, []).extend(terms)


def exact(terms: dict[str, list]) -> dict[str, list[float]]:
    """Return few numbers for each name, with the same sum; for a vector under NAME[0], NAME[1], ... Waits."""
    columns: dict[str, list] = {}
    for name in sorted(terms):
        for term in terms[name]:
            found = term.tolist() if isinstance(term, Tensor) else term
            is_vector = isinstance(found, list)
            for place, value in enumerate(found if is_vector else [found]):
                columns.setdefault(f"{name}[{place}]" if is_vector else name, []).append(value)
    return {name: exact_terms(column) for name, column in columns.items()}


def exact_terms(terms: list) -> list[float]:
    """Return few terms with the same sum, exactly: the sum, what its rounding left out, and so on."""
    values, parts = [float(term) for term in terms], []
    if not math.isfinite(sum(values)):
        return [sum(values)]
    while part := math.fsum([*values, *(-part for part in parts)]):
        parts.append(part)
    return parts or [0.0]


def means(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of reduced sums of Ratios; NaN where nothing was counted."""
    found: dict[str, list[float]] = {}
    for key, total in sums.items():
        name, bracket, place = key.partition("[")
        if (count := sums.get(f"{name}{COUNT}{bracket}{place}")) is not None:  # else this is a count itself
            found.setdefault(name, []).extend([total / count] if count else [])
    return {name: math.fsum(values) / len(values) if values else math.nan for name, values in found.items()}


def check_same(figures: dict[str, Any], world: distributed.World) -> None:
    """Raise UsageError, on all ranks, if they have other figures, as those of what each has collected by itself."""
    texts = distributed.gather({name: str(value) for name, value in figures.items()}, world)  # NaN is like NaN
    for name in sorted(set().union(*texts)):
        values = [one.get(name, "not there") for one in texts]
        if len({*values}) > 1:
            wanted = "let compute_metrics return the sums that it is made of, as a Ratio"
            raise UsageError(f"the figure {name} differs between the ranks, by rank {', '.join(values)}: {wanted}")


def new_best(best: dict | None, figures: dict[str, float], metric: str | None, number: int) -> dict | None:
    """Return the new best validation, or None if these figures are not better than `best`, or are not finite.

    `number`: of this validation, from 1. `metric` is the one to go by: a name, or NAME:min if less is better, as of
    words in LOWER_IS_BETTER; without one accuracy, or else the loss. Raises UsageError if it is not there.
    """
    usual = "accuracy" if "accuracy" in {*figures, (best or {}).get("metric")} else "loss"
    name, _, direction = (metric or usual).partition(":")
    if metric and name not in figures:
        raise UsageError(f"-best {metric}: the validation gives {', '.join(figures)}{suggest(name, figures)}")
    if name not in figures:
        if number == 1:
            log.warning("no best weights: the validation gives %s; choose one by -best NAME", ", ".join(figures))
        return None
    words = {*"".join(one if one.isalnum() else " " for one in name.lower()).split()}
    is_lower = {*LOWER_IS_BETTER.split()} & words and "neg" not in words  # as scikit-learn's scores
    sign = -1 if direction == "min" or (not direction and is_lower) else 1
    if metric and number == 1:
        log.info("best weights: by the %s %s", "highest" if sign > 0 else "lowest", name)
    for figure in (name, "/".join([*name.split("/")[:-1], "loss"])):  # outputs that are NaN have an accuracy, too
        if not math.isfinite(figures.get(figure, 0.0)):
            log.warning("no best weights of this validation: its %s is %s", figure, figures[figure])
            return None
    if best and best["metric"] == name and sign * figures[name] <= sign * best["value"]:
        return None  # by its value: the score of another -best may have the other sign
    return {"metric": name, "value": figures[name], "score": sign * float(figures[name]), "evaluation": number}


def write_line(file: TextIO, figures: dict[str, Any]) -> None:
    """Append a line to metrics.jsonl. NaN and infinity, which JSON does not know, become null."""
    odd = {name: None for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    try:
        file.write(json.dumps(figures | odd) + "\n")
    except OSError as error:
        log.warning("cannot write %s (%s): training continues", file.name, error)


def truncate_lines(path: Path, samples: int) -> set[str]:
    """Cut off what came after so many samples (a resume may count other steps). Returns the last figures' names."""
    end, names = 0, set()
    with files.open_regular(path, "a+b") as file:
        file.seek(0)
        while line := file.readline(1 << 20):
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                record = json.loads(line)
                if record["samples"] <= samples and line.endswith(b"\n"):
                    names |= record.keys() if record["samples"] == samples else set()
                    end = file.tell()
        file.truncate(end)
    return names
