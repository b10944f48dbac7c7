"""Holds the house rules over every file that git knows, and proves that each of them can be broken."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import house
import pytest

BREAKS = [  # a rule, a file, and what breaks the rule in it
    (house.optional_packages_are_imported_where_they_are_used, "lib/launch/slurm.py", "import submitit"),
    (house.optional_packages_are_imported_where_they_are_used, "lib/x.py", "from torch.utils import tensorboard"),
    (house.optional_packages_are_imported_where_they_are_used, "lib/x.py", "if 1:\n    from tqdm import tqdm"),
    (house.optional_packages_are_imported_where_they_are_used, "train.py", "class A:\n    import pyngrok.ngrok"),
    (house.modules_say_what_they_do, "tests/x.py", "import os\n"),
    (house.the_environment_has_its_place, "lib/core/x.py", "import os\nx = os.environ.get('RANK')"),
    (house.the_environment_has_its_place, "lib/core/x.py", "from os import environ"),
    (house.the_environment_has_its_place, "train.py", "def f():\n    return os.getenv('RANK')"),
    (house.the_environment_has_its_place, "lib/utils/distributed.py", "os.environ['RANK'] = '0'"),
    (house.the_environment_has_its_place, "lib/utils/distributed.py", "if 1:\n    os.environ.setdefault('A', '0')"),
    (house.the_environment_has_its_place, "lib/utils/distributed.py", "x = os.environ.pop('RANK')"),
    (house.the_environment_has_its_place, "lib/utils/distributed.py", "del os.environ['RANK']"),
    (house.print_is_for_the_terminal, "lib/trainer/trainer.py", "def f():\n    print('epoch')"),
    (house.print_is_for_the_terminal, "train.py", "print()"),
    (house.args_are_never_written_to, "lib/core/x.py", "def f(args):\n    args.lr = args.lr * 2"),
    (house.args_are_never_written_to, "lib/core/x.py", "args.lr *= 2"),
    (house.args_are_never_written_to, "lib/trainer/x.py", "self.args.rank: int = 0"),
    (house.args_are_never_written_to, "scripts/x.py", "args.a, b = 1, 2"),
    (house.args_are_never_written_to, "scripts/x.py", "del trainer.args.a"),
    (house.args_are_never_written_to, "train.py", "setattr(args, 'lr', 3)"),
    (house.args_are_never_written_to, "train.py", "vars(args).update(lr=3)"),
    (house.args_are_never_written_to, "train.py", "vars(self.args)['lr'] = 3"),
    (house.args_are_never_written_to, "train.py", "args.__dict__['lr'] = 3"),
    (house.no_exception_is_swallowed, "tests/x.py", "try:\n    f()\nexcept:\n    raise"),
    (house.no_exception_is_swallowed, "lib/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (house.no_exception_is_swallowed, "lib/x.py", "try:\n    f()\nexcept OSError:\n    ..."),
    (house.nothing_is_left_to_do, "lib/x.py", "x = 1  # TO" + "DO: more"),
    (house.nothing_is_left_to_do, "scripts/x.py", '"""FIX' + 'ME"""'),
    (house.nobody_switches_the_linter_off, "lib/x.py", "# ruff: no" + "qa"),
    (house.nobody_switches_the_linter_off, "lib/x.py", "import os  # no" + "qa"),
    (house.sentences_name_the_tests, "tests/test_x.py", "def test_it_works(): pass"),
    (house.sentences_name_the_tests, "tests/test_x.py", "class T:\n    def test_resume(self): pass"),
    (house.sentences_name_the_tests, "tests/test_x.py", "def testeverything_there_is_here(): pass"),
]  # fmt: skip
KEEPS = [
    (house.optional_packages_are_imported_where_they_are_used, "lib/x.py", "def f():\n    import submitit"),
    (house.optional_packages_are_imported_where_they_are_used, "lib/x.py", "from lib.utils import tensorboard"),
    (house.modules_say_what_they_do, "lib/__init__.py", ""),
    (house.the_environment_has_its_place, "lib/launch/local.py", "os.environ['A'] = os.environ.get('B')"),
    (
        house.the_environment_has_its_place,
        "lib/utils/distributed.py",
        "if os.environ['A'] == os.environ.get('B'): pass",
    ),
    (house.the_environment_has_its_place, "tests/x.py", "import os\nos.environ['A'] = '1'"),
    (house.print_is_for_the_terminal, "scripts/x.py", "print(1)"),
    (
        house.args_are_never_written_to,
        "lib/x.py",
        "self.args = args\nx = args.lr\nargs = f(args)\nargs.x.y = vars(args)['x']",
    ),
    (house.no_exception_is_swallowed, "lib/x.py", "try:\n    f()\nexcept OSError:\n    x = 1"),
    (house.nothing_is_left_to_do, "lib/x.py", "x = 1  # TO" + "DO (#12): more"),
    (house.sentences_name_the_tests, "tests/test_x.py", "def attest(): pass\ndef test_a_sentence_of_words(): pass"),
    (house.sentences_name_the_tests, "lib/x.py", "def test_it(): pass"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREAKS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    assert [f"{file.path}:{fault}" for file in house.FILES for fault in rule(file)] == []


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_what_breaks_a_rule_is_found(rule, path, text):
    assert list(rule(house.File(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS)
def test_what_keeps_a_rule_is_left_alone(rule, path, text):
    assert not list(rule(house.File(path, text)))


def test_every_file_of_the_project_is_looked_at():
    paths = {file.path for file in house.FILES}
    assert {"train.py", "lib/config/args.py", "lib/arch/mlp.py", "tests/machinery/test_house.py"} <= paths
    assert len(paths) > 40 and not [path for path in paths if ".venv" in path]
    assert {rule for rule, _, _ in KEEPS} <= set(RULES)


def test_scripts_and_pages_leave_nothing_to_do_either():
    pages = [file for pattern in ("*.sh", "*.md", "*.toml", ".ci/*") for file in house.tracked(pattern)]
    assert len(pages) > 4
    assert [f"{file.path}:{fault}" for file in pages for fault in house.nothing_is_left_to_do(file)] == []


# Who may import whom


def imports_are_kept(root) -> bool:
    """Whether the contracts of pyproject.toml hold in this tree (import-linter)."""
    linter = Path(sys.executable).with_name("lint-imports")
    answer = subprocess.run([linter, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=120)
    assert "Contracts: " in answer.stdout, answer.stdout + answer.stderr
    return answer.returncode == 0


def test_imports_keep_to_the_contracts():
    assert imports_are_kept(house.ROOT)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("lib/core/loss.py", "from lib import launch"),
        ("lib/core/loss.py", "def f():\n    import lib.trainer.trainer"),
        ("lib/utils/data/tensors.py", "from lib.core import loss"),
        ("lib/launch/environment.py", "from lib.launch import slurm"),
    ],
)
def test_an_import_against_a_contract_is_found(file, line, tmp_path):
    for name in ("lib", "pyproject.toml"):
        copy = shutil.copytree if (house.ROOT / name).is_dir() else shutil.copy
        copy(house.ROOT / name, tmp_path / name)
    (tmp_path / file).write_text(f"{(tmp_path / file).read_text()}\n{line}\n")
    assert not imports_are_kept(tmp_path)


def test_a_forkers_own_model_may_import_what_it_likes(tmp_path):
    shutil.copytree(house.ROOT / "lib", tmp_path / "lib")
    shutil.copy(house.ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "lib/arch/mine.py").write_text(
        "from lib.utils import distributed\nfrom lib.utils.checkpoint import manager\n"
    )
    assert imports_are_kept(tmp_path)


SHIPPED = [house.ROOT / "lib" / name for name in (
    "arch/convnet.py", "arch/gpt.py", "arch/mlp.py", "arch/resnet.py", "arch/vit.py", "dataset/cifar10.py",
    "dataset/digits.py", "dataset/fake.py", "dataset/folder.py", "dataset/random.py", "dataset/text.py",
)]  # fmt: skip
PLUGINS_MAY = ("lib.utils.errors", "lib.utils.seeding", "lib.utils.data.tensors", "lib.utils.data.transforms")


def test_the_models_and_data_that_are_shipped_import_little_of_lib():
    """A forker's own may import what they like, and any of these may be deleted."""
    for path in SHIPPED:
        file = house.File(path.name, path.read_text() if path.exists() else "")
        names = {name for name, _ in file.imports() if f"{name}.".startswith("lib.")}
        odd = [name for name in names if not any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.")
                                                 for one in PLUGINS_MAY)]  # fmt: skip
        assert not odd, f"{path}: {odd}"


