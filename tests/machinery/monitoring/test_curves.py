"""scripts/tensorboard_server.py alone: it serves a run's figures, as metrics.jsonl has them."""

import json
import signal
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest
from processes import CLEAN, ROOT, address_in, until
from runs import lines


def test_the_server_has_each_figure_of_a_killed_and_resumed_run_once_at_its_step(start, tmp_path):
    flags = ("-log_every", 1, "-save_every", "7steps")
    fault = {"do": "send_signal", "signal": "SIGKILL", "step": 33}  # the newest checkpoint is that of step 28
    assert start("killed", *flags, cpu=1, fault=fault).wait() == -signal.SIGKILL
    assert start("killed", *flags, cpu=1).wait() == 0
    figures = figures_of(tmp_path / "out" / "killed")
    assert [step for step, _ in figures["train/loss"]] == [*range(1, 61)]

    command = [sys.executable, "scripts/tensorboard_server.py", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, env=CLEAN, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = f"{address_in(server.stdout.readline())}data/plugin/scalars/"
            until(lambda: fetch(f"{address}tags").get("killed", {}).keys() == figures.keys())  # all is read
            assert figures.keys() > {"train/loss", "val/accuracy", "test/loss", "perf/memory"}
            for tag, points in figures.items():
                query = urllib.parse.urlencode({"run": "killed", "tag": tag})
                served = fetch(f"{address}scalars?{query}")
                assert [tuple(point[1:]) for point in served] == [
                    (step, pytest.approx(value)) for step, value in points
                ]
        finally:
            server.terminate()


def fetch(address: str):
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


def figures_of(folder) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each figure in a run's metrics.jsonl."""
    figures = {}
    for line in lines(folder):
        for tag in line.keys() - {"step", "epoch", "samples"}:
            figures.setdefault(tag, []).append((line["step"], line[tag]))
    return figures
