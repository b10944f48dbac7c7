"""What scripts/new.py creates runs at once, in any style of its owner, and the tests find it."""

import re
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path

import processes
import pytest
from command_line import shared
from processes import CLEAN, ROOT, copy_tracked

from scripts import project

OLD = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
NAME = "twenty-four-letter-names"
NEW = ("arch", "dataset", "trainer")
ME = {f"GIT_{who}_{what}": "me@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
OWN = {  # plugins in another style: long functions, no docstrings, unsorted imports, prints, other names
    "lib/arch/deep.py": """
import os, sys
from torch import nn
import torch.nn.functional as F, json
def add_args(parser): parser.add_argument('-width', default = 16, type = int)
def get_model(args):
    print( 'building' )
    width=args.width
    layers=[nn.Flatten(),nn.Linear(args.channels*args.image_size**2,width)]
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
    "tests/test_mine.py": "import sys, os\ndef test_it(): print(1); assert 1",
}
PROBE = """
import importlib, sys, pathlib, pytest, train
for file in sorted([*pathlib.Path("lib").rglob("*.py"), *pathlib.Path("scripts").glob("*.py")]):
    importlib.import_module(".".join(file.with_suffix("").parts))
assert not pytest.main("--collect-only -qq -p no:cacheprovider".split())
for flag in sys.argv[1:]:
    assert train.main(["-model", "other", "-cpu", "1", *flag.split()]) == 2, flag
sys.exit(train.main("-cpu 1 -epochs 1 -limit_steps 2".split()))
"""


def output_of(folder, *command, code=0, **env) -> str:
    return processes.output_of(command, code, limit=840, cwd=folder, env={**CLEAN, **ME, **env})


def python(folder, *command, code=0) -> str:
    return output_of(folder, sys.executable, *command, code=code)


def tracked(folder) -> set[str]:
    return {name for name in output_of(folder, "git", "ls-files").splitlines() if (folder / name).is_file()}


def commit(folder, *how):
    output_of(folder, "git", "add", "--all")
    output_of(folder, "git", "commit", "--quiet", *(how or ("--message", "a change")))


def change(folder, name, old, new):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def install(folder):
    (folder / ".venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    installed = f"{(folder / 'pyproject.toml').read_text().rstrip()} {CLEAN.get('UV_TORCH_BACKEND', '')}"
    for mark in (".installed", ".installed_dev"):
        (folder / ".venv" / mark).write_text(installed)


def count_links(folder) -> int:
    """The number of links to files in a project's pages, each of which must be there."""
    pages = [folder / name for name in tracked(folder) if name.endswith(".md")]
    found = [(page.parent, re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())) for page in pages]
    links = [place / one for place, names in found for one in names]
    assert not [link for link in links if not link.exists()]
    return len(links)


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A project made from this one, with a new plugin of each kind, and this Python's packages in its .venv."""
    folder = tmp_path_factory.mktemp("made") / "project"
    python(ROOT, "scripts/new.py", "project", str(folder), "-name", NAME)
    for kind in NEW:
        assert f"try: python train.py -{kind} own_{kind}" in python(folder, "scripts/new.py", kind, f"own_{kind}")
    install(folder)
    return folder


def test_a_new_project_has_its_own_name_everywhere_and_one_commit(fork):
    files = tracked(fork)
    assert files - {".template.json"} <= tracked(ROOT), "only what git tracks"
    assert {"train.py", "lib/config/args.py", "tests/test_train.py", "docs/faq.md", "LICENSE"} <= files
    assert not [name for name in files if re.match(r"tests/machinery|scripts/bench|\.github|\.ci|CHANGELOG", name)]
    assert len(output_of(fork, "git", "log", "--all", "--oneline").splitlines()) == 1
    named = {name for name in files if OLD in f"{name} {(fork / name).read_bytes()!r}".lower()}
    assert named == {"LICENSE", "README.md"}, "only these name the template"
    assert f'name = "{NAME}"' in (fork / "pyproject.toml").read_text()
    assert (fork / "scripts" / "train.sh").stat().st_mode & 0o111


def test_the_pages_of_a_new_project_are_its_own_and_have_no_dead_link(fork):
    readme = (fork / "README.md").read_text()
    assert readme.startswith(f"# {NAME}\n") and "./scripts/test.sh" in readme and len(readme.splitlines()) < 80
    assert count_links(fork) > 20
    pages = [name for name in tracked(fork) if name.endswith(".md")]
    assert not [name for name in pages if "scripts/bench/" in (fork / name).read_text()]
    for name in re.findall(r"^([\w./]+)  ", readme.split("## What to edit")[1].split("```")[1], re.M):
        assert (fork / name).exists(), name
    small = project.Project(NAME, {part: part != "plugins" for part in project.PARTS}, tracked(ROOT))
    text = b"".join(small.contents(["docs/architecture.md", "docs/extending.md"]).values())
    assert b"  convnet.py" in text and b"python train.py -arch my_net" in text
    assert not re.search(rb"  mlp.py|  folder.py|out/folder_my_net", text)


def test_new_plugins_are_short_and_can_be_trained_at_once(fork):
    command = "train.py -arch own_arch -dataset own_dataset -trainer own_trainer -epochs 1 -cpu 1"
    assert "finished:" in python(fork, *command.split())
    for kind in NEW:
        assert len((fork / "lib" / kind / f"own_{kind}.py").read_text().splitlines()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("part", project.PARTS)
def test_a_project_trains_and_collects_its_tests_without_any_one_of_the_parts(part, tmp_path):
    folder, about = tmp_path / "project", project.PARTS[part]
    python(ROOT, "scripts/new.py", "project", str(folder), "-without", part)
    assert not [name for name in tracked(folder) for one in about.files.split() if fnmatch(name, one)]
    count_links(folder)
    assert f'"{part}": false' in (folder / ".template.json").read_text()
    settings = (folder / "pyproject.toml").read_text()
    assert not [name for name in about.packages.split() if re.search(rf'^ *"?{name}\b|"{name}"', settings, re.M)]
    if part in ("kubernetes", "elastic", "docs", "bench"):  # no Python that anything else could need
        return
    flags = about.flags.replace("*", "").split()
    values = {"track": " mlflow", "ngrok_auth": " me"}
    printed = python(folder, "-c", PROBE, *[f"-{flag}{values.get(flag, '')}" for flag in flags], code=75)
    assert "stopped (-limit_steps 2" in printed, printed
    shown = python(folder, "train.py", "-h") + (folder / "docs" / "flags.md").read_text()
    for flag in flags:
        assert flag in shared() and not re.search(rf"^( +|- `)-{flag}\b", shown, re.M)
        assert re.search(rf"^train.py: (argument )?-{flag}: .*", printed, re.M), printed


@pytest.mark.slow
def test_the_smallest_project_is_short_and_its_two_commands_pass(tmp_path):
    folder = tmp_path / "smallest"
    python(ROOT, "scripts/new.py", "project", str(folder), "-without", "all")
    lines = {name: len((folder / name).read_text().splitlines()) for name in tracked(folder) if name.endswith(".py")}
    assert sum(lines.values()) <= 7000, lines
    read = re.findall(r"^(\S+) +READ", (folder / "README.md").read_text(), re.M)
    assert len(read) > 5 and 1350 < sum(lines[name] for name in read) < 1450, "the README says 1,400"
    count_links(folder)
    install(folder)
    assert "finished:" in output_of(folder, "./scripts/train.sh", "-epochs", "1")
    assert re.search(r"\d+ passed", output_of(folder, "./scripts/test.sh"))
    python(ROOT, "scripts/new.py", "project", str(tmp_path / "o_1"), "-without", "all", "-with", "mirror")
    python(tmp_path / "o_1", "-c", "import scripts.mirror")


@pytest.mark.slow
def test_an_update_merges_what_the_template_and_the_project_changed(tmp_path):
    template, mine, clone, amended = (tmp_path / name for name in ("baton", "mine", "clone", "amended"))
    copy_tracked(template)
    output_of(template, "git", "init", "--quiet")
    commit(template)
    (template / "lib" / "arch" / "own.py").write_text("")  # which no version of the template has
    python(template, "scripts/new.py", "project", str(mine), "-name", "my-net", "-without", "slurm,docs")
    (template / "lib" / "arch" / "own.py").unlink()
    update = ("scripts/new.py", "update", str(template))
    assert "Already up to date" in python(mine, *update)
    output_of(tmp_path, "git", "clone", "--quiet", str(mine), str(amended))
    (amended / "lib/arch/mine.py").write_text("")
    output_of(amended, "git", "reset", "--quiet", "--soft", "origin/template")
    commit(amended, "--amend", "--no-edit")  # has the mark, and is no template's
    change(mine, "train.py", "a model: the whole", "MY model: the whole")
    assert "not committed" in python(mine, *update, code=2)
    (mine / "scripts" / "plot.py").unlink()
    commit(mine)
    change(template, "train.py", "return local.start(", "return  local.start(")
    (template / "lib" / "core" / "more.py").write_text('NAME = "baton"\n')
    (template / "lib" / "launch" / "slurm.py").write_text("")
    commit(template)
    output_of(tmp_path, "git", "clone", "--quiet", str(mine), str(clone))  # which has no branch `template` of its own
    for folder in (mine, clone):
        assert "scripts/test.sh" in python(folder, *update)
        text = (folder / "train.py").read_text()
        assert "MY model" in text and "return  local.start(" in text, "both changes"
        assert (folder / "lib" / "core" / "more.py").read_text() == 'NAME = "my-net"\n'
        assert not (folder / "lib" / "launch" / "slurm.py").exists(), "what was left out stays out"
        assert (folder / "lib" / "arch" / "own.py").exists(), "new plugins are the project's"
        assert not (folder / "scripts" / "plot.py").exists() and not output_of(folder, "git", "status", "--short")
    output_of(amended, *re.search("all of it: (.*)", python(amended, *update, code=2))[1].split())
    assert "scripts/test.sh" in python(amended, *update) and (amended / "lib/core/more.py").exists()
    assert (amended / "lib/arch/mine.py").exists(), "what is not the template's stays"
    change(template, "train.py", "a model: the whole", "no model: the whole")
    commit(template)
    squashed = output_of(mine, "git", "log", "-1", "--format=%B", "template")  # as a web site merges
    output_of(mine, "git", "reset", "--quiet", "--soft", "HEAD^")
    output_of(mine, "git", "commit", "--quiet", "--message", squashed)
    assert "solve the conflicts" in python(mine, *update[:2], f"file://{template}", code=1)
    assert "<<<<<<< HEAD" in (mine / "train.py").read_text() and (mine / "lib/arch/own.py").exists()
    assert "a merge is not finished" in python(mine, *update, code=2)
    for source, reason in ((str(tmp_path), "no folder or Git URL of the template"), (str(mine), "not the template")):
        assert reason in python(clone, "scripts/new.py", "update", source, code=2)
    assert "no .template.json here" in python(template, *update, code=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scripts_of_a_project_pass_with_plugins_in_any_style(fork):
    for name, text in OWN.items():
        (fork / name).write_text(text)
    names = ("lib/arch/gpt.py", "lib/dataset/tokens.py", "tests/test_tokens.py")
    for file in (*map(fork.joinpath, names), *fork.glob("scripts/recipes/gpt*.yaml")):
        file.unlink()  # plugins that the owner does not need
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
    refused = python(ROOT, "scripts/new.py", "project", str(tmp_path / "2_b"), code=2)
    assert refused.startswith("new.py: 2-b is no name: give -name, only letters, digits and dashes")
    assert "at most 24" in python(ROOT, "scripts/new.py", "project", f"{tmp_path}/a", "-name", f"{NAME}s", code=2)
    no_part = python(ROOT, "scripts/new.py", "project", str(tmp_path / "a"), "-without", "slrm", code=2)
    assert "-without slrm: no such part; there are slurm, " in no_part
    assert "exists already: choose another folder" in python(ROOT, "scripts/new.py", "project", str(fork), code=2)
    assert not list(tmp_path.iterdir())
