"""Starts something of your own: python scripts/new.py arch|dataset|trainer NAME, or project DIR [-name NAME]."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import types

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
README = """# NAME

Trains models with PyTorch. A run can be killed at any moment; the same command continues it.

```sh
./scripts/train.sh      # creates .venv, installs the dependencies, trains the default model
./scripts/test.sh       # the same setup, then the tests
```

Arguments are passed to train.py: `./scripts/train.sh -cpu 2 -epochs 3 -model short`. `UV_TORCH_BACKEND=cpu`
(or `auto`, `cu128`, ...) chooses the PyTorch build. Once `.venv` is there, activate it and call train.py yourself:

```sh
. .venv/bin/activate
python train.py                                  # one process for each visible GPU; without a GPU, one on the CPU
python train.py -gpus 0,1,2                      # these GPUs only; -cpu 2: two processes on the CPU
torchrun --nproc_per_node=2 train.py             # any launcher that sets torchrun's variables
python train.py -slurm -slurm_nnodes 2 -slurm_ngpus 8 -slurm_partition general    # a Slurm job
```

To continue after a stop or a crash, type the same command again. `python scripts/status.py` shows all runs. The exit
code is 0 if the run finished, 75 if it stopped with its state saved, 1 if it failed, 2 for bad usage.

A run is identified by its name: `-model`, or dataset and arch if you give none. To try other flags, add another
`-model`, or `-reset` to start from scratch.

## What to edit

```
train.py          parse, launch, run(args): build the parts, fit
lib/arch/         EDIT  your models: get_model(args)
lib/dataset/      EDIT  your data: get_dataset(args)
lib/trainer/      EDIT  your way of training: class Trainer
lib/core/         READ  loss, optimizer, scheduler, DDP and FSDP
lib/config/             flags and -cfg files
lib/launch/             processes here, under torchrun, on Slurm
lib/utils/              data order, checkpoints, logs, stop signals
scripts/                train, test, sweep, status, plot, predict, export, doctor, recipes, Slurm, Kubernetes
tests/                  tests of the plugins, the configuration, a run, a resume
```