# The maps

MAPPED = ["lib/config", "lib/launch", "lib/core", "lib/utils", *(f"lib/utils/{part}" for part in
          ("checkpoint", "compat", "data", "monitoring"))]  # fmt: skip


@pytest.mark.parametrize("folder", MAPPED)
def test_the_map_of_a_folder_names_its_files(folder):
    folder = house.ROOT / folder
    map_of = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    named = re.findall(r"^ *(\w+\.py|\w+/) ", map_of, re.M)
    there = [file.name for file in folder.glob("*.py")]
    there += [f"{part.parent.name}/" for part in folder.glob("*/__init__.py")]
    assert sorted({*named, "__init__.py"}) == sorted(there) and len(named) == len({*named})


# Importing does nothing

PROBE = """
import importlib, json, logging, os, random, signal, sys, threading
import numpy, PIL.Image, safetensors, torch, torch.distributed.tensor, torchvision, yaml

done = []
def watch(event, given):
    writes = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    acts = ("socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.mkdir", "os.rename", "os.remove")
    if writes or event in acts:
        done.append([event, str(given[0])])

def state():
    return [dict(os.environ), os.getcwd(), threading.active_count(), torch.get_num_threads(), torch.initial_seed(),
            str(random.getstate()), str(numpy.random.get_state()), len(logging.getLogger().handlers),
            [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())], str(sys.excepthook),
            torch.cuda.is_initialized(), torch.is_grad_enabled(), str(torch.get_default_dtype())]

before, known = state(), set(sys.modules)
sys.addaudithook(watch)
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = {"sklearn", "submitit", "pyngrok", "tqdm", "tensorboard", "torch.utils.tensorboard"} & {*sys.modules} - known
print(json.dumps([done, sorted(heavy), [[old, new] for old, new in zip(before, state()) if old != new]]))
"""


def test_importing_a_module_does_nothing(tmp_path):
    modules = [file.module for file in house.FILES if file.ours]
    probe = [sys.executable, "-B", "-c", PROBE, *modules]
    env = {"PYTHONPATH": str(house.ROOT), "PATH": "", "HOME": str(tmp_path)}
    answer = subprocess.run(probe, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=env, check=True)
    done, heavy, changed = json.loads(answer.stdout)
    assert (done, heavy, changed) == ([], [], [])
    assert not list(tmp_path.iterdir()) and not answer.stderr
