"""Predicts with a run's model: python scripts/predict.py out/NAME FILES... [-o answers.csv].

FILES are images, text files, or folders, which are searched for images. The run's dataset prepares each file
(get_transform). The weights are the best ones, or else the final ones. The training data is not needed.
In a notebook: from lib import predict; predict.load("out/NAME")([image]).
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config, predict
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError
from lib.utils.monitoring.console import printable

BATCH = 64  # images at once
SHOWN = 3  # classes of a file in the table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="out/NAME", help="a run's folder")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILES", help="images, texts, or folders of images")
    parser.add_argument(
        "-text", nargs="+", default=[], metavar="TEXT", help="texts to predict the next byte or token of"
    )
    parser.add_argument("-o", type=Path, metavar="FILE", help=".csv or .json, with all probabilities (a table)")
    parser.add_argument("-format", choices=FORMATS, help="(by the ending of -o, else table)")
    parser.add_argument("-device", default=default_device(), help="cpu, cuda, cuda:1, mps, ... (%(default)s)")
    args = parser.parse_args(argv)
    ending = args.o.suffix.lstrip(".") if args.o else ""
    form = args.format or (ending if ending in FORMATS else "table")
    try:
        check_device(args.device)
        model = predict.load(args.run, args.device)
        predictions = list(answers(model, [*files(args.files), *args.text]))
        if not predictions:
            raise UsageError("nothing to predict: name images, text files or folders of images, or give -text")
        text = FORMATS[form](predictions, is_classifier(args.run))
        if args.o:
            atomic.write_file(args.o, text)
    except (UsageError, OSError) as error:
        parser.exit(2, printable(f"predict.py: {error}\n"))
    print(printable(f"{args.o}: {len(predictions)} predictions" if args.o else text.rstrip("\n")))
    return 0


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def check_device(name: str):
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"-device {name}: {str(error).splitlines()[0]}") from None


def is_classifier(run: Path) -> bool:
    return config.parse_args(["-cfg", str(run / "config.yaml")], describe=False).loss == "cross_entropy"


def is_image(one: Path | str) -> bool:
    return isinstance(one, Path) and one.suffix.lower() in IMG_EXTENSIONS


def files(given: list[Path]) -> Iterator[Path]:
    """The files, and of each folder the images in it, by name; hidden ones are left out."""
    for path in given:
        inside = (one for one in sorted(path.rglob("*")) if is_image(one) and not one.name.startswith("."))
        yield from inside if path.is_dir() else [path]


def answers(model: Callable, inputs: list[Path | str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the prediction of each input: images in batches, texts one by one."""
    images = [one for one in inputs if is_image(one)]
    batches = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
    for batch in [*batches, *([one] for one in inputs if not is_image(one))]:
        contents = [content(one) for one in batch]
        try:
            values = model(contents)
        except (AttributeError, TypeError) as error:
            kind = "images" if is_image(batch[0]) else "texts"
            raise UsageError(f"{batch[0]}: the dataset of this run takes no {kind} ({error})") from None
        yield from zip(map(str, batch), values)


def content(one: Path | str) -> Image.Image | str | bytes:
    """An image, in memory, or a text. Raises UsageError for a file that is empty or no image."""
    if isinstance(one, Path) and is_image(one):
        try:
            with Image.open(one) as image:
                return image.copy()
        except FileNotFoundError:
            raise
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(f"{one}: not a readable image ({error})") from None
    text = one.read_bytes() if isinstance(one, Path) else one
    if not text:
        raise UsageError(f"{one}: an empty text has no next byte")
    return text


def to_table(predictions: list[tuple[str, dict]], classifier: bool) -> str:
    """A line for each input: the most probable classes, or all outputs."""
    wide = max(len(name) for name, _ in predictions)
    lines = []
    for name, values in predictions:
        shown = sorted(values.items(), key=lambda item: -item[1])[:SHOWN] if classifier else values.items()
        lines.append("  ".join([name.ljust(wide), *(f"{one} {value:.4f}" for one, value in shown)]))
    return "\n".join(lines) + "\n"


def to_csv(predictions: list[tuple[str, dict]], classifier: bool) -> str:
    rows, stream = records(predictions, classifier), io.StringIO()
    writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def to_json(predictions: list[tuple[str, dict]], classifier: bool) -> str:
    return json.dumps(records(predictions, classifier), indent=1) + "\n"


def records(predictions: list[tuple[str, dict]], classifier: bool) -> list[dict]:
    """A dict for each input: of a classifier its class and the probability of that, before those of all classes."""
    rows = []
    for name, values in predictions:
        best = max(values, key=values.__getitem__)
        answer = {"class": best, "probability": values[best]} if classifier else {}
        rows.append({"file": name, **answer, **values})
    return rows


FORMATS = {"table": to_table, "csv": to_csv, "json": to_json}


if __name__ == "__main__":
    sys.exit(main())
