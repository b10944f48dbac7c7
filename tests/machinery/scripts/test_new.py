"""What scripts/new.py creates runs at once, in any style of its owner, and the tests find it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import CLEAN, ROOT

OLD = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
NAME = "twenty-four-letter-names"
NEW = ("arch", "dataset", "trainer")
SLURM = ["lib/launch/slurm", "scripts/slurm/requeue"]
SCRIPTS = [f"scripts/{name}" for name in ("track", "tensorboard_server", "debug", "evaluation")]
READERS = ["scripts/other_weights", "scripts/tar_index"]
LAYER = "    layers.append( nn.Linear(width,width) ) ; layers.append(nn.ReLU( ))  # "
LAYERS = "\n".join(f"{LAYER}{n}" for n in range(55))
OWN = {  # plugins in another style: long functions, no docstrings, unsorted imports, prints, other names
    "lib/arch/deep.py": f"""
import os, sys
from torch import nn
import torch.nn.functional as F, json
def add_args(parser): parser.add_argument('-width', default = 16, type = int)
def get_model(args):
    print( 'building' )
    width=args.width
    layers=[nn.Flatten(),nn.Linear(args.channels*args.image_size**2,width)]
{LAYERS}
    layers.append(nn.Linear(width,args.num_classes))
    return nn.Sequential(*layers)
""",
    "lib/dataset/Blobs.py": """
import torch, math
class blobs(torch.utils.data.Dataset):
    def __init__(self, N): self.N=N
    def __len__(self): return self.N
    def __getitem__(self, i):
        x=torch.zeros( 1,8,8 ) ; x[0,i%8]=1
        return {'x':x,'name':'blob %d'%i,'y':i%8}
def add_args(parser): parser.set_defaults(num_classes=8,channels=1,image_size=8,trainer='dicts',epochs=2)
def get_dataset(args):
    print('here are the blobs')
    return {'train':blobs(64),'val':blobs(16)}
""",
    "lib/trainer/dicts.py": """
from lib.trainer import trainer
import sys, os
from lib import config
class Trainer(trainer.Trainer):
    def training_step(self, batch):
        if isinstance(batch,dict): batch=(batch['x'],batch['y'])
        return super().training_step(batch)
    def evaluation_step(self, model, batch, count):
        if isinstance(batch,dict): batch=(batch['x'],batch['y'])
        return super().evaluation_step(model,batch,count)
""",
    "tests/test_mine.py": """
import sys, os
def test_it(): print(1); assert 1
def testX():
    x=[1,
      2]
    assert len(x)==2
""",
}


def output_of(folder, *command, code=0, **env) -> str:
    env = {**CLEAN, **env}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=840)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def python(folder, *command, code=0) -> str:
    return output_of(folder, sys.executable, *command, code=code)


def tracked(folder) -> set[str]:
    names = output_of(folder, "git", "ls-files").splitlines()
    return {name for name in names if (folder / name).is_file()}


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A project made from this one, with a new plugin of each kind, and this Python's packages in its .venv."""
    folder = tmp_path_factory.mktemp("made") / "project"
    python(ROOT, "scripts/new.py", "project", str(folder), "-name", NAME)
    for kind in NEW:
        printed = python(folder, "scripts/new.py", kind, f"own_{kind}")
        assert f"try: python train.py -{kind} own_{kind}" in printed
    (folder / ".venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    installed = f"{(folder / 'pyproject.toml').read_text().rstrip()} {CLEAN.get('UV_TORCH_BACKEND', '')}"
    for mark in (".installed", ".installed_dev"):
        (folder / ".venv" / mark).write_text(installed)
    return folder


def test_a_new_project_has_its_own_name_everywhere_and_no_history(fork):
    files = tracked(fork)
    assert files <= tracked(ROOT), "only what git tracks"
    assert {"train.py", "lib/config/args.py", "tests/test_train.py", "docs/faq.md", "LICENSE"} <= files
    assert not [name for name in files if re.match(r"tests/machinery|scripts/bench|\.github|\.ci|CHANGELOG", name)]
    no_commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=fork, capture_output=True)
    assert no_commit.returncode, "the project has a commit"
    named = {name for name in files if OLD in f"{name} {(fork / name).read_bytes()!r}".lower()}
    assert named == {"LICENSE", "README.md"}, "only these name the template"
    assert f'name = "{NAME}"' in (fork / "pyproject.toml").read_text()
    assert (fork / "scripts" / "train.sh").stat().st_mode & 0o111


