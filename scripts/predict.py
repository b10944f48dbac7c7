"""Predicts with a run's model: python scripts/predict.py out/NAME FILES... [-o answers.csv].

FILES are images, text files, or folders, which are searched for images. The run's dataset prepares each file
(get_transform). The weights are those of -from, else the best ones, else the final ones. The training data is not
needed, unless it alone shows which parameter of the model's `forward` gets the input.
Each file gets a row: its prediction, or the reason why there is none. Exit code 1: some files have none.
Where images lie in folders named like classes, the last lines say how many get another class, and name the first
five; CSV and JSON have a column `folder`.
In a notebook: from scripts import predict; predict.load("out/NAME")([image]), or predict.load_model("out/NAME").
"""

import argparse
import csv
import io
import json
import logging
import math
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import plugins
from lib.core import loss, parallel
from lib.utils import seeding
from lib.utils.checkpoint import atomic, weights
from lib.utils.data import photos
from lib.utils.errors import FAILED, FINISHED, UsageError, printable
from scripts import model_input

log = logging.getLogger(__name__)
BATCH = 64  # images at once
SHOWN = 3  # classes of a file in the table
WRONG = 5  # images listed as in the folder of another class
MOST = 60  # characters of a -text in the table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="out/NAME", help="a run's folder")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILES", help="images, texts, or folders of images")
    parser.add_argument("-text", nargs="+", default=[], metavar="TEXT", help="texts to predict the next byte of")
    parser.add_argument("-from", dest="source", metavar="WHAT", help="best, final, or a file of weights (best)")
    parser.add_argument("-o", type=Path, metavar="FILE", help=".csv or .json, with all probabilities (a table)")
    parser.add_argument("-format", choices=FORMATS, help="(by the ending of -o, else table)")
    parser.add_argument("-device", default=default_device(), help="cpu, cuda, cuda:1, mps, ... (%(default)s)")
    args = parser.parse_args(argv)
    ending = args.o.suffix.lower().lstrip(".") if args.o else ""
    form = args.format or ("table" if ending in ("", "txt") else ending)
    try:
        if form not in FORMATS:
            raise UsageError(f"-o {args.o}: give it the ending .csv, .json or .txt, or add -format")
        check_device(args.device)
        network, config_of_run = load_model(args.run, args.device, args.source), model_input.flags_of(args.run)
        model = predictor(network, args.run, args.device)
        transform = plugins.load("dataset", config_of_run.dataset).get_transform(config_of_run)
        rows = list(answers(transform, model, [*files(args.files), *args.text]))
        if not rows:
            raise UsageError("nothing to predict: name images, text files or folders of images, or give -text")
        text = FORMATS[form](rows, config_of_run.loss == "cross_entropy")
        note = note_on_outputs(network, config_of_run)
        if args.o:
            atomic.write_file(args.o, text)
    except (UsageError, OSError) as error:
        parser.exit(2, printable(f"predict.py: {error}\n"))
    if note:
        print(f"predict.py: {note}", file=sys.stderr)
    failed = sum(bool(row.fault) for row in rows)
    print(printable(f"{args.o}: {len(rows) - failed} predictions" if args.o else text.rstrip("\n")))
    if failed:
        print(f"predict.py: {failed} of {len(rows)} files could not be predicted", file=sys.stderr)
    if config_of_run.loss == "cross_entropy" and any(row.folder for row in rows):
        print(wrong([row for row in rows if row.folder]), file=sys.stderr)
    return FAILED if failed else FINISHED


