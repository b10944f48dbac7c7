"""The benchmark compares only runs that did the same work: every script reaches the loss of train.py."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import compare, samplers
from scripts.bench.compare import BATON, LIMIT, PLAIN, STOCK, Case, Options, Run

ROOT = Path(__file__).resolve().parents[3]
DIGITS = "-dataset digits -epochs 2"
ONE_THREAD = Options(threads=1)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> Run:
    return compare.run(PLAIN, DIGITS, tmp_path_factory.mktemp("plain"), ONE_THREAD)


def scripts_except(*names) -> list:
    """The scripts that are compared, but for those; they are skipped if their packages are missing."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason="its package is not installed"))
        for name in compare.SCRIPTS
        if name not in (*names, "composer")
    ]


def is_installed(name: str) -> bool:
    return name not in compare.PACKAGES or importlib.util.find_spec(compare.PACKAGES[name]) is not None


@pytest.mark.parametrize("name", scripts_except(PLAIN, STOCK))
def test_every_script_does_as_many_steps_and_reaches_the_loss_of_the_plain_script(name, plain_run, tmp_path):
    other = compare.run(name, DIGITS, tmp_path, ONE_THREAD)
    compare.check_equal({PLAIN: plain_run, name: other}, tolerance=0.05)
    assert other.step == 40 and 0 < other.figures["train_loss"] < 1.2
    if name != LIMIT:
        assert other.figures["val_loss"] == pytest.approx(plain_run.figures["val_loss"], rel=0.1)
        assert other.figures["val_accuracy"] > 0.9


@pytest.mark.parametrize("name", scripts_except(BATON, STOCK, LIMIT))
def test_every_script_resumes_from_its_own_checkpoint(name, tmp_path):
    for step in (2, 3):
        assert compare.run(name, f"-limit_steps {step}", tmp_path, ONE_THREAD).step == step


def test_a_table_is_printed_for_equal_runs_on_two_processes(monkeypatch, capsys):
    monkeypatch.setitem(compare.CASES, "small", Case("a small case", DIGITS))
    compare.main(["small", "-peers", "plain", "-procs", "2", "-rounds", "1"])
    printed = capsys.readouterr().out
    assert "`python scripts/bench/compare.py small -peers plain -procs 2 -rounds 1` on 20" in printed
    assert f"2 processes: `python train.py {DIGITS} -cpu 2`" in printed
    assert [line.split("|")[1].strip() for line in printed.splitlines()[-3:-1]] == [BATON, PLAIN]


def test_the_table_has_medians_ranges_and_the_ratio_of_each_round():
    def runs(seconds: list[float], step: int) -> list[Run]:
        return [Run(one, 7.0, step, {"train_loss": 0.5}) for one in seconds]

    found = {
        (BATON, "long"): runs([4.0, 6.0, 5.0], 300),
        (BATON, "short"): runs([3.0, 4.0, 4.0], 100),
        (PLAIN, "long"): runs([5.0, 5.0, 10.0], 300),
        (PLAIN, "short"): runs([3.0, 3.0, 6.0], 100),
    }
    lines = compare.table(Case("a case", "-seed 1", short="", long="-epochs 3"), Options(), found).splitlines()
    assert lines[0] == "a case, 1 process: `python train.py -seed 1 -epochs 3 -cpu 1`"
    assert lines[4] == "| Baton | 5.00 (4.00 to 6.00) | 0.80 | 7.00 | 5.00 (5.00 to 10.00) | 0.50 | 0.500 |  |"


def test_runs_that_did_different_work_are_not_compared():
    plain_run = Run(1.0, 1.0, 40, {"train_loss": 1.0})
    limit = Run(1.0, 1.0, 40, {"train_loss": 0.2})
    compare.check_equal({PLAIN: plain_run, BATON: Run(9.0, 9.0, 40, {"train_loss": 1.04}), LIMIT: limit}, 0.05)
    for other in (Run(1.0, 1.0, 39, {"train_loss": 1.0}), Run(1.0, 1.0, 40, {"train_loss": 1.06})):
        with pytest.raises(compare.Unequal, match="no comparison: Baton"):
            compare.check_equal({PLAIN: plain_run, BATON: other}, 0.05)


def test_scale_prints_a_table_for_each_part(tmp_path):
    parts = ["plan", "exchange", "meet", "checkpoint", "-ranks", "2", "3", "-tensors", "4"]
    command = [sys.executable, "scripts/bench/scale.py", *parts, "-folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    usual = ["ranks", "---", "2", "3"]
    assert rows == [*usual, *usual, *usual, "2", "3", "files", "---", "2", "3"], "meet has two ways to connect"
    assert not [*tmp_path.iterdir()]


def test_the_benchmark_of_the_samplers_runs_in_new_processes(tmp_path, capsys):
    samplers.main(["-n", "1e5", "-memory", "0.003", "-rounds", "1", "-json", str(tmp_path / "table.json")])
    mine, *others = json.loads((tmp_path / "table.json").read_text())
    for seconds, megabytes in (mine["first"], mine["resume"]):
        assert seconds < 20 and megabytes < 10
    assert [other["reason"] for other in others] == ["does not fit"] * 3
    assert len(capsys.readouterr().out.splitlines()) == 5