def test_the_pages_of_a_new_project_are_its_own_and_have_no_dead_link(fork):
    readme = (fork / "README.md").read_text()
    assert readme.startswith(f"# {NAME}\n") and "./scripts/test.sh" in readme and len(readme.splitlines()) < 80
    count = 0
    for name in tracked(fork):
        if name.endswith(".md"):
            for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", (fork / name).read_text()):
                assert ((fork / name).parent / target).exists(), f"{name}: {target}"
                count += 1
            assert "scripts/bench/" not in (fork / name).read_text() or name == "docs/faq.md", f"{name}: not there"
    assert count > 20
    for name in re.findall(r"^([\w./]+)  ", readme.split("## What to edit")[1].split("```")[1], re.M):
        assert (fork / name).exists(), name


def test_new_plugins_are_short_and_can_be_trained_at_once(fork):
    command = "train.py -arch own_arch -dataset own_dataset -trainer own_trainer -epochs 1 -cpu 1"
    assert "finished:" in python(fork, *command.split())
    for kind in NEW:
        assert len((fork / "lib" / kind / f"own_{kind}.py").read_text().splitlines()) < 30


@pytest.mark.parametrize(
    ("parts", "flags"),
    [
        (SLURM + SCRIPTS, ["-slurm", "-track mlflow", "-tb", "-debug", "-eval"]),
        (READERS, ["-dataset tar", "-weights train.py"]),
        (["lib/core/exact"], ["-deterministic"]),
    ],
)
def test_a_project_that_deletes_optional_parts_trains_without_them(parts, flags, fork, tmp_path):
    files = [fork / f"{name}.py" for name in parts]
    texts = {file: file.read_text() for file in files}
    command = f"train.py -epochs 1 -limit_steps 3 -out {tmp_path} -cpu 2"
    for file in texts:
        file.unlink()
    try:
        assert "stopped (-limit_steps 3" in python(fork, *command.split(), code=75)
        refused = {flag: python(fork, *f"{command} -model other {flag}".split(), code=2) for flag in flags}
    finally:
        for file, text in texts.items():
            file.write_text(text)
    engine = json.loads((tmp_path / "digits_convnet" / "start.json").read_text())["engine"]
    assert engine == ("stock" if "lib/core/exact" in parts else "exact")
    for flag, output in refused.items():
        assert f"train.py: {flag.split()[0]}" in output and ": No module named " in output, output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scripts_of_a_project_pass_with_plugins_in_any_style(fork):
    for name, text in OWN.items():
        (fork / name).write_text(text)
    for name in ("lib/arch/gpt.py", "lib/dataset/tokens.py", "tests/test_tokens.py"):
        (fork / name).unlink()  # plugins that the owner does not need
    for name in (fork / "scripts" / "recipes").glob("gpt*.yaml"):
        name.unlink()
    assert "finished:" in output_of(fork, "./scripts/train.sh", "-dataset", "Blobs", "-arch", "deep", "-cpu", "2")
    # All cases pass in the template. Only those that use this project's plugins may differ here.
    own = " or ".join(("deep", "Blobs", "dicts", "own_arch", "own_dataset", "own_trainer", "test_mine"))
    output = output_of(fork, "./scripts/test.sh", PYTEST_ADDOPTS=shlex.join(["-vv", "-k", own]))
    assert not re.search(r"\d+ failed", output) and int(re.search(r"(\d+) passed", output)[1]) > 9
    for name in ("deep", "Blobs", "dicts", "own_arch", "own_dataset", "own_trainer", "test_mine.py::test_it"):
        results = re.findall(rf"(PASSED|SKIPPED) .*\b{name}\]?\s*$", output, re.M)
        assert results and set(results) == {"PASSED"}, f"{name}: {results}"


def test_a_project_or_plugin_that_cannot_be_created_is_refused_in_one_line(fork, tmp_path):
    output = python(fork, "scripts/new.py", "arch", "own_arch", code=2)
    assert output == "new.py: lib/arch/own_arch.py exists already: choose another name, or delete it first\n"
    assert "not a plugin's name" in python(fork, "scripts/new.py", "arch", "../x", code=2)
    assert "letters, digits and dashes" in python(fork, "scripts/new.py", "project", str(tmp_path / "a b"), code=2)
    long = python(fork, "scripts/new.py", "project", str(tmp_path / "a"), "-name", f"{NAME}s", code=2)
    assert "at most 24" in long
    assert "exists already: choose another folder" in python(fork, "scripts/new.py", "project", str(fork), code=2)
    assert not list(tmp_path.iterdir())
