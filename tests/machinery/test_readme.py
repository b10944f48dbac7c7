"""README.md and docs are correct: their files run unchanged, and their commands do what they say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import needs
import ports
import pytest
import tiny_data
import torch
import torchvision
from PIL import Image
from processes import ROOT

import train
from lib import config
from scripts import flags_page

pytestmark = pytest.mark.timeout(900)  # many runs in turn
README = (ROOT / "README.md").read_text()
PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md"), *ROOT.glob("scripts/*/*.md")]
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
FILE = re.compile(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.S | re.M)
FILES = {name: text for page in PAGES.values() for name, text in FILE.findall(page)}
FORMS = (
    *("python train.py", "python scripts/", "./scripts/", "torchrun --", "HEAD=node1:29400 ", "sbatch -N", "srun -N"),
    *("uv pip install ", "pip install ", "python3 -m venv .venv", "tensorboard --logdir ", "docker build "),
    *("docker push ", "kubectl ", "pre-commit install"),
)
PAGE_PLUGINS = {  # plugins that the pages define or take from elsewhere, by kind
    "arch": ["tiny", "my_net", "planar", "bert", "nano", "vision", "causal", "detector", "painter"],
    "dataset": ["stripes", "my_data", "rings", "parity", "counting", "boxes", "saddle", "cifar10"],
    "trainer": ["sure", "detection", "gan", "contrastive", "profiled", "auroc", "free"],
}
INSTEAD = {"arch": "mlp", "dataset": "digits", "trainer": "trainer"}


def commands(page: str) -> list[str]:
    """The commands of a page: the lines of its shell blocks, and code in backticks that begins like a command."""
    lines = [line for kind, text in FENCE.findall(page) if kind == "sh" for line in text.splitlines()]
    inline = [code for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page)) if code.startswith(FORMS)]
    whole = [line.split(" #")[0].strip() for line in [*lines, *inline] if not line.startswith("#")]
    return [part for line in whole for part in line.split(" && ") if part]


COMMANDS = [command for page in PAGES.values() for command in commands(page)]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the tracked files, with the files of the pages and with photos in class folders."""
    folder = tmp_path_factory.mktemp("fork")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    _photos(folder / "data" / "photos")
    return folder


def test_every_command_of_the_pages_has_a_known_form():
    assert len(COMMANDS) > 60
    strange = [command for command in COMMANDS if not command.startswith((*FORMS, ". .venv/bin/activate"))]
    assert strange == []


def test_every_train_py_command_of_the_pages_can_be_parsed(tmp_path):
    _photos(tmp_path / "photos")
    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    shapes = {
        r"-cfg out/\S+": f"-cfg {tmp_path}/config.yaml",
        r"-data (data/photos|DIR)": f"-data {tmp_path}/photos",
        r"-data PATH": "-data lib",
        r"-image_size \S+": "",
    }
    for kind, names in PAGE_PLUGINS.items():
        shapes[rf"-{kind} ({'|'.join(names)})\b"] = f"-{kind} {INSTEAD[kind]}"
    understood = 0
    for command in COMMANDS:
        parts = re.split(r"train\.py|train\.sbatch|train\.sh|elastic\.sh|doctor\.py", command)
        if len(parts) == 2 and not command.startswith("kubectl"):
            for shape, instead in shapes.items():
                parts[1] = re.sub(shape, instead, parts[1])
            if "-h" not in shlex.split(parts[1]):
                config.parse_args(shlex.split(parts[1]))
            understood += 1
    assert understood >= 40


def test_no_link_in_the_pages_is_dead():
    count = 0
    for name, page in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page):
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            assert file.exists(), f"{name}: {target}"
            assert not anchor or anchor in _anchors(file.read_text()), f"{name}: {target}"
            count += 1
    assert count > 60
    linked = set(re.findall(r"\]\(docs/(\w+\.md)", README))
    assert linked == {file.name for file in ROOT.glob("docs/*.md")}, "the README links to every page"


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_stub_of_args_has_every_flag_with_its_type():
    assert flags_page.STUB.read_text() == flags_page.stub(), "run python scripts/flags_page.py"
    assert "    max_hours: float | None\n    grace_s: float\n" in flags_page.stub()


