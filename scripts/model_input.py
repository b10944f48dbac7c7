"""Gives a run's model its weights, its classes' names and one input as the usual trainer does (lib/core/loss.py).

For predict.py, export.py and -eval.
"""

import contextlib
import inspect
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from lib import config
from lib.config import plugins
from lib.core import loss
from lib.utils import seeding
from lib.utils.checkpoint import weights
from lib.utils.checkpoint.state import unwrap
from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def config_file(run: str | Path) -> Path:
    """Return the file with the flags of a run. Raises UsageError if this is no run's folder."""
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise UsageError(f"{run} is no run's folder: it has no config.yaml")
    return file


def flags_of(run: str | Path) -> config.Args:
    """Return the flags of a run. Raises UsageError if this is no run's folder."""
    return config.parse_args(["-cfg", str(config_file(run))], describe=False)


def load_whole(path: str, model: nn.Module, arch: str, trainer: str = "") -> str:
    """Give the model all the weights in a file; return how many. Raises UsageError if they are another model's.

    `trainer`: that of the run, if they are the run's own. A module around the model, which it made, shows in names.
    """
    try:
        loaded = weights.load_into(path, model, whole=True)
    except UsageError as error:  # it is about -weights, which not every program has
        raise UsageError(str(error).removeprefix("-weights ")) from error
    if others := loaded.partition("not used: ")[2]:
        raise UsageError(f"{path}: -arch {arch} is another model than that of these weights: it has no {others}")
    renamed = loaded.partition("; as ")[2].replace("_orig_mod.", "")  # which compiled parts have in their names
    there, _, here = renamed.removesuffix(" here").partition(" is ")
    if trainer and there != here:
        found = f"-trainer {trainer} has trained another model than that of -arch {arch}: {there} is {here} here"
        raise UsageError(f"{path}: {found}. Let get_model return the whole: what the trainer put around is missing")
    return loaded


def note_on_classes(path: Path, mine: list[str]) -> str:
    """Return that these weights are for other classes than `mine`, "" if they are not, or if it is not known."""
    theirs = classes_of(path)
    if not (theirs and mine) or theirs == mine:
        return ""
    known = f"{path}: its classes are {theirs!s:.80}, and here they are {mine!s:.80}"
    return f"{known}: names and figures mean nothing if these are others"


def classes_of(path: Path) -> list[str]:
    """Return the names of the classes of the run whose weights these are; [] if they are none of a run's."""
    file = next((one / "config.yaml" for one in (path, *path.parents[:2]) if (one / "config.yaml").is_file()), None)
    found = yaml.safe_load(file.read_text()) if file else None
    about = found.get("about") if isinstance(found, dict) else None
    classes = about.get("classes") if isinstance(about, dict) else None
    return [*map(str, classes)] if isinstance(classes, list) else []


class Named(nn.Module):
    """A model that gets its one input by the name of a parameter of its `forward`."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, inputs):
        return self.model(**{self.name: inputs})


def outputs_of(answer: Any) -> Any:
    """Return the outputs in what a model returned, as in training, None if there are none."""
    return loss.split_output(answer._asdict() if hasattr(type(answer), "_asdict") else answer)[0]


def is_usual(step: Callable) -> bool:
    """Return whether the text of a step gives the model its batch as it is, and the outputs to -loss."""
    text = ""
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(step)
    is_called = re.search(r"losses\.forward\((self\.)?model, batch, self\.loss\)", text)
    return bool(is_called) and not re.search(r"\bbatch\b[^=\n(]* = ", text)


def note_on_trainer(args: Namespace) -> str:
    """Return how the run's figures may come from other inputs than the model gets here, "" if no trainer says so."""
    if is_usual(plugins.load("trainer", args.trainer).Trainer.evaluation_step):
        return ""
    what = "what it does to inputs is missing here, and its loss may give outputs another meaning"
    return f"-trainer {args.trainer} has an evaluation_step of its own: {what}"


def training_samples(args: Namespace) -> Any:
    """Return the training samples of a run. Raises UsageError or OSError, as for data that is not there."""
    return find_splits(args)["train"]


