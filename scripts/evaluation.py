"""python train.py ... -eval: evaluates a run's weights, and leaves the run as it is."""

import inspect
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.core import replicas
from lib.trainer.trainer import Trainer
from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, weights
from lib.utils.errors import UsageError
from lib.utils.monitoring import console, metrics
from scripts import model_input

log = logging.getLogger(__name__)
OF_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)  # no figure uses their states
OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)  # losses of outputs that are scores of classes
MOST_CLASSES = 1000  # of which answers are counted
SHOWN = 10  # classes in a line of the log


def evaluate(trainer: Trainer) -> str:
    """Evaluate -weights, or the run's best or final weights, on val and test; log the figures and write eval.json.

    Where each sample has one class, eval.json also says how many of each class got which answer.

    Raises:
        UsageError: there are no weights, they are another model's, or there is nothing to evaluate on.
    """
    args, folder = trainer.args, trainer.folder
    path = weights.find(folder) if args.weights in (None, weights.IMAGENET) else args.weights
    splits = [split for split in trainer.loaders if split != "train"]
    if path is None:
        raise UsageError(f"-eval: {folder} has neither best nor final weights; name some by -weights FILE")
    if not splits:
        raise UsageError(f"-eval: -dataset {args.dataset} has neither a val nor a test split")
    mine = trainer.plan.data["classes"]
    log.info("weights:     %s", model_input.load_whole(str(path), trainer.model, args.arch))
    if note := model_input.note_on_classes(Path(path), mine):
        log.warning("%s", note)
    trainer.is_loaded = True
    trainer.make_engine()
    kind, methods = type(trainer), ("evaluate", "evaluation_step", "compute_metrics", "count_targets")
    is_own = any(getattr(kind, name) is not getattr(Trainer, name) for name in methods)
    text = "".join(inspect.getsource(getattr(Trainer, name)) for name in methods)  # which a project may have changed
    used = {name: one for name, one in vars(trainer).items() if name not in replicas.OF_TRAINER}
    used = {name: one for name, one in used.items() if is_own or re.search(rf"\bself\.{name}\b", text)}
    for name, one in {"loss": trainer.loss, **used}.items():  # such methods may use others' weights, as a teacher's
        values = [*one.state_dict().values()] if isinstance(one, nn.Module) else tree_leaves(one)
        has_state = hasattr(one, "load_state_dict") and not isinstance(one, (nn.Module, *OF_TRAINING))
        if has_state or any(isinstance(value, Tensor) for value in values):
            text = "trainer.%s is not in a weights file, and as the start makes it: so are figures that use it"
            log.warning(text, name)
    answers, figures, confusion = Answers(trainer), {}, {}
    for split in splits:
        figures[split] = trainer.evaluate(split)
        confusion |= {split: counts.tolist()} if (counts := answers.take()) is not None else {}
    metrics.check_same(figures, trainer.world)
    for split in splits:
        log.info("%s  %s", split, console.format_metrics(figures[split]))
        if split in confusion:
            log.info("%s  recall  %s", split, lowest_recalls(confusion[split], mine))
    if trainer.world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        run_folder.check_owner(folder)
        facts = {"weights": str(path), "time": time.strftime("%Y-%m-%d %H:%M:%S"), **figures}
        text = json.dumps({**facts, "confusion": None}, indent=2)
        try:
            text = text.replace('"confusion": null', f'"confusion": {json_of(confusion)}')
            atomic.write_file(folder / "eval.json", text + "\n")
            log.info("written:     %s", folder / "eval.json")
        except OSError as error:
            log.warning("not written: %s", error)
    return "finished"


class Answers:
    """How many samples of each class get which answer, in the evaluations of a trainer, on this rank."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.counts, self.is_due = trainer, None, False
        self.evaluation_step, self.compute_metrics = trainer.evaluation_step, trainer.compute_metrics
        trainer.evaluation_step, trainer.compute_metrics = self.note, self.count

    def note(self, model: nn.Module, batch: Any, count: Any) -> dict[str, Any]:
        """Do what `evaluation_step` does."""
        self.is_due = isinstance(count, Tensor) or count > 0  # not of padding, and once a batch
        return self.evaluation_step(model, batch, count)

    def count(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """Do what `compute_metrics` does, and count the answers if they are of one class each."""
        are_classes = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point()
        are_scores = isinstance(self.trainer.loss, OF_CLASSES) and self.is_due
        self.is_due = False
        if are_classes and are_scores and outputs.ndim == 2 and outputs.shape[:1] == targets.shape:
            classes, targets = outputs.shape[1], targets.long()
            if 1 < classes <= MOST_CLASSES:
                ignored = getattr(self.trainer.loss, "ignore_index", -100)
                known = (targets != ignored) & (targets >= 0) & (targets < classes)
                pairs = targets[known] * classes + outputs.argmax(1)[known]
                found = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
                self.counts = found if self.counts is None else self.counts + found
        return self.compute_metrics(outputs, targets)

    def take(self) -> Tensor | None:
        """Return (classes, classes) counts of all ranks since the last call, by true class and answer; or None."""
        mine = None if self.counts is None else self.counts.cpu()
        counts = [one for one in distributed.gather(mine, self.trainer.world) if one is not None]
        self.counts = None
        return sum(counts[1:], counts[0]) if counts else None


def lowest_recalls(counts: list[list[int]], names: list[str]) -> str:
    """Return the classes with the lowest recall, as text."""
    recalls = {place: row[place] / sum(row) for place, row in enumerate(counts) if any(row)}
    shown = sorted(recalls, key=lambda place: recalls[place])[:SHOWN]
    text = "  ".join(f"{names[place] if place < len(names) else place}: {recalls[place]:.3f}" for place in shown)
    return text + ("  (the lowest)" if len(recalls) > SHOWN else "")


def json_of(confusion: dict[str, list[list[int]]]) -> str:
    """Return the counts as JSON in which each class has a line."""
    splits = {split: ",\n      ".join(map(str, counts)) for split, counts in confusion.items()}
    return "{" + ",".join(f'\n    "{split}": [\n      {rows}\n    ]' for split, rows in splits.items()) + "\n  }"
