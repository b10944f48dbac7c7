"""scripts/doctor.py reports whether a run would start, and what prevents it."""

import subprocess
import sys

import torch
from command_line import parsed
from processes import CLEAN, ROOT
from runs import run

from scripts import doctor


def run_doctor(*flags, code, **env) -> list[str]:
    command, env = [sys.executable, "scripts/doctor.py", *flags], {**CLEAN, **env}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout.splitlines()


def findings(check, flags="") -> list[tuple[str, str]]:
    return list(doctor.guarded(check, parsed(flags)))


def test_a_machine_that_can_train_passes_and_no_file_is_left(tmp_path):
    lines = run_doctor("-cpu", "2", "-out", str(tmp_path / "out"), code=0)
    assert lines[-1] == "a run would start" and {line[:6] for line in lines[:-2]} <= {"ok    ", "note  "}
    text = "\n".join(lines)
    parts = ["Python 3", "torch 2", "all-reduce over two processes on the CPU by gloo adds up", "2 processes here"]
    parts += ["shared memory", "open files", "1,259 train", "parameters", "GB free", "several machines"]
    assert [part for part in parts if part not in text] == []
    assert not list(tmp_path.iterdir())


def test_whatever_prevents_a_run_is_bad_and_makes_the_exit_code_1(tmp_path):
    lines = run_doctor("-out", "/proc/out", "-data", str(tmp_path), code=1, GLOO_SOCKET_IFNAME="nothing0")
    bad = [line for line in lines if line.startswith("bad")]
    assert lines[-1].startswith("a run would not start") and len(bad) == 4
    assert "all-reduce" in bad[0] and f"-data {tmp_path}" in bad[1] and "cannot be written" in bad[2]
    assert bad[3].startswith("bad   GLOO_SOCKET_IFNAME=nothing0 is not one of the interfaces here: ")
    assert run_doctor("-epoch", "3", code=2) == []


def test_errors_of_train_py_are_found(tmp_path, monkeypatch):
    def bad(check, flags):
        return [text for level, text in findings(check, f"{flags} -out {tmp_path}") if level == "bad"]

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "-batch_size 2 has not a sample for each of 3 processes" in bad(doctor.data, "-batch_size 2 -cpu 3")[0]
    assert "-micro_batch 24" in bad(doctor.data, "-cpu 1 -micro_batch 24")[0]
    assert "cannot use the GPUs" in bad(doctor.devices, "-gpus 0")[0]
    assert "-weights nosuch: cannot be read" in bad(doctor.room, "-cpu 1 -weights nosuch")[0]
    flags = "-arch mlp -cpu 1 -epochs 1"
    run(tmp_path, f"{flags} -limit_steps 1", wanted=75)
    assert bad(doctor.room, f"{flags} -weights nosuch") == [], "a run that resumes does not read -weights"
    assert bad(doctor.data, flags) == [] and "-epochs was 1 and is 2" in bad(doctor.data, f"{flags} -epochs 2")[0]
