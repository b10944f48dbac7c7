"""scripts/doctor.py reports whether a run would start, and what prevents it."""

import re
import subprocess
import sys

from command_line import parsed
from processes import CLEAN, ROOT

from scripts import doctor


def run_doctor(*flags, code, **env) -> list[str]:
    command, env = [sys.executable, "scripts/doctor.py", *flags], {**CLEAN, "COLUMNS": "80", **env}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == code, run.stdout + run.stderr
    assert all(len(line) <= 80 or " " not in line[6:] for line in run.stdout.splitlines()), "80 columns"
    return re.sub(r"\n {6}", " ", run.stdout).splitlines()


def test_a_machine_that_can_train_passes_and_no_file_is_left(tmp_path):
    lines = run_doctor("-cpu", "2", "-out", str(tmp_path / "out"), code=0)
    assert lines[-1] == "a run would start" and {line[:6] for line in lines[:-2]} <= {"ok    ", "note  "}
    text = "\n".join(lines)
    parts = ["Python 3", "torch 2", "all-reduce over two processes on the CPU by gloo adds up", "2 processes here"]
    parts += ["shared memory", "open files", "1,259 train", "parameters", "GB free", "several machines"]
    assert [part for part in parts if part not in text] == [] and not list(tmp_path.iterdir())


def test_whatever_prevents_a_run_is_bad_and_makes_the_exit_code_1(tmp_path):
    env = {"NCCL_SOCKET_IFNAME": "nothing0", "GLOO_DEVICE_TRANSPORT": "nothing"}
    lines = run_doctor("-out", "/proc/out", "-data", str(tmp_path), "-mirror", "nowhere://a/b", code=1, **env)
    bad = [line for line in lines if line.startswith("bad")]
    assert lines[-1].startswith("a run would not start") and len(bad) == 5
    assert "all-reduce" in bad[0] and f"-data {tmp_path}" in bad[1] and "cannot be written" in bad[2]
    assert bad[3] == "bad   -mirror nowhere://a/b: Protocol not known: nowhere"
    assert bad[4].startswith("bad   NCCL_SOCKET_IFNAME=nothing0 is not one of the interfaces here: ")
    assert run_doctor("-epoch", "3", code=2) == run_doctor("-loss", "none", code=2) == []


def test_the_optimizers_options_are_tried_and_any_error_of_a_plugin_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.reading, "is_locked", lambda folder: True)
    args = parsed(["-optimizer_arg", "no=1", "-out", str(tmp_path), "-cpu", "1", "-best", "val_x/f1"])
    used, option = [text for level, text in doctor.guarded(doctor.room, args) if level == doctor.BAD]
    assert "is in use by another run" in used and "unexpected keyword argument 'no'" in option
    assert (doctor.BAD, "-best val_x/f1: there is no val_x, but val") in doctor.guarded(doctor.data, args)
    assert next(doctor.guarded(lambda args: 1 / 0, args))[1].endswith(": ZeroDivisionError: division by zero")