def test_the_page_of_flags_is_generated_from_the_help():
    page = PAGES["docs/flags.md"]
    assert page == flags_page.page(), "run python scripts/flags_page.py"
    shown = set(re.findall(r"^\| `(-\w+)", page, re.M))
    assert shown >= {f"-{action.dest}" for action in config.new_parser()._actions if action.dest not in ("h", "help")}


def test_every_test_named_in_a_page_exists():
    existing = {
        name
        for file in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    named = {name for page in PAGES.values() for name in re.findall(r"`(test_\w+)`", page)}
    assert len(named) >= 10 and named <= existing, named - existing


def test_the_files_and_folders_named_in_the_pages_exist():
    for name in re.findall(r"^([\w./]+)  ", README.split("## Where things are")[1].split("```")[1], re.M):
        assert (ROOT / name).exists(), name
    for page, text in PAGES.items():
        for name in re.findall(r"`((?:lib|scripts|tests|docs|data)/[\w/.]+\w)`", text):
            made = name in FILES or name.endswith(("NAME.py", "my_net.py", "my_data.py"))
            assert made or (ROOT / name).exists(), f"{page}: {name}"


RUNS = {  # runs of the files in the pages, in turn: name and flags
    "digits_convnet": "",
    "two": "-cpu 2 -model two",
    "stripes_tiny": "-dataset stripes",
    "again": "-cfg out/stripes_tiny/config.yaml -model again",
    "digits_tiny": "-arch tiny -epochs 1",
    "rings_planar": "-dataset rings",
    "saddle_planar": "-dataset saddle",
    "tokens_nano": "-dataset tokens -data lib -tokens_samples 64 -tokens_length 32 -arch nano",
    "boxes_detector": "-dataset boxes -best overlap -epochs 1 -batch_size 16 -micro_batch 8 -cpu 2",
    "gan": "-arch painter -trainer gan -epochs 1 -micro_batch 32 -cpu 1 -model gan",
    "gan_2": "-arch painter -trainer gan -epochs 1 -micro_batch 32 -cpu 2 -model gan_2",
    "views": "-trainer contrastive -epochs 2 -micro_batch 32 -cpu 1 -model views",
    "views_3": "-trainer contrastive -epochs 2 -micro_batch 32 -cpu 3 -model views_3",
    "profiled": "-trainer profiled -epochs 1 -model profiled",
    "free": "-arch mlp -trainer free -lr_start 2 -epochs 4 -model free",
    "photos": "-image_size 65 -epochs 1 -batch_size 12 -model photos",  # added to the README's own flags
}
WORLD_RUNS = {  # those that need packages of others
    "parity_bert": "-dataset parity -epochs 1",
    "vision": "-arch vision -image_size 32 -dataset folder -data data/photos -epochs 1 -batch_size 12 -model vision",
    "counting_causal": "-dataset counting -epochs 1",
    "auroc": "-trainer auroc -best auroc -epochs 1 -cpu 2 -model auroc",
}


def train_in_turn(fork, runs, **variables) -> str:
    """The output of one process that does all these runs."""
    code = "import train, shlex, sys; sys.exit(max(train.main(shlex.split(run)) for run in sys.argv[1:]))"
    output = _run(fork, shlex.join(["python", "-c", code, *runs.values()]), **variables)
    assert output.count("finished:") == len(runs)
    return output


@pytest.fixture(scope="module")
def output(fork):
    """The output of RUNS."""
    weights = next(one for one in COMMANDS if "-weights imagenet" in one).removeprefix("python train.py ")
    cache = fork / "cache" / "hub" / "checkpoints"  # where torch.hub would have downloaded it
    cache.mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), cache / "resnet18-f37072fd.pth")
    runs = {**RUNS, "photos": f"{weights} {RUNS['photos']}"}
    return train_in_turn(fork, runs, TORCH_HOME=str(fork / "cache"))


