"""scripts/status.py shows the true state of each run, also of runs that can no longer report it."""

import io
import json
import os
import re

import pytest
from processes import until
from runs import run

from lib.utils.checkpoint import run_folder
from scripts import reading, status

FLAGS = "-cpu 1 -arch mlp -epochs 2 -log_every 5"


def rows(out) -> dict[str, dict]:
    return {folder.name: status.row(folder) for folder in reading.folders(out)}


def test_finished_stopped_and_failed_runs_are_shown_with_their_reasons(tmp_path):
    finished = run(tmp_path, f"{FLAGS} -model whole")
    run(tmp_path, f"{FLAGS} -model short -limit_steps 7", wanted=75)
    with pytest.raises(RuntimeError, match="without a finite gradient"):
        run(tmp_path, f"{FLAGS} -model bad -lr_start 1e30 -max_bad_steps 1")
    (tmp_path / "no_run").mkdir()
    found = rows(tmp_path)
    states = {name: one["state"] for name, one in found.items()}
    assert states == {"bad": "failed", "short": "stopped", "whole": "finished"}
    assert [found["whole"][name] for name in ("epoch", "step", "why", "job")] == ["2/2", "40/40", "", ""]
    assert found["short"]["why"] == "-limit_steps 7 is reached" and "without a finite" in found["bad"]["why"]
    (finished / ".lock").write_text(json.dumps({**run_folder.read_json(finished / ".lock"), "job": "4711"}))
    assert rows(tmp_path)["whole"]["job"] == "4711"
    saved_best = run_folder.read_json(finished / "outcome.json")["best"]
    assert found["whole"]["best"] == f"accuracy {saved_best['value']:.4g}"
    assert found["whole"]["speed"].endswith("/s") and float(found["whole"]["loss"]) > 0
    assert not found["whole"]["left"] and found["whole"]["seen"].endswith("ago")
    long = [{**row, "run": f"{'name_' * 19}{row['run']}", "left": "1:02:03"} for row in found.values()]
    lines = status.table(long, width=80).splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].startswith("no room for host, ")
    assert re.search(r"^name_.*\.\..*name_short +stopped .*\n  -limit_steps 7 is reached$", "\n".join(lines), re.M)
    assert all(row["run"] in status.table(long) for row in long), "-wide shows all"
    for end in ("", "x" * 40):  # with it no cut leaves them different
        names = [f"sweep_lr_start_{lr}_mlp_width_{n}_seed_2{end}" for lr in ("1e-3", "3e-3") for n in (8, 16)]
        text = status.table([{**found["whole"], "run": name} for name in names], width=80)
        assert len(set(re.findall(rf"_(1e|3e)-3_\S*_(8|16)_\S*{end}\s+finished", text))) == 4


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("\n", False), ("", False)])
def test_old_runs_are_deleted_only_after_confirmation(answer, gone, tmp_path, monkeypatch, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "outcome.json").write_text("{}")
    assert status.main([str(tmp_path), "-delete"]) == 0 and "no old runs" in capsys.readouterr().out
    old = tmp_path / ".old" / "x-20260101-120000-abcdef"
    old.mkdir(parents=True)
    (old / "file").write_bytes(bytes(2_000_000))
    (old.parent / ".DS_Store").touch()
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert status.main([str(tmp_path), "-delete"]) == 0
    assert "x-20260101-120000-abcdef  0.002 GB" in capsys.readouterr().out
    assert old.exists() is not gone and (tmp_path / "x" / "outcome.json").exists()


def test_a_run_is_shown_as_running_and_after_a_kill_as_lost(start):
    one = start("live", "-epochs", "5000", "-log_every", "5", cpu=2)
    until(lambda: one.folder.is_dir() and " ago" in rows(one.folder).get("live", {}).get("saved", ""))
    row = rows(one.folder)["live"]
    assert row["state"] == "running" and row["epoch"].endswith("/5000") and row["host"] == os.uname().nodename
    assert reading.is_locked(one.folder), "reading the status neither takes nor releases the lock"
    one.end()
    one.wait_until_gone()
    assert run_folder.read_json(one.folder / "outcome.json")["state"] == "running"
    assert rows(one.folder)["live"]["state"] == "lost" and not rows(one.folder)["live"]["left"]
