"""Makes a project from the template, of the parts that are chosen: for `new.py project` and `new.py update`.

PARTS says what may be left out. What a project gets follows from the template, its name and the chosen parts alone:
so scripts/update.py can generate a later version, and merge what changed.
"""

import argparse
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from scripts.update import BRANCH, CHOICES, MARK, git

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """What a project may leave out: words of patterns and names, separated by spaces."""

    about: str
    files: str = ""  # a file goes if any of its parts is left out
    flags: str = ""
    packages: str = ""  # packages and groups of pyproject.toml
    default: bool = True


PARTS = {
    "slurm": Part(
        "jobs on Slurm: -slurm, and a batch script", "lib/launch/slurm.py scripts/slurm/*", "slurm*", "submitit"
    ),
    "kubernetes": Part("an image and jobs for Kubernetes", "scripts/kubernetes/*"),
    "elastic": Part("torchrun on nodes that join and leave", packages="elastic"),
    "sweep": Part(
        "many runs over values of flags", "scripts/sweep.py scripts/sweep_results.py docs/sweep.md", packages="sweep"
    ),
    "trackers": Part("-track: Weights & Biases, MLflow", "scripts/track.py", "track", "track"),
    "ngrok": Part(
        "-tb, -ngrok: a run serves TensorBoard", "scripts/tensorboard_server.py", "tb ngrok ngrok_auth", "pyngrok"
    ),
    "mirror": Part("-mirror: a copy of each run at another place", "scripts/mirror.py", "mirror"),
    "export": Part(
        "weights as one file: ONNX, torch.export",
        "scripts/export.py scripts/preprocessing.py tests/test_preprocessing.py",
        packages="export",
    ),
    "compat": Part("the classes of cycling_utils", "lib/utils/compat/*"),
    "recipes": Part("complete configurations", "scripts/recipes/* tests/test_recipes.py"),
    "exact": Part(
        "-deterministic: the same bits on any number of processes",
        "lib/core/exact.py docs/exactness.md tests/test_train.py",
        "deterministic",
    ),
    "plugins": Part(
        "more models, data and trainers than the defaults (photos, texts, ResNet, GPT, EMA), and tests that use them",
        "lib/arch/mlp.py lib/arch/resnet.py lib/arch/gpt.py lib/dataset/fake.py lib/dataset/folder.py "
        "lib/dataset/tar.py lib/dataset/tokens.py lib/trainer/ema.py scripts/pack.py "
        "scripts/tar_index.py scripts/remote.py scripts/shard_cache.py scripts/sampling.py scripts/mixture.py "
        "scripts/make_*.py scripts/token_files.py scripts/recipes/[gir]* tests/command_line.py tests/saves.py "
        "tests/test_config.py tests/test_datasets.py tests/test_plugin_flags.py tests/test_resume.py "
        "tests/test_tokens.py tests/test_train.py docs/data.md docs/examples/*",
        "balance cache_gb class_weights",
        packages="world scikit-learn hypothesis",
    ),
    "tools": Part(
        "programs to check, watch and use runs: -check_resume, -eval, doctor, status, predict, plot, ..., and the "
        "checks of your models and trainers at each start",
        "scripts/chaos.py scripts/check_*.py scripts/compare.py scripts/debug.py "
        "scripts/doctor.py scripts/evaluation.py scripts/flags_page.py scripts/ledger.py scripts/predict.py "
        "scripts/step_times.py tests/test_step_times.py",
        "check_data skip_bad_files check_resume debug eval step_times peak_tflops",
    ),
    "docs": Part("the pages", "docs/*"),
    "bench": Part("benchmarks", "scripts/bench/* docs/benchmarks.md", packages="bench", default=False),
}
SHARED = {  # files that are left out with the last of these parts
    "lib/utils/data/photos.py": "plugins tools export",
    "lib/utils/data/transforms.py": "plugins tools export",
    "scripts/agent.py": "slurm elastic kubernetes tools",
    "scripts/elastic.sh": "elastic kubernetes",
    "scripts/infiniband.py": "slurm elastic kubernetes tools",
    "scripts/model_input.py": "plugins tools export",
    "scripts/other_weights.py": "tools export",
    "scripts/plot.py": "tools sweep",
    "scripts/reading.py": "tools sweep trackers mirror",
    "scripts/status.py": "tools sweep",
}
SECTIONS = {  # of shared pages, by their headings: they go with the part
    "On Slurm": "slurm",
    "On Kubernetes": "kubernetes",
    "On nodes that come and go": "elastic",
}
TEMPLATE_ONLY = (  # about the template itself
    ".ci/* .github/* .pre-commit-config.yaml CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md docs/chaos.md "
    "docs/compat.md docs/scaling.md docs/terminal.png scripts/project.py tests/machinery/*"
)
TEMPLATE_PACKAGES = "aiohttp s3 import-linter kubernetes-validate kubeflow-trainer-api"
OVERVIEWS = ("AGENTS.md", "scripts/__init__.py", "scripts/recipes/README.md")  # have an item for each thing
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
python scripts/status.py                         # all runs in a table
```

To continue after a stop or a crash, type the same command again. The exit code is 0 if the run finished, 75 if it
stopped with its state saved, 1 if it failed, 2 for bad usage. `python train.py -h` lists the flags.

A run is identified by its name: `-model`, or dataset and arch if you give none. To try other flags, add another
`-model`, or `-reset` to start from scratch.

## What to edit, and what to read

```
lib/arch/                  EDIT  your models: get_model(args)
lib/dataset/               EDIT  your data: get_dataset(args)
lib/trainer/               EDIT  your way of training: class Trainer
train.py                   READ  the run on a page: parse, launch, build the parts, fit
lib/run.py                 READ  what lies between the lines of train.py: folder, past, plan, logs
lib/trainer/trainer.py     READ  epochs, steps, evaluation, checkpoints
lib/core/loss.py           READ  losses and metrics
lib/core/optimizer.py      READ  optimizers, clipping
lib/core/scheduler.py      READ  the learning rate at a step
lib/core/parallel.py       READ  DDP, FSDP2, precision, compile
lib/core/stock.py          READ  gradients as DDP and FSDP2 sum them
lib/core/exact.py                gradients with the same bits on any number of processes
lib/config/                      flags and -cfg files
lib/launch/                      processes here, and under other launchers
lib/utils/                       data order, checkpoints, logs, stop signals
scripts/                         programs; scripts/__init__.py lists them
tests/                           tests of the plugins, and of what else was chosen
```

The files marked READ have 1,400 lines; read them in this order. A plugin is found by its name:
`python scripts/new.py arch my_net` writes `lib/arch/my_net.py`, and `python train.py -arch my_net` trains it. The
tests find a new file by themselves. Delete the models and data that you do not need, but for the defaults `convnet`,
`digits` and `trainer`.

## Later versions of the template

`python scripts/new.py update SOURCE` merges what the template changed with what you changed; SOURCE is the template's
folder or Git URL. The branch `template` holds the template as generated. `.template.json` holds the chosen parts:
change and commit it, and the next update takes or leaves out a part.

## The pages in docs/

- [docs/extending.md](docs/extending.md): models, data, trainers
- [docs/data.md](docs/data.md): photos, tar shards, texts
- [docs/launching.md](docs/launching.md): a workstation, several machines, clusters
- [docs/resume.md](docs/resume.md): how to stop and continue
- [docs/exactness.md](docs/exactness.md): what is the same to the bit
- [docs/sweep.md](docs/sweep.md): many values of a flag
- [docs/monitoring.md](docs/monitoring.md): how to watch a run
- [docs/debugging.md](docs/debugging.md): why a run fails, hangs or learns nothing
- [docs/large_models.md](docs/large_models.md): models that do not fit
- [docs/flags.md](docs/flags.md): all flags
- [docs/architecture.md](docs/architecture.md): how it is built, and what must not break
- [docs/faq.md](docs/faq.md): out of memory, pretrained weights, trackers

This project started from OLD. [LICENSE](LICENSE) holds its terms, [data/README.md](data/README.md) those of the
digits.
"""
HIDE = '''    absent = """NAMES""".split()  # flags of parts that this project left out
    for action in parser._actions:
        if action.dest in absent:
            action.help = argparse.SUPPRESS
            if action.type is not types.yes_no:
                action.choices = [action.default]
                action.type = refuse if action.default is None else action.type
    return rules


def refuse(text: str) -> None:
    """Be the type of a flag that takes no value here."""
    raise argparse.ArgumentTypeError(f"{text!r} is for a part of the template that this project left out")
'''
OVER_SAVES = "# Over the runs of saves.py\n"  # in tests/conftest.py: what follows needs that file


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `new.py project`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "In a terminal it asks for each part, unless one of -without, -with, -like and -yes is given.\n\nparts:\n"
    )
    parser.epilog += "\n".join(f"  {name:<11} {part.about}" for name, part in PARTS.items())
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("-name", help="letters, digits and dashes (DIR's name, with dashes for _)")
    parser.add_argument(
        "-without", default="", metavar="PART,...", help="parts to leave out; all: the smallest project"
    )
    parser.add_argument(
        "-with", dest="also", default="", metavar="PART,...", help="parts to take that are off: bench"
    )
    parser.add_argument("-like", type=Path, metavar="FILE", help=f"the name and the parts in a project's {CHOICES}")
    parser.add_argument("-yes", action="store_true", help="ask nothing")


def create(args: argparse.Namespace) -> str:
    """Write the project: the chosen files that git tracks, and new plugins, under a name of its own.

    Returns:
        What to type next.

    Raises:
        ValueError: The name has other characters or is too long; a part is unknown; git fails.
        OSError: The folder exists, or cannot be made.
    """
    folder, before = args.folder, read_choices(args.like) if args.like else {}
    name = args.name or before.get("name") or re.sub(r"[_ .]+", "-", folder.resolve().name)
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9-]{0,22}[A-Za-z0-9])?", name):
        wanted = "only letters, digits and dashes, a letter first, at most 24"
        raise ValueError(f"-name {name}: {wanted}" if args.name else f"{name} is no name: give -name, {wanted}")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder")
    parts, version = choose(args, before.get("parts", {})), git(ROOT, "describe", "--always", "--dirty")
    own = ("--others", "--exclude-standard", "--", "lib/arch/*.py", "lib/dataset/*.py", "lib/trainer/*.py")
    listed, new_plugins = (git(ROOT, "ls-files", "-z", *which).strip("\0").split("\0") for which in ((), own))
    project = Project(name, parts, {file for file in listed if (ROOT / file).is_file()})
    files, plugins = project.contents(project.files), project.contents(filter(None, new_plugins))
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    write(files, folder)
    (folder / CHOICES).write_text(json.dumps({"name": name, "parts": parts}, indent=2) + "\n")
    commit(folder, f"The template as {name}, from {version}\n\n{MARK}")
    git(folder, "update-ref", f"refs/heads/{BRANCH}", "HEAD")
    if plugins:  # not the template's: another version has none of them
        write(plugins, folder)
        commit(folder, "New plugins", "-p", "HEAD")
    return f"{folder} is there; try: cd {shlex.quote(str(folder))}; ./scripts/train.sh; ./scripts/test.sh"


def read_choices(file: Path) -> dict:
    """Return the name and the parts that a project's file of choices holds. Raises ValueError for another file."""
    try:
        choices = json.loads(file.read_text())
        choices["name"], choices["parts"].items()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: no name and parts in it ({error})") from None
    return choices


def choose(args: argparse.Namespace, before: dict[str, bool]) -> dict[str, bool]:
    """Return which parts the project gets: by the flags, by an earlier choice, or as a terminal answers."""
    without, also = ([word for word in words.split(",") if word] for words in (args.without, args.also))
    for flag, words in (("-without", {*without} - {"all"}), ("-with", {*also})):
        if unknown := sorted(words - PARTS.keys()):
            raise ValueError(f"{flag} {unknown[0]}: no such part; there are {', '.join(PARTS)}")
    if both := [name for name in without if name in also]:
        raise ValueError(f"-without {both[0]} and -with {both[0]} exclude each other")
    asks = not (without or also or args.like or args.yes) and sys.stdin.isatty() and sys.stdout.isatty()
    parts = {}
    for name, part in PARTS.items():
        parts[name] = before.get(name, part.default)
        if name in also or name in without or "all" in without:
            parts[name] = name in also
        elif asks:
            parts[name] = ask(name, part)
    return parts


def ask(name: str, part: Part) -> bool:
    """Return whether the terminal's answer takes a part. Raises ValueError at the end of the input."""
    answers = {"": part.default, "y": True, "yes": True, "n": False, "no": False}
    answer = None
    while answer not in answers:
        try:
            answer = input(f"{name}: {part.about} {'[Y/n]' if part.default else '[y/N]'} ").strip().lower()
        except EOFError:
            raise ValueError("no answer: nothing was made") from None
    return answers[answer]


class Project:
    """What a project gets: its files, and their texts."""

    def __init__(self, name: str, parts: dict[str, bool], there: set[str]):
        self.name, self.there = name, there  # `there`: the template's files
        self.old = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
        left_out = [PARTS[one] for one, kept in parts.items() if not kept]
        self.absent_sections = [title for title, part in SECTIONS.items() if not parts[part]]
        patterns = " ".join([TEMPLATE_ONLY, *[part.files for part in left_out]]).split()
        patterns += [file for file, users in SHARED.items() if not any(parts[one] for one in users.split())]
        self.files = {file for file in there if not any(fnmatch(file, pattern) for pattern in patterns)}
        self.packages = " ".join([TEMPLATE_PACKAGES, *[part.packages for part in left_out]]).split()
        self.packages += ["matplotlib", "plot"] if "scripts/plot.py" not in self.files else []
        self.packages += ["remote"] if not {"scripts/mirror.py", "scripts/remote.py"} & {*self.files} else []
        patterns = " ".join(part.flags for part in left_out).split()
        flags = re.findall(r'^    add\("-(\w+)"', (ROOT / "lib" / "config" / "flags.py").read_text(), re.M)
        self.absent_flags = [flag for flag in flags if any(fnmatch(flag, pattern) for pattern in patterns)]

    def contents(self, files: Iterable[str]) -> dict[str, bytes]:
        """Return what these files of the template hold in the project. Raises ValueError for one that is no UTF-8."""
        found = {}
        for file in files:
            try:
                found[file] = self.adapt(file, (ROOT / file).read_bytes())
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: no text in UTF-8 ({error})") from None
        return found

    def adapt(self, file: str, content: bytes) -> bytes:
        """Return a file's content in the project. The licence stays as it is: its terms say so."""
        if b"\0" in content:
            return content
        content = content.replace(b"\r\n", b"\n")  # as core.autocrlf checks it out
        if file == "LICENSE":
            return content
        if file == "README.md":
            text = README.replace("NAME", self.name).replace("OLD", self.old.capitalize())
            return re.sub(r"\n{3,}", "\n\n", self.items_of_project(text, file)).encode()
        text = content.decode()
        if file == "pyproject.toml":
            text = self.trim_settings(text)
        elif file == "requirements.lock":
            text = re.sub(rf"^({'|'.join(self.packages)})==.*\n", "", text, flags=re.M)
        elif file == "lib/config/flags.py" and self.absent_flags:
            names = textwrap.fill(" ".join(self.absent_flags), 100, subsequent_indent=" " * 8)
            text = text.removesuffix("    return rules\n") + HIDE.replace("NAMES", names)
        elif file == "docs/flags.md":
            text = re.sub(rf"^- `-({'|'.join(self.absent_flags or ['-'])})\b.*\n", "", text, flags=re.M)
            text = re.sub(r"^## .*\n\s*(?=^## |\Z)", "", text, flags=re.M)  # a group without flags
        elif file == "tests/conftest.py" and "tests/saves.py" not in self.files:
            text = re.sub(
                r"^import (runs|saves|shutil)\n", "", text.partition(OVER_SAVES)[0].rstrip() + "\n", flags=re.M
            )
        elif file in OVERVIEWS:
            text = self.items_of_project(text, file)
        if file.endswith(".md"):
            for title in self.absent_sections:
                text = re.sub(rf"^## {title}\n.*?(?=^## |\Z)", "", text, flags=re.M | re.S)
            text = re.sub(r"\n{3,}", "\n\n", self.trim_blocks(self.unlink(text, file), file))
        return rename(text, self.old, self.name).encode()

    def has(self, path: str) -> bool:
        """Return whether a path is in the project, or not even in the template."""
        path = os.path.normpath(path)
        inside = [file for file in self.there if file == path or file.startswith(f"{path}/")]
        return not inside or any(file in self.files for file in inside)

    def items_of_project(self, text: str, page: str) -> str:
        """Return a page without the items that name a file, a plugin or a flag that is not in the project.

        An item is a line that begins on the left, with the indented lines below it.
        """
        items = re.split(r"^(?=\S|\n)", text, flags=re.M)
        return "".join(item for item in items if self.has_all(item, page))

    def has_all(self, item: str, page: str, folder: str = "") -> bool:
        """Return whether all files, plugins and flags that an item of a page names are in the project.

        `folder`: where the file is that the item begins with.
        """
        words = re.findall(r"[\w.-]+(?:/[\w.-]+)*/?", item)
        words = words[:1] if page.endswith(".py") else words  # a program, and what it is
        plugins = [f"lib/{kind}/{name}.py" for kind, name in re.findall(r"-(arch|dataset|trainer) (\w+)", item)]
        plugins += [f"lib/dataset/{name}.py" for name in re.findall(r"\bout/([a-z]+)_", item)]  # of a run's name
        paths = [*words, *[str(Path(page).parent / word) for word in words], *plugins]
        paths += [f"{folder}/{word}" for word in words[:1] if folder]
        return all(map(self.has, paths)) and not {*re.findall(r"(?<![\w-])-(\w+)", item)} & {*self.absent_flags}

    def trim_blocks(self, text: str, page: str) -> str:
        """Return a page without the lines on what is not there, in blocks of commands, and of files below folders.

        A block that would be empty stays: the text around it is about the same.
        """

        def trim(block: re.Match) -> str:
            if block[1] not in ("", "sh"):
                return block[0]
            kept, folder = [], ""
            for line in re.findall(r"(?:.*\\\n)*.*\n", block[2]):  # one that ends in a backslash goes on
                if not line.startswith(" "):
                    folder = found[0] if (found := re.match(r"\S+/(?=\s)", line)) else ""
                if self.has_all(line, page, folder if line.startswith(" ") else ""):
                    kept.append(line)
            return f"```{block[1]}\n{''.join(kept)}```" if kept else block[0]

        return re.sub(r"^```(\w*)\n(.*?)^```$", trim, text, flags=re.M | re.S)

    def trim_settings(self, text: str) -> str:
        """Return pyproject.toml without packages that nothing needs, and with a linter that finds errors only."""
        text = re.sub(r'^description = ".*"', 'description = "Training with PyTorch"', text, flags=re.M)
        names = "|".join(map(re.escape, self.packages))
        text = re.sub(rf'^ *"({names})\b.*\n|^({names}) = .*\n', "", text, flags=re.M)
        text = re.sub(rf'^ *{{ include-group = "({names})" }},\n', "", text, flags=re.M)
        sections = [
            section
            for section in re.split(r"^(?=\[)", text, flags=re.M)
            if not section.startswith(("[tool.ruff", "[tool.importlinter", "[[tool.importlinter"))
        ]
        return "".join(sections).rstrip() + '\n\n[tool.ruff]\nline-length = 118\nlint.select = ["E9", "F"]\n'

    def unlink(self, text: str, page: str) -> str:
        """Return a page in which links to files that are not in the project are plain text."""

        def without(link: re.Match) -> str:
            target = link[2].partition("#")[0]
            return link[0] if not target or self.has(str(Path(page).parent / target)) else link[1]

        return re.sub(r"(?<!!)\[([^][]+)\]\((?!https?:)([^)\s]+)\)", without, text)


def rename(text: str, old: str, name: str) -> str:
    """Replace every name of the old project by the new one, in the same case: Name, name, NAME_."""
    pattern = rf"(?<![A-Za-z0-9])({re.escape(old)}|{re.escape(old.replace('-', '_'))})(?![A-Za-z0-9])"

    def replace(match: re.Match) -> str:
        if match[0].isupper():
            return name.upper().replace("-", "_")
        return name.lower() if match[0].islower() else name

    return re.sub(pattern, replace, text, flags=re.I)


def write(contents: dict[str, bytes], folder: Path) -> None:
    """Write files into the project's folder, with the modes that they have in the template."""
    for file, content in contents.items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod((ROOT / file).stat().st_mode)


def commit(folder: Path, message: str, *parents: str) -> None:
    """Commit all files, whatever the user's own settings of Git are."""
    git(folder, "-c", "core.excludesFile=", "-c", "core.autocrlf=false", "add", "--all")
    made = git(folder, "commit-tree", git(folder, "write-tree"), *parents, "-m", message)
    git(folder, "update-ref", "HEAD", made)