@torch.random.fork_rng(devices=[])  # torch's stays the caller's
def load_model(run: str | Path, device: str | torch.device = "cpu", source: str | Path | None = None) -> nn.Module:
    """Return a run's model with its best weights, or where there are none its final ones, for evaluation, frozen.

    `source` chooses others: "best", "final", or a file. As a teacher in a trainer's __init__ take its forward, a
    function: no checkpoint holds it. The run's data is not needed. Raises UsageError without such weights, or if the
    run's trainer has put another module around the model.
    """
    args = model_input.flags_of(run)
    file = Path(run, source, weights.FILE) if source in ("best", "final") else source or weights.find(Path(run))
    if file is None:
        raise UsageError(f"{run} has no best or final weights yet: they come with the first evaluation")
    arch = plugins.load("arch", args.arch)
    model = parallel.build(arch, args).eval().requires_grad_(False)  # seeded, as for the training
    model_input.load_whole(str(file), model, args.arch, args.trainer if source in (None, "best", "final") else "")
    if note := model_input.note_on_classes(Path(file), model_input.classes_of(Path(run))):
        log.warning("%s", note)
    return model.to(device)


@torch.random.fork_rng(devices=[])
def load(
    run: str | Path, device: str | torch.device = "cpu", source: str | Path | None = None
) -> Callable[[list], list[dict[str, float]]]:
    """Return a function from a list of PIL images, or of texts, to a dict for each: its probability by class.

    They may also be tensors, made by the dataset's get_transform. Where classes share a name, a number follows it.

    With another loss than cross_entropy it is the model's outputs by number. Of a sequence, the last place counts.
    The weights are those that `load_model` takes. The run's data is needed only if it alone shows which parameter of
    `forward` gets the input; a warning names another one that the training gives, too, and a trainer that may prepare
    inputs itself. Raises UsageError if the model needs more than one.
    """
    if note := model_input.note_on_trainer(model_input.flags_of(run)):
        log.warning("%s", note)
    return predictor(load_model(run, device, source), run, device)


def predictor(model: nn.Module, run: str | Path, device: str | torch.device) -> Callable[[list], list[dict]]:
    """Return what `load` returns, of a model of `load_model`."""
    args = model_input.flags_of(run)
    names = model_input.classes_of(Path(run))
    dataset = plugins.load("dataset", args.dataset)
    if not hasattr(dataset, "get_transform"):
        raise UsageError(f"lib/dataset/{args.dataset}.py has no get_transform(args): see lib/dataset/__init__.py")
    model, transform = model_input.with_one_input(model, args), dataset.get_transform(args)
    precision = parallel.autocast(args, torch.device(device))

    @torch.no_grad()
    def predict(inputs: list) -> list[dict[str, float]]:
        if not inputs:
            return []
        rows = [one if isinstance(one, Tensor) else tensor_of(transform(one)) for one in inputs]
        alike = len({row.shape for row in rows}) == 1
        answers = []
        for batch in [torch.stack(rows)] if alike else [row[None] for row in rows]:  # texts have their own lengths
            try:
                with precision:
                    answer = model(batch.to(device))
            except (RuntimeError, TypeError, ValueError, LookupError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                given = f"{batch.dtype} {tuple(batch.shape)}, of get_transform"
                raise UsageError(f"-arch {args.arch} takes no inputs of {given} ({reason})") from error
            outputs = one_row_each(model_input.outputs_of(answer), len(batch), args)
            answers += (outputs.softmax(1) if args.loss == "cross_entropy" else outputs).tolist()
        shown = [*names, *map(str, range(len(names), len(answers[0])))]
        keys = [f"{name} ({n})" if shown.count(name) > 1 else name for n, name in enumerate(shown)]
        return [dict(zip(keys, one)) for one in answers]

    return predict


def tensor_of(made: Any) -> Tensor:
    """Return what get_transform gave. Raises UsageError unless it is a tensor."""
    if not isinstance(made, Tensor):
        raise UsageError(f"get_transform returns a {type(made).__name__}, and no tensor")
    return made


def note_on_outputs(model: nn.Module, args: Namespace) -> str:
    """Return what the outputs are, if the run may have another loss than `args.loss`, or other inputs."""
    own = plugins.load("trainer", args.trainer).Trainer
    note = model_input.note_on_trainer(args)
    if args.loss != "cross_entropy":
        return note
    if not note and not model_input.is_usual(own.training_step):
        note = f"-trainer {args.trainer} has a training_step of its own: its loss may give outputs another meaning"
    elif not note and {*loss.signature(type(model).forward).parameters} & {*loss.TARGETS}:
        note = f"-arch {args.arch} gets targets: a loss of its own may give outputs another meaning"
    return note and f"probabilities are the softmax of the outputs; {note}"


def one_row_each(outputs: Tensor | None, samples: int, args: Namespace) -> Tensor:
    """Return outputs as (samples, numbers), float32. Raises UsageError for other shapes than those of `load`."""
    shape = None if outputs is None else tuple(outputs.shape)
    if isinstance(outputs, Tensor) and outputs.shape[:1] == (samples,):
        if outputs.ndim == 2 and (outputs.shape[1] > 1 or args.loss != "cross_entropy"):  # else it is always 1.0
            return outputs.float()
        if outputs.ndim == 1 and args.loss != "cross_entropy":
            return outputs[:, None].float()
        if outputs.ndim == 3 and outputs.shape[2] == args.num_classes:
            return outputs[:, -1].float()
    wanted = f"(samples, numbers), (samples, length, {args.num_classes}) or, of a regression, (samples,)"
    raise UsageError(f"-arch {args.arch} gives outputs {shape} for {samples} samples; predict.py shows {wanted}")


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def check_device(name: str):
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"-device {name}: {str(error).splitlines()[0]}") from None