A file is found by its name: `python scripts/new.py arch my_net` writes `lib/arch/my_net.py`, and
`python train.py -arch my_net` trains it. The tests find a new file by themselves. Delete the models and data that you
do not need, but for the defaults `convnet`, `digits` and `trainer`:
[the FAQ](docs/faq.md#how-do-i-remove-what-i-do-not-need) says what else may go, and which tests go with it.

## Documentation

- [extending.md](docs/extending.md): models, data, trainers; nanoGPT, timm, Hugging Face, detection, a GAN
- [launching.md](docs/launching.md): a workstation, several machines, Slurm, Kubernetes
- [resume.md](docs/resume.md), [exactness.md](docs/exactness.md): how to stop and continue, and what is exact then
- [sweep.md](docs/sweep.md): many values of a flag
- [monitoring.md](docs/monitoring.md), [debugging.md](docs/debugging.md), [large_models.md](docs/large_models.md)
- [flags.md](docs/flags.md): all flags
- [architecture.md](docs/architecture.md): how it is built, and what must not break
- [faq.md](docs/faq.md): out of memory, pretrained weights, W&B

This project started from OLD. [LICENSE](LICENSE) holds its terms, [data/README.md](data/README.md) those of the
digits.
"""
NOT_COPIED = (  # what is about the template itself; a path that ends with / is a folder
    ".ci/",
    ".github/",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/benchmarks.md",
    "docs/chaos.md",
    "docs/compat.md",
    "docs/scaling.md",
    "docs/terminal.png",
    "scripts/bench/",
    "tests/machinery/",
)
TEMPLATE_ONLY = ("import-linter", "kubernetes-validate", "kubeflow-trainer-api")  # packages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    for kind in TEMPLATES:
        what.add_parser(kind, help=f"a file lib/{kind}/NAME.py that runs").add_argument(
            "name", type=types.plugin_name
        )
    project = what.add_parser("project", help="a copy of this project, with its own name and no history")
    project.add_argument("folder", type=Path, metavar="DIR")
    project.add_argument("-name", help="letters, digits and dashes (DIR's name)")
    args = parser.parse_args()
    try:
        if args.what == "project":
            print(create_project(args.folder, args.name))
        else:
            print(create_plugin(args.what, args.name))
    except (ValueError, OSError) as error:
        parser.exit(2, f"new.py: {error}\n")
    return 0


def create_plugin(kind: str, name: str) -> str:
    """Write lib/KIND/NAME.py.

    Returns:
        What to type next.

    Raises:
        FileExistsError: The file is there already.
    """
    file = Path("lib", kind, f"{name}.py")
    if (ROOT / file).exists():
        raise FileExistsError(f"{file} exists already: choose another name, or delete it first")
    (ROOT / file).write_text(TEMPLATES[kind].replace("NAME", name))
    return f"{file} is there; try: python train.py -{kind} {name}"


def create_project(folder: Path, name: str | None) -> str:
    """Copy the files that git tracks, and new plugins, to a new folder, under a name of its own.

    Returns:
        What to type next.

    Raises:
        ValueError: The name has other characters or is too long.
        OSError: The folder exists, or cannot be made.
    """
    name = name or folder.resolve().name
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9-]{0,22}[A-Za-z0-9])?", name):
        raise ValueError(f"-name {name}: only letters, digits and dashes, a letter first, at most 24")
    new_plugins = ("--others", "--exclude-standard", "--", *(f"lib/{kind}/*.py" for kind in TEMPLATES))
    listed = git(ROOT, "ls-files", "-z") + git(ROOT, "ls-files", "-z", *new_plugins)
    files = [file for file in listed.split("\0") if (ROOT / file).is_file() and not file.startswith(NOT_COPIED)]
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder")
    folder.mkdir(parents=True)
    for file in files:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(adapted(file, (ROOT / file).read_bytes(), name, files))
        target.chmod((ROOT / file).stat().st_mode)
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():  # a longer name makes longer lines
        subprocess.run([ruff, "format", "--quiet", "--no-cache", "."], cwd=folder)  # not what has a syntax error
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    return f"{folder} is there; try: cd {folder}; git commit -m 'Begin {name}'; ./scripts/train.sh; ./scripts/test.sh"


def adapted(file: str, content: bytes, name: str, files: list[str]) -> bytes:
    """Return a file's content in the new project. The licence stays as it is: its terms say so."""
    if file == "LICENSE" or b"\0" in content:
        return content
    old = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    if file == "README.md":
        return README.replace("NAME", name).replace("OLD", old.capitalize()).encode()
    text = content.decode()
    if file == "pyproject.toml":
        text = trim_settings(text)
    if file.endswith(".md"):
        text = unlink(text, file, files)
    return rename(text, old, name).encode()


def trim_settings(text: str) -> str:
    """Return pyproject.toml without the template's own packages, and with a linter that finds errors only."""
    text = re.sub(r'^description = ".*"', 'description = "Training with PyTorch"', text, flags=re.M)
    text = re.sub(rf'^ *"({"|".join(TEMPLATE_ONLY)})\b.*\n', "", text, flags=re.M)
    text = re.sub(r"^bench = .*\n", "", text, flags=re.M)
    sections = [
        section
        for section in re.split(r"^(?=\[)", text, flags=re.M)
        if not section.startswith(("[tool.ruff", "[tool.importlinter", "[[tool.importlinter"))
    ]
    return "".join(sections).rstrip() + '\n\n[tool.ruff]\nline-length = 118\nlint.select = ["E9", "F"]\n'


def unlink(page: str, file: str, files: list[str]) -> str:
    """Return a page in which links to files that are not in the project are plain text."""

    def without(link: re.Match) -> str:
        target = os.path.normpath(Path(file).parent / link[2].partition("#")[0])
        kept = target in files or any(one.startswith(f"{target}/") for one in files)
        return link[0] if kept or not link[2].partition("#")[0] else link[1]

    return re.sub(r"(?<!!)\[([^]\n]+)\]\((?!https?:)([^)\s]+)\)", without, page)


def rename(text: str, old: str, name: str) -> str:
    """Replace every name of the old project by the new one, in the same case: Name, name, NAME_."""
    pattern = rf"(?<![A-Za-z0-9])({re.escape(old)}|{re.escape(old.replace('-', '_'))})(?![A-Za-z0-9])"

    def replace(match: re.Match) -> str:
        if match[0].isupper():
            return name.upper().replace("-", "_")
        return name.lower() if match[0].islower() else name

    return re.sub(pattern, replace, text, flags=re.I)


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints. Raises ValueError if it fails."""
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"git {arguments[0]} in {folder}: {run.stderr.strip()}")
    return run.stdout


if __name__ == "__main__":
    sys.exit(main())