def find_splits(args: Namespace, overfit: int | None = None) -> dict[str, Any]:
    """Return the splits of -dataset as train.py gets them. Raises UsageError as `loader.splits` does."""
    dataset = plugins.mixed(plugins.load("dataset", args.dataset), args.data)
    seeding.seed(seeding.MODEL, args.seed)
    return loader.splits(dataset.get_dataset(args), args.dataset, overfit)


def first_inputs(model: nn.Module, samples: Any, args: Namespace) -> Any:
    """Return what the trainer gives the model of two samples: of a dict those entries that `forward` takes."""
    two = loader.Loader(samples, Plan(len(samples), 2, 2), World(), seed=args.seed, shuffle=False, workers=0)
    _, batch = next(two.epoch(0))
    inputs = loss.split_batch(batch)[0]
    if not isinstance(inputs, Mapping) or takes_all(parameters := parameters_of(model)):
        return inputs
    names = [one.name for one in parameters]
    return {name: value for name, value in inputs.items() if name in names} or inputs


def with_one_input(model: nn.Module, args: Namespace, inputs: Any = None) -> nn.Module:
    """Return a module that takes one tensor, and gives it to the model as in training: by its name if it has one.

    `inputs` are those of two samples (`first_inputs`). Without them, samples are read if only they tell the name, or
    to warn of a second input that `forward` gets in training.
    Raises UsageError if that fails, or if `forward` needs more than one input.
    """
    parameters = parameters_of(model)
    names = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if inputs is None and is_first(model):
        if note := note_on_other_inputs(model, names, args):
            warnings.warn(f"-arch {args.arch} {note}", stacklevel=4)
    elif inputs is None:
        try:
            inputs = first_inputs(model, training_samples(args), args)
        except (UsageError, OSError) as error:
            known = " or ".join(name for name in names if name not in loss.TARGETS) or "some entry of a dict"
            found = f"forward takes its input as {known}, and the data, which would tell, cannot be read ({error})"
            hint = "let the input be its first parameter, without a default"
            raise UsageError(f"-arch {args.arch}: {found}: {hint}") from None
    entries = [*inputs] if isinstance(inputs, Mapping) else []
    if len(entries) > 1:
        raise UsageError(f"-arch {args.arch} takes {' and '.join(entries)} in training, and here one input alone")
    by_name = [name for name in entries if name in names or takes_all(parameters)]
    given = by_name or names[:1]
    needed = [one.name for one in parameters if one.name in names and one.default is one.empty]
    if more := [name for name in needed if name not in given]:
        hint = f"give it a default ({more[0]}=None), and return the outputs without it"
        raise UsageError(f"-arch {args.arch}: forward needs {' and '.join(more)}, and here it has one input: {hint}")
    return Named(model, by_name[0]).eval() if by_name else model


def note_on_other_inputs(model: nn.Module, names: list[str], args: Namespace) -> str:
    """Return what `forward` gets, or may get, in training after its first parameter; "" if nothing."""
    others = [name for name in names if name not in loss.TARGETS][1:]
    if not others or hasattr(model, "main_input_name"):
        return ""
    try:
        inputs = first_inputs(model, training_samples(args), args)
    except Exception as error:  # noqa: BLE001  # of any dataset
        maybe = [one.name for one in parameters_of(model) if one.name in others and one.default is None]
        known = f"has an optional {' and '.join(maybe)}: whether training gives it, the data would say"
        return f"{known}, and cannot be read ({error})" if maybe else ""  # other defaults are those of options
    more = [name for name in others if isinstance(inputs, Mapping) and name in inputs]
    return f"also gets {' and '.join(more)} in training, and here not" if more else ""


def is_first(model: nn.Module) -> bool:
    """Whether the first parameter of `forward` surely gets the input in training.

    So it is if it has no default, if it is the only one, or if a model of transformers says so.
    """
    inputs = [one for one in parameters_of(model) if one.name not in loss.TARGETS]
    if not inputs or inputs[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        return False
    first = inputs[0]
    return first.default is first.empty or len(inputs) == 1 or first.name == getattr(model, "main_input_name", None)


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    _, *parameters = loss.signature(type(unwrap(model)).forward).parameters.values()
    return parameters


def takes_all(parameters: list[inspect.Parameter]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in parameters)
