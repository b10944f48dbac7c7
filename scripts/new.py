"""Starts something of your own: python scripts/new.py arch|dataset|trainer NAME, project DIR, or update SOURCE.

`project` makes a project of your own from the template, and `update` merges later versions of the template into it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import update

if (Path(__file__).parent / "project.py").exists():  # only in the template
    from scripts import project

ROOT = Path(__file__).resolve().parents[1]
ARCH = '''"""NAME: two convolutions, to be changed as you like."""

from torch import nn

from lib.config import Args


def add_args(parser):
    parser.add_argument("-NAME_width", type=int, default=32, metavar="N", help="channels")


def get_model(args: Args) -> nn.Module:
    """(B, C, H, W) to (B, num_classes)."""
    width = args.NAME_width
    return nn.Sequential(
        nn.Conv2d(args.channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, args.num_classes),
    )
'''
DATASET = '''"""NAME: made-up images until you read your own here; each class has a brightness."""

import torch

from lib.config import Args
from lib.utils.data.tensors import Tensors


def add_args(parser):
    parser.add_argument("-NAME_samples", type=int, default=1000, metavar="N", help="samples to make")
    parser.set_defaults(num_classes=4, channels=1, image_size=16, epochs=5)


def get_dataset(args: Args) -> dict[str, Tensors]:
    """Images (C, H, W) and labels, a fifth of them to validate on."""
    generator = torch.Generator().manual_seed(args.seed)
    labels = torch.randint(args.num_classes, (args.NAME_samples,), generator=generator)
    shape = (args.NAME_samples, args.channels, args.image_size, args.image_size)
    images = torch.randn(shape, generator=generator) + labels.view(-1, 1, 1, 1)
    cut = args.NAME_samples // 5
    return {"train": Tensors(images[cut:], labels[cut:]), "val": Tensors(images[:cut], labels[:cut])}
'''
TRAINER = '''"""NAME: the usual training, with a price on large outputs."""

from lib.trainer import trainer


def add_args(parser):
    parser.add_argument("-NAME_price", type=float, default=1e-3, help="of the mean squared output")


class Trainer(trainer.Trainer):
    """What it does not override is as in lib/trainer/trainer.py."""

    def training_step(self, batch):
        """The mean loss over a micro-batch (collated as the dataset gives it, on the device), ready for backward."""
        inputs, targets = batch
        outputs = self.model(inputs)
        return self.loss(outputs, targets) + self.args.NAME_price * outputs.square().mean()
'''
TEMPLATES = {"arch": ARCH, "dataset": DATASET, "trainer": TRAINER}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for kind in TEMPLATES:
        what.add_parser(kind, help=f"a file lib/{kind}/NAME.py that runs").add_argument("name")
    if "project" in globals():
        project.add_args(what.add_parser("project", help="a project of your own, of the parts that you choose"))
    merging = what.add_parser("update", help="merge a later version of the template into this project")
    merging.add_argument("source", metavar="SOURCE", help="the template: its folder, or a Git URL")
    args = parser.parse_args()
    try:
        if args.what == "update":
            return update.merge(args.source)
        print(project.create(args) if args.what == "project" else create_plugin(args.what, args.name))
    except (ValueError, OSError) as error:
        parser.exit(2, f"new.py: {error}\n")
    return 0


def create_plugin(kind: str, name: str) -> str:
    """Write lib/KIND/NAME.py, and return what to type next.

    Raises ValueError if Python could not import a file of this name, FileExistsError if it is there already.
    """
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"{name!r} is not a plugin's name: letters, digits and underscores, a letter first")
    file = Path("lib", kind, f"{name}.py")
    if (ROOT / file).exists():
        raise FileExistsError(f"{file} exists already: choose another name, or delete it first")
    (ROOT / file).write_text(TEMPLATES[kind].replace("NAME", name))
    return f"{file} is there; try: python train.py -{kind} {name}"


if __name__ == "__main__":
    sys.exit(main())