def is_image(one: Path | str) -> bool:
    return isinstance(one, Path) and one.suffix.lower() in photos.IMG_EXTENSIONS


def files(given: list[Path]) -> Iterator[Path]:
    """The files, and of each folder the images in it, in order; hidden ones are left out."""
    for path in given:
        if not path.is_dir():
            yield path
            continue
        images, others = photos.find(path)
        if others:
            print(f"predict.py: {path}: {photos.describe(others)}", file=sys.stderr)
        yield from map(Path, images)


@dataclass
class Row:
    """What came of an input: a prediction, or the reason why there is none."""

    name: str
    is_text: bool
    values: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def best(self) -> str:
        return max(self.values, key=self.values.__getitem__)

    @property
    def folder(self) -> str:
        """The class after which the innermost folder is named that an image lies in, "" if none is."""
        *folders, _ = Path(self.name).parts if is_image(Path(self.name)) else [""]
        return next((name for name in reversed(folders) if name in self.values), "")


def answers(transform: Callable, model: Callable, inputs: list[Path | str]) -> Iterator[Row]:
    """Yield a row for each input, in order: up to BATCH at once, of which only the tensors are kept."""
    for start in range(0, len(inputs), BATCH):
        rows, tensors = [], []
        for one in inputs[start : start + BATCH]:
            rows.append(Row(printable(str(one)), isinstance(one, str)))
            try:
                tensors.append(prepare(transform, one))
            except (UsageError, OSError) as error:
                if isinstance(one, str):  # -text, for a model that takes none
                    raise
                rows[-1].fault = printable(str(error))
        good = [row for row in rows if not row.fault]
        seeding.seed(seeding.EVALUATION, 0)  # the same answer each time, of models that draw, too
        for row, values in zip(good, model(tensors) if tensors else []):
            if all(map(math.isfinite, values.values())):
                row.values = values
            else:
                row.fault = "the model's outputs are not finite"
        yield from rows


