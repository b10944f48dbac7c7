"""python train.py ... -eval: evaluates a run's weights, and leaves the run as it is."""

import json
import logging
import time
from pathlib import Path

import yaml
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.core import replicas
from lib.trainer.trainer import Trainer
from lib.utils.checkpoint import atomic, run_folder, weights
from lib.utils.errors import UsageError
from lib.utils.monitoring import console, metrics

log = logging.getLogger(__name__)


def evaluate(trainer: Trainer) -> str:
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
    theirs, mine = classes_of(Path(path)), trainer.plan.data["classes"]
    if theirs and mine and theirs != mine:
        text = "%s are for the classes %.80s, and the data has %.80s: the figures mean nothing if these are others"
        log.warning(text, path, theirs, mine)
    trainer.is_loaded = True
    trainer.make_engine()
    kind, methods = type(trainer), ("evaluate", "evaluation_step")  # which may use others' weights, as a teacher's
    is_own = any(getattr(kind, name) is not getattr(Trainer, name) for name in methods)
    of_base = trainer.of_base.keys() | replicas.MADE_LATER
    used = {name: one for name, one in vars(trainer).items() if is_own and name not in of_base}
    for name, one in {"loss": trainer.loss, **used}.items():
        values = [*one.parameters()] if isinstance(one, nn.Module) else tree_leaves(one)
        if any(isinstance(value, Tensor) for value in values):
            text = "trainer.%s is not in a weights file, and as the start makes it: so are figures that use it"
            log.warning(text, name)
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


def classes_of(path: Path) -> list[str]:
    """Return the names of the classes of the run whose weights these are; [] if they are none of a run's."""
    file = next((one / "config.yaml" for one in (path, *path.parents[:2]) if (one / "config.yaml").is_file()), None)
    found = yaml.safe_load(file.read_text()) if file else None
    about = found.get("about") if isinstance(found, dict) else None
    classes = about.get("classes") if isinstance(about, dict) else None
    return [*map(str, classes)] if isinstance(classes, list) else []
