"""The commands in README.md and docs do what they say, in a fork with the files of the pages."""

import re
import shlex
import subprocess
import sys

import ports
import pytest
from pages import PAGES, commands, run_command

pytestmark = pytest.mark.timeout(900)  # many runs in turn


def test_the_commands_of_the_first_hour_work_in_turn(fork):
    hour = commands(PAGES["docs/extending.md"].split("## The first hour")[1].split("\n## ")[0])
    hour = [command for command in hour if "-slurm" not in command and "-watch" not in command]
    output = dict(zip(hour, [run_command(fork, command) for command in hour], strict=True))
    assert all("finished:" in output[one] for one in hour if re.search(r"-cpu 2|-arch my_net$", one))
    status, check = output["python scripts/status.py"], next(one for one in hour if "-check_resume" in one)
    assert "first" in status and "finished" in status and "all as promised" in output[check]
    assert (fork / "my_net.pt").is_file()


def test_the_command_for_two_machines_in_the_page_starts_one_run(fork):
    page, place = commands(PAGES["docs/launching.md"]), f"localhost:{ports.free()}"
    [typed] = [one.replace("node1:29400", place).replace("node=8", "node=1") for one in page if "--nnodes" in one]
    flags = [*shlex.split(typed)[1:], *"-cpu 1 -epochs 1 -model two_machines".split()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags]
    runs = [subprocess.Popen(torchrun, cwd=fork, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and "".join(output).count("finished:") == 1