def prepare(transform: Callable, one: Path | str) -> Tensor:
    """Return what the model gets of an input. Raises UsageError or OSError with the reason why it cannot."""
    if isinstance(one, Path) and not one.is_file():
        raise UsageError("no such file")
    try:
        if is_image(one):
            return tensor_of(photos.read(one, transform))
        text = read_text(one) if isinstance(one, Path) else one
        if not text:
            raise UsageError("an empty text has no next byte")
        return tensor_of(transform(text))
    except (AttributeError, TypeError) as error:
        if isinstance(one, Path) and not is_image(one):
            known = (
                f"a file {one.suffix or 'without an ending'} is not read (read are {' '.join(photos.IMG_EXTENSIONS)})"
            )
            raise UsageError(f"{known}: get_transform takes no text ({type(error).__name__}: {error})") from None
        kind = "images" if is_image(one) else "texts"
        raise UsageError(f"the dataset of this run takes no {kind} ({error})") from None
    except (UsageError, OSError):
        raise
    except Exception as error:  # whatever the dataset's get_transform raises
        raise UsageError(f"get_transform fails: {type(error).__name__}: {error}") from error


def read_text(file: Path) -> str | bytes:
    """Return a file's text, of one that is not in UTF-8 its bytes."""
    data = file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def wrong(rows: list[Row]) -> str:
    """Return how many images in folders of classes are predicted as another class, and the first of them."""
    found = [row for row in rows if row.best != row.folder]
    lines = [f"predict.py: {len(found)} of {len(rows)} images lie in the folder of another class"]
    lines += [f"  {row.name}  {row.best} {row.values[row.best]:.4f}" for row in found[:WRONG]]
    if len(found) > WRONG:
        lines.append("  ... (-o FILE.csv has all: `folder` is not `class`)")
    return printable("\n".join(lines))


def to_table(rows: list[Row], classifier: bool) -> str:
    """A line for each input: the most probable classes, or all outputs, or why there are none. Long texts are cut."""
    names = [row.name.replace("\n", "\\n") for row in rows]
    for number, row in enumerate(rows):
        if row.is_text and len(names[number]) > MOST:
            names[number] = f"{names[number][: MOST // 2 - 2]} .. {names[number][2 - MOST // 2 :]}"
    wide = max(map(len, names))
    lines = []
    for name, row in zip(names, rows):
        ranked = sorted(row.values.items(), key=lambda item: -item[1])[:SHOWN] if classifier else row.values.items()
        shown = [row.fault] if row.fault else [f"{printable(key)} {value:.4f}" for key, value in ranked]
        lines.append("  ".join([name.ljust(wide), *(one.replace("\n", "\\n") for one in shown)]))
    return "\n".join(lines) + "\n"


def to_csv(rows: list[Row], classifier: bool) -> str:
    filled, stream = records(rows, classifier), io.StringIO()
    writer = csv.DictWriter(stream, max(filled, key=len), lineterminator="\n")
    writer.writeheader()
    writer.writerows(filled)
    return stream.getvalue()


def to_json(rows: list[Row], classifier: bool) -> str:
    return json.dumps(records(rows, classifier), indent=1) + "\n"


def records(rows: list[Row], classifier: bool) -> list[dict]:
    """A dict for each input: of a classifier its class and the probability of that, before those of all classes.

    If some inputs failed, there is an `error`, too; if some images lie in the folder of a class, its name.
    A class with the name of a column before it follows "class ".
    """
    columns = ["file", *(["error"] if any(row.fault for row in rows) else [])]
    columns += ["folder"] if classifier and any(row.folder for row in rows) else []
    columns += ["class", "probability"] if classifier else []
    made = []
    for row in rows:
        names = [*columns]
        for name in row.values:
            while name in names:
                name = f"class {name}"
            names.append(name)
        facts = {"file": row.name, "error": row.fault, "folder": row.folder}
        if row.values and classifier:
            facts |= {"class": row.best, "probability": row.values[row.best]}
        values = [*(facts.get(name, "") for name in columns), *row.values.values()]
        made.append(dict(zip(names, values)))
    return made


FORMATS = {"table": to_table, "csv": to_csv, "json": to_json}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other programs do where `| head` has read enough
    sys.exit(main())