def test_the_files_in_the_pages_train(fork, output):
    assert {name.split("/")[-1][:-3] for name in FILES if name.startswith("lib/")} == {
        word for kind in PAGE_PLUGINS.values() for word in kind if not word.startswith("my_")
    }
    for run, least in {"stripes_tiny": 0.9, "rings_planar": 0.9, "free": 0.9}.items():
        assert [line["val/accuracy"] for line in _lines(fork / "out" / run) if "val/accuracy" in line][-1] > least
    assert [line["val/mae"] for line in _lines(fork / "out" / "saddle_planar") if "val/mae" in line][-1] < 0.05
    assert any("val/sure" in line for line in _lines(fork / "out" / "rings_planar"))
    assert all("train/critic" in line for line in _lines(fork / "out" / "gan") if "train/loss" in line)
    assert _weights(fork, "gan") == _weights(fork, "gan_2"), "both networks' gradients are sums over the processes"
    assert _weights(fork, "views") == _weights(fork, "views_3")
    assert _weights(fork, "stripes_tiny") == _weights(fork, "again"), "config.yaml repeats a run"
    losses = [line["val/loss"] for line in _lines(fork / "out" / "views") if "val/loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert any("val/overlap" in line for line in _lines(fork / "out" / "boxes_detector"))
    (trace,) = (fork / "out" / "profiled" / "profile").glob("rank_0.*.pt.trace.json")
    assert trace.read_text().count('"name": "ProfilerStep#') == 5


def test_the_dataset_of_torchvision_in_the_page_has_the_splits_and_the_augmentation_that_it_says(
    tmp_path, monkeypatch
):
    tiny_data.make_cifar10(tmp_path, monkeypatch)
    code = {}
    exec(FILES["lib/dataset/cifar10.py"], code)
    parts = code["get_dataset"](types.SimpleNamespace(data=str(tmp_path), augment=True))
    assert {split: len(part) for split, part in parts.items()} == {"train": 18, "val": 2, "test": 4}
    image, label = parts["test"][3]
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8 and parts["test"].classes[int(label)] == "b"
    draws = torch.full((2, 8), 0.5)
    batch = parts["train"].__getitems__([0, 1])
    assert torch.equal(parts["train"].on_device(batch, draws)[0], parts["val"].on_device(batch, draws)[0])
    moved = parts["train"].on_device(batch, torch.tensor([[0.0, 0.99, 0, *[0] * 5]] * 2))[
        0
    ]  # 4 down, 4 left, mirrored
    still = parts["val"].on_device(batch, draws)[0].flip(3)
    assert torch.equal(moved[:, :, 4:, 4:], still[:, :, :28, :28])


@needs.require_package("torchmetrics", "track")
@needs.require_package("transformers", "world")
def test_the_files_in_the_pages_that_need_packages_train(fork):
    train_in_turn(fork, WORLD_RUNS)


@pytest.mark.parametrize(
    "flags",
    [
        "-dataset tokens -data lib -tokens_samples 256 -tokens_length 32 -arch nano",
        pytest.param("-dataset parity", marks=needs.require_package("transformers", "world")),
        "-arch painter -trainer gan -micro_batch 32",
        "-dataset boxes -best overlap -batch_size 8 -micro_batch 4",
        "-arch mlp -trainer free -lr_start 2",
    ],
    ids=["nano", "bert", "gan", "detector", "free"],
)
def test_models_of_other_libraries_in_the_pages_pass_check_resume(fork, flags):
    output = _run(fork, f"python train.py {flags} -check_resume -cpu 2 -limit_steps 3")
    assert "all as promised" in output.splitlines()


def test_a_run_starts_from_pretrained_weights_as_the_readme_describes(output):
    assert "imagenet: 120 tensors loaded; not loaded, as missing or of another shape: fc.bias (" in output


def test_everything_that_the_faq_allows_to_delete_can_be_deleted(fork, tmp_path):
    folder = shutil.copytree(fork, tmp_path / "bare", ignore=shutil.ignore_patterns("out"))
    section = PAGES["docs/faq.md"].split("## How do I remove what I do not need?")[1]
    named = [folder / name for name in re.findall(r"`([\w/.]+)`", section) if "/" in name and "machinery" not in name]
    kept = set(re.findall(r"`(\w+)`", re.search(r"except the defaults ([^.]+)\.", section)[1]))
    assert len(named) >= 9 and {"digits", "convnet", "trainer"} == kept
    others = [
        file for kind in config.BUILDERS for file in (folder / "lib" / kind).glob("[!_]*.py") if file.stem not in kept
    ]
    for path in [*named, *others]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "finished:" in _run(folder, "python train.py -epochs 1 -cpu 2")


def test_the_commands_for_two_machines_in_the_page_start_one_run(fork):
    page, place = commands(PAGES["docs/launching.md"]), f"localhost:{ports.free()}"
    typed = [one.replace("node1:29400", place).replace("node=8", "node=1") for one in page if "--nnodes" in one]
    flags = [[*shlex.split(one)[1:], *"-cpu 1 -epochs 1 -model two_machines".split()] for one in typed]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    runs = [subprocess.Popen([*torchrun, *one], cwd=fork, stdout=subprocess.PIPE, text=True) for one in flags]
    output = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and "".join(output).count("finished:") == 1


def test_the_default_run_reaches_the_accuracy_in_the_readme(output):
    """At least 98.5 % of the test digits, on one process and on two: the first of RUNS."""
    accuracies = re.findall(r"finished: +test accuracy ([\d.]+)", output)
    assert min(float(one) for one in accuracies[:2]) >= 0.985
    shown = re.search(r"```\n(finished:.*?)```", README, re.S)[1]
    for line in shown.splitlines():
        assert f"\n{line.split(':')[0]}:" in output, "the last lines of a run differ from those in the README"


def test_the_commands_of_the_first_hour_work_in_turn(fork):
    """On the user's own photos."""
    hour = commands(PAGES["docs/extending.md"].split("## The first hour")[1].split("\n## ")[0])
    hour = [command for command in hour if "-slurm" not in command and "-watch" not in command]
    output = dict(zip(hour, [_run(fork, command) for command in hour], strict=True))
    assert all("finished:" in output[one] for one in hour if re.search(r"-cpu 2|-arch my_net$", one))
    status, check = output["python scripts/status.py"], next(one for one in hour if "-check_resume" in one)
    assert "first" in status and "finished" in status and "all as promised" in output[check]
    assert (fork / "my_net.pt").is_file()


def _photos(folder):
    """Make a few images of two classes, bright and dark."""
    for part, count in (("train", 12), ("val", 4)):
        for name, light in (("day", 200), ("night", 40)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 30), (light, light, light + number)).save(
                    folder / part / name / f"{number}.jpg"
                )


