"""python train.py ... -eval: evaluates a run's weights, and leaves the run as it is."""

import json
import logging
import time
from typing import TYPE_CHECKING

from lib.utils.checkpoint import atomic, run_folder, weights
from lib.utils.errors import UsageError
from lib.utils.monitoring import console, metrics

if TYPE_CHECKING:
    from lib.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def evaluate(trainer: "Trainer") -> str:
    """Evaluate -weights, or the run's best or final weights, on val and test; log the figures and write eval.json.

    Raises:
        UsageError: there are no weights, they are not the whole model's, or there is nothing to evaluate on.
    """
    args, folder = trainer.args, trainer.folder
    path = weights.find(folder) if args.weights in (None, weights.IMAGENET) else args.weights
    splits = [split for split in trainer.loaders if split != "train"]
    if path is None:
        raise UsageError(f"-eval: {folder} has neither best nor final weights; name some by -weights FILE")
    if not splits:
        raise UsageError(f"-eval: -dataset {args.dataset} has neither a val nor a test split")
    log.info("weights:     %s", weights.load_into(str(path), trainer.model, whole=True))
    trainer.is_loaded = True
    trainer.make_engine()
    if next(trainer.loss.parameters(), None) is not None:
        log.warning("the loss has parameters, which no weights file holds: its figures are those of fresh ones")
    figures = {split: trainer.evaluate(split) for split in splits}
    metrics.check_same(figures, trainer.world)
    for split in splits:
        log.info("%s  %s", split, console.format_metrics(figures[split]))
    if trainer.world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        run_folder.check_owner(folder)
        text = json.dumps({"weights": str(path), "time": time.strftime("%Y-%m-%d %H:%M:%S"), **figures}, indent=2)
        try:
            atomic.write_file(folder / "eval.json", text + "\n")
            log.info("written:     %s", folder / "eval.json")
        except OSError as error:
            log.warning("not written: %s", error)
    return "finished"
