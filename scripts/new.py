"""Begins something of your own: python scripts/new.py arch|dataset|trainer NAME, or project DIR [-name NAME]."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import types

ROOT = Path(__file__).resolve().parents[1]
ARCH = '''"""NAME: two convolutions, to be changed as you like."""

from torch import nn


def add_args(parser):
    parser.add_argument("-NAME_width", type=int, default=32, metavar="N", help="channels")


def get_model(args) -> nn.Module:
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

from lib.utils.data.tensors import Tensors


def add_args(parser):
    parser.add_argument("-NAME_samples", type=int, default=1000, metavar="N", help="samples to make")
    parser.set_defaults(num_classes=4, channels=1, image_size=16, epochs=5)


def get_dataset(args) -> dict[str, Tensors]:
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
TEXTS = {"arch": ARCH, "dataset": DATASET, "trainer": TRAINER}
NOT_THEIRS = ("Why not Lightning?", "Status")  # sections of the README that a fork drops
INTRODUCTION = (
    "Trains models with PyTorch: put a file into `lib/arch` or `lib/dataset`, and start it with one command."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    for kind in TEXTS:
        what.add_parser(kind, help=f"a file lib/{kind}/NAME.py that runs").add_argument(
            "name", type=types.plugin_name
        )
    project = what.add_parser("project", help="a copy of this project, with its own name and no history")
    project.add_argument("folder", type=Path, metavar="DIR")
    project.add_argument("-name", help="letters, digits and dashes (DIR's name)")
    asked = parser.parse_args()
    try:
        print(copy(asked.folder, asked.name) if asked.what == "project" else plugin(asked.what, asked.name))
    except (ValueError, OSError) as error:
        parser.exit(2, f"new.py: {error}\n")
    return 0


def plugin(kind: str, name: str) -> str:
    """Writes lib/KIND/NAME.py. Returns what to type next; raises FileExistsError."""
    with (ROOT / "lib" / kind / f"{name}.py").open("x") as file:
        file.write(TEXTS[kind].replace("NAME", name))
    return f"lib/{kind}/{name}.py is there; try: python train.py -{kind} {name}"


def copy(folder: Path, name: str | None) -> str:
    """Copies what git knows to a new folder under a name of its own. Returns what to type next.

    Raises ValueError for a name that will not do, OSError where the folder is no new one.
    """
    name = name or folder.resolve().name
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9-]{0,22}[A-Za-z0-9])?", name):
        raise ValueError(f"-name {name}: letters, digits and dashes are wanted, a letter first, 24 at most")
    folder.mkdir(parents=True)
    for file in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if file and (ROOT / file).is_file():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(adapted(file, (ROOT / file).read_bytes(), name))
            target.chmod((ROOT / file).stat().st_mode)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    return f"{folder} is there; try: cd {folder}; git commit -m 'Begin {name}'; ./scripts/train.sh; ./scripts/test.sh"


def adapted(file: str, content: bytes, name: str) -> bytes:
    """A file's content in the new project. The licence stays: its terms say so."""
    if file == "LICENSE" or b"\0" in content:
        return content
    text = content.decode()
    if file == "README.md":
        text = trimmed(text)
    if file == "pyproject.toml":
        text = re.sub(r'^description = ".*"', 'description = "Training with PyTorch"', text, flags=re.M)
    old = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    return renamed(text, old, name).encode()


def trimmed(readme: str) -> str:
    """The README without what it says of the template itself."""
    first, *sections = re.split(r"^(?=## )", readme, flags=re.M)
    title = first.partition("\n\n")[0]
    kept = [section for section in sections if section.splitlines()[0].removeprefix("## ") not in NOT_THEIRS]
    return f"{title}\n\n{INTRODUCTION}\n\n{''.join(kept)}"


def renamed(text: str, old: str, name: str) -> str:
    """Every name of the old project as the new one's, in the same manner: Name, name (lower case), NAME_."""
    pattern = rf"(?<![A-Za-z0-9])({re.escape(old)}|{re.escape(old.replace('-', '_'))})(?![A-Za-z0-9])"

    def other(match):
        if match[0].isupper():
            return name.upper().replace("-", "_")
        return name.lower() if match[0].islower() else name

    return re.sub(pattern, other, text, flags=re.I)


def git(folder: Path, *words: str) -> str:
    """What git says. Raises ValueError where it fails."""
    said = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    if said.returncode:
        raise ValueError(f"git {words[0]} in {folder}: {said.stderr.strip()}")
    return said.stdout


if __name__ == "__main__":
    sys.exit(main())
