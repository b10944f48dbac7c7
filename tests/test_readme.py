"""The README tells the truth: its files run as they stand there, its commands do what it says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import ports
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip() for line in "\n".join(re.findall(r"```sh\n(.*?)```", README, re.S)).splitlines()
]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of what git tracks, with the two plugin files of the README in it."""
    folder = tmp_path_factory.mktemp("fork")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name, text in re.findall(r"`(lib/\w+/\w+\.py)`:\n\n```python\n(.*?)```", README, re.S):
        (folder / name).write_text(text)
    return folder


def test_every_command_of_the_readme_is_held_by_a_test():
    held = ("./scripts/train.sh", "./scripts/test.sh", "./scripts/slurm/set_up.sh", "python train.py", "torchrun",
            "HEAD=node1:29400", "sbatch", "srun", "python scripts/")  # fmt: skip
    assert len(COMMANDS) >= 6 and all(command.startswith(held) for command in COMMANDS if command)


def test_every_command_of_the_readme_is_understood():
    from lib import config

    shipped = [one.replace("my_data", "digits").replace("my_net", "mlp") for one in COMMANDS if "photos" not in one]
    started = [re.split(r"train\.py|train\.sbatch|train\.sh|elastic\.sh", command) for command in shipped]
    words = [parts[1] for parts in started if len(parts) == 2]
    assert len(words) >= 8
    for given in words:
        config.parse_args(shlex.split(given))


def test_two_machines_are_started_as_the_readme_says(fork):
    more = f"-cpu 1 -epochs 1 -model by_hand -master_port {ports.free()}".split()
    words = [shlex.split(one.replace("node1", "localhost"))[1:] + more for one in COMMANDS if "-nnodes" in one]
    runs = [subprocess.Popen([sys.executable, *one], cwd=fork, stdout=subprocess.PIPE, text=True) for one in words]
    said = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and "finished:" in said[0]


def test_the_plugin_files_of_the_readme_run_as_they_are(fork):
    said = _run(fork, "python train.py -dataset stripes")
    assert "finished:" in said
    lines = [json.loads(line) for line in (fork / "out" / "stripes_tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [line["val/accuracy"] for line in lines if "val/accuracy" in line][-1] > 0.9


def test_the_default_run_reaches_what_the_readme_says(fork):
    """At least 98.5 % of the test digits, on one process and on two."""
    for words in ("", "-cpu 2 -model two"):
        said = _run(fork, f"python train.py {words}")
        assert float(re.search(r"finished: +test accuracy ([\d.]+)", said)[1]) >= 0.985
    shown = re.search(r"```\n(finished:.*?)```", README, re.S)[1]
    for line in shown.splitlines():
        assert f"\n{line.split(':')[0]}:" in said, "the last lines of a run are others than the README shows"


def test_the_first_hour_goes_as_the_readme_says(fork):
    """Each of its commands in turn, on photos of one's own; a run of it is killed and goes on."""
    commands = README.split("## The first hour")[1].split("```")[1].removeprefix("sh\n").splitlines()
    commands = [line.split("#")[0].strip() for line in commands if "-slurm" not in line]
    _photos(fork / "photos")
    said = [_run(fork, command) for command in commands]
    assert all(
        "finished:" in text for text, command in zip(said, commands) if re.search(r"-cpu 2|-arch my_net$", command)
    )
    assert "first" in said[1] and "finished" in said[1] and "all as promised" in said[5]
    assert (fork / "my_net.pt").is_file()

    again = f"{commands[4]} -model killed"
    start = subprocess.Popen([sys.executable, *shlex.split(again)[1:]], cwd=fork, stdout=subprocess.PIPE, text=True)
    while "epoch 3/9" not in start.stdout.readline():
        assert start.poll() is None
    start.kill()
    start.communicate()
    said = _run(fork, again)
    assert "going on from" in said and "finished:" in said


def _photos(folder):
    """A few images of two classes, bright and dark."""
    for part, count in (("train", 12), ("val", 4)):
        for name, light in (("day", 200), ("night", 40)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 30), (light, light, light + number)).save(
                    folder / part / name / f"{number}.jpg"
                )


def test_torchrun_starts_the_same_worker(fork):
    said = _run(fork, "torchrun --nproc_per_node=2 train.py -epochs 1 -model by_torchrun -cpu 1")
    assert "finished:" in said


def test_a_config_file_of_a_run_repeats_it(fork):
    _run(fork, "python train.py -dataset stripes -model once -stripes_samples 64")
    assert "finished:" in _run(fork, "python train.py -cfg out/once/config.yaml -model again")
    for name in ("once", "again"):
        assert (fork / "out" / name / "final" / "weights.safetensors").exists()
    assert _weights(fork, "once") == _weights(fork, "again")


def test_gpus_and_slurm_that_are_not_there_are_one_line(fork):
    for command in COMMANDS:
        absent = (" -gpus" in command and _gpus() < 3) or (" -slurm" in command and not shutil.which("sbatch"))
        if absent:
            said = _run(fork, command, code=2)
            assert len(said.strip().splitlines()) == 1 and said.startswith("train.py: -")


def test_every_flag_that_the_readme_names_exists():
    from lib import config, parsing

    parser = parsing.Parser(prog="x", add_help=False, allow_abbrev=False)
    config.flags.add_shared(parser)
    table = re.findall(r"^\| `(.*?)\|", README, re.M)
    named = set(
        re.findall(
            r"(?<![\w-])-[a-z]\w+", " ".join([*table, *(one for one in COMMANDS if "scripts/export" not in one)])
        )
    ) - {"-dataset_stripes"}
    assert len(named) > 15
    assert {name for name in named if name not in parser._option_string_actions} == set()


def test_every_path_that_the_readme_names_exists(fork):
    for path in re.findall(r"\]\((?!http|#)([^)]+)\)", README) + re.findall(r"python (scripts/\S+\.py)", README):
        assert (fork / path).exists(), path


def test_the_plugins_that_the_readme_lists_are_there():
    from lib import config

    shipped = re.search(r"^Shipped are: (.*?)\n\n", README, re.S | re.M)[1]
    there = {name for kind in config.BUILDERS for name in config.plugins(kind)}
    assert len(set(re.findall(r"`(\w+)`", shipped)) & there) > 8
    assert set(re.findall(r"`(\w+)`", shipped)) <= there


def _run(folder, command, code=0):
    words = shlex.split(command)
    words[0] = {"python": sys.executable, "torchrun": str(Path(sys.executable).with_name("torchrun"))}[words[0]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(
        words,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert run.returncode == code, f"{command}: exit code {run.returncode}\n{run.stdout}"
    return run.stdout


def _weights(folder, name):
    return (folder / "out" / name / "final" / "weights.safetensors").read_bytes()


def _gpus():
    import torch

    return torch.cuda.device_count()