def test_missing_gpus_and_a_missing_slurm_are_reported_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))  # as where there is no Slurm
    shown, refused = 0, 0
    for command in sorted(set(COMMANDS)):
        flags = shlex.split(command)[2:] if command.startswith("python train.py") else []
        if "-slurm_dry" in flags and "my_data" not in flags:
            assert train.main([*flags, "-out", str(tmp_path / "out")]) == 0
            assert "#SBATCH --partition=general\n" in capfd.readouterr().out
            shown += 1
        elif "-slurm_dry" not in flags and ("-slurm" in flags or ("-gpus" in flags and _gpus() < 3)):
            assert train.main(flags) == 2
            output = capfd.readouterr().err
            assert len(output.splitlines()) == 1 and output.startswith("train.py: -"), command
            refused += 1
    assert shown and refused


def test_every_flag_named_in_the_pages_exists():
    """A flag of train.py, of one of the plugins, or of a script."""
    files = [*ROOT.glob("lib/*/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/machinery/test_readme.py")]
    others = set(re.findall(r'"(-\w+)"', "".join(file.read_text() for file in files)))
    existing = {option for action in config.new_parser()._actions for option in action.option_strings} | others
    pages = [page for name, page in PAGES.items() if name != "CHANGELOG.md"]  # it also names removed flags
    codes = [code for page in pages for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page))]
    named = set(re.findall(r"(?<![\w-])-[a-z]\w+", " ".join(codes))) - {"-stripes_noise"}
    assert len(named) > 60 and named <= existing, named - existing


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _run(folder, command, code=0, **variables):
    flags = shlex.split(command)
    flags[0] = {"python": sys.executable, "torchrun": str(Path(sys.executable).with_name("torchrun"))}[flags[0]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(
        flags,
        cwd=folder,
        env={**env, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=800,
        check=False,
    )
    assert run.returncode == code, f"{command}: exit code {run.returncode}\n{run.stdout}"
    return run.stdout


def _weights(folder, name):
    return (folder / "out" / name / "final" / "weights.safetensors").read_bytes()


def _gpus():
    return torch.cuda.device_count()
