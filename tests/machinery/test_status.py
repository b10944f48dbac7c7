"""scripts/status.py says of each run what is true, also of those that cannot say it themselves any more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import CLEAN, until
from runs import run

from lib.launch import requeue
from lib.utils.checkpoint import run_folder
from scripts import reading, status

ROOT = Path(__file__).resolve().parents[2]
WORDS = "-cpu 1 -arch mlp -epochs 2 -log_every 5"


def rows(out) -> dict[str, dict]:
    return {folder.name: status.row(folder) for folder in reading.folders(out)}


def test_runs_are_shown_as_what_they_are(tmp_path):
    finished = run(tmp_path, f"{WORDS} -model whole")
    run(tmp_path, f"{WORDS} -model short -limit_steps 7", wanted=75)
    with pytest.raises(RuntimeError, match="without a finite gradient"):
        run(tmp_path, f"{WORDS} -model bad -lr_start 1e30 -max_bad_steps 1")
    (tmp_path / "no_run").mkdir()
    found = rows(tmp_path)
    assert {name: one["state"] for name, one in found.items()} == {
        "bad": "failed", "short": "stopped", "whole": "finished",
    }  # fmt: skip
    assert (found["whole"]["epoch"], found["whole"]["step"], found["whole"]["why"]) == ("2/2", "40/40", "")
    assert found["short"]["why"] == "-limit_steps 7 is reached" and "gradient" in found["bad"]["why"]
    assert found["whole"]["job"] == ""
    (finished / ".lock").write_text(json.dumps({**run_folder.read_json(finished / ".lock"), "job": "4711"}))
    assert rows(tmp_path)["whole"]["job"] == "4711"
    noted = run_folder.read_json(finished / "outcome.json")["best"]
    assert found["whole"]["best"] == f"accuracy {noted['value']:.4g}"
    assert found["whole"]["speed"].endswith("/s") and float(found["whole"]["loss"]) > 0
    assert not found["whole"]["left"] and found["whole"]["seen"].endswith("ago")


def test_a_run_whose_job_waits_for_its_requeue_goes_on(tmp_path, monkeypatch):
    folder = run(tmp_path, f"{WORDS} -model short -limit_steps 7", wanted=75)
    (folder / "slurm").mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    history = folder / "slurm" / "12.json"
    requeue.begin(history, folder, 3)
    assert status.row(folder)["state"] == "stopped"
    facts = requeue.read(history)
    facts["starts"][-1]["requeued"] = "time limit"
    requeue.write(history, facts)
    assert (status.row(folder)["state"], status.row(folder)["why"]) == (
        "requeued", "time limit: job 12 goes on by itself",
    )  # fmt: skip
    squeue = tmp_path / "squeue"
    for said, state in (("echo PENDING", "requeued"), ("exit 0", "stopped"), ("exit 1", "requeued"),
                        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "stopped")):  # fmt: skip
        squeue.write_text(f"#!/bin/sh\n{said}\n")
        squeue.chmod(0o755)
        assert status.row(folder)["state"] == state
    squeue.unlink()
    (folder / "outcome.json").touch()
    assert status.row(folder)["state"] == "stopped", "it was started by hand since"


def test_a_run_is_running_until_it_is_killed_and_then_lost(start):
    one = start("live", "-epochs", "5000", "-log_every", "5", cpu=2)
    until(lambda: one.folder.is_dir() and rows(one.folder).get("live", {}).get("left"))
    row = rows(one.folder)["live"]
    assert row["state"] == "running" and row["epoch"].endswith("/5000") and row["host"] == os.uname().nodename
    assert reading.held(one.folder), "looking has not taken the lock, nor freed it"
    one.end()
    one.is_gone()
    assert run_folder.read_json(one.folder / "outcome.json")["state"] == "running"
    assert rows(one.folder)["live"]["state"] == "lost" and not rows(one.folder)["live"]["left"]


def test_where_locks_do_not_work_a_run_that_keeps_silent_is_said_to(tmp_path, monkeypatch):
    folder = run(tmp_path, f"{WORDS} -model whole")
    outcome = folder / "outcome.json"
    outcome.write_text(outcome.read_text().replace("finished", "running"))
    monkeypatch.setattr(reading, "held", lambda _: None)
    assert status.row(folder)["state"] == "running"
    for file in (outcome, folder / "metrics.jsonl", folder / "logs" / "rank_0.log", folder / ".lock"):
        os.utime(file, (0, time.time() - 3 * 3600))
    assert (status.row(folder)["state"], status.row(folder)["seen"]) == ("silent", "3 h ago")


def test_lines_that_are_being_written_and_files_that_are_missing_harm_nothing(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "outcome.json").write_text('{"state": "run')
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n{"step": 2, "tra')
    assert rows(tmp_path)["odd"]["state"] == "unknown" and rows(tmp_path)["odd"]["loss"] == "2.5"
    assert status.table(list(rows(tmp_path).values())).startswith("run  state")
    assert status.table([]) == "no runs here"


def test_watch_shows_the_table_again_until_it_is_stopped(tmp_path):
    run(tmp_path, f"{WORDS} -model whole -limit_steps 3", wanted=75)
    log = tmp_path / "log"
    words = [sys.executable, "scripts/status.py", str(tmp_path), "-watch", "0.1"]
    with log.open("w") as file, subprocess.Popen(words, cwd=ROOT, env=CLEAN, stdout=file, stderr=file) as process:
        until(lambda: log.read_text().count("stopped") >= 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "Traceback" not in log.read_text()


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        status.main([str(tmp_path / "nothing")])
    assert end.value.code == 2 and capsys.readouterr().err.startswith("status.py: ")
