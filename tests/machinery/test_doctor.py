"""scripts/doctor.py says whether a run would start, and what stands in its way."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import parsed
from processes import CLEAN
from runs import run

from scripts import doctor

ROOT = Path(__file__).resolve().parents[2]
LISTED = "general: 2 nodes up, each 16 CPUs, 64000 MB, gpu:4; limit infinite"


def examined(*words, code, **env) -> list[str]:
    run = subprocess.run(
        [sys.executable, "scripts/doctor.py", *words],
        cwd=ROOT,
        env={**CLEAN, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout.splitlines()


def found(check, words="") -> list[tuple[str, str]]:
    return list(doctor.guarded(check, parsed(words)))


def test_a_machine_that_trains_is_said_to_and_nothing_is_left_there(tmp_path):
    lines = examined("-cpu", "2", "-out", str(tmp_path / "out"), code=0)
    assert lines[-1] == "a run would start" and {line[:6] for line in lines[:-2]} <= {"ok    ", "note  "}
    text = "\n".join(lines)
    parts = ["Python 3", "torch 2", "all-reduce over two processes on the CPU by gloo adds up", "2 processes here"]
    parts += ["shared memory", "open files", "1,259 train", "parameters", "GB free", "several machines"]
    assert [part for part in parts if part not in text] == []
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_is_bad_and_decides_the_exit_code(tmp_path):
    lines = examined("-out", "/proc/out", "-data", str(tmp_path), code=1, GLOO_SOCKET_IFNAME="nothing0")
    bad = [line for line in lines if line.startswith("bad")]
    assert lines[-1].startswith("a run would not start") and len(bad) == 4
    assert "all-reduce" in bad[0] and f"-data {tmp_path}" in bad[1] and "cannot be written" in bad[2]
    assert bad[3].startswith("bad   GLOO_SOCKET_IFNAME=nothing0 is not one of the interfaces here: ")
    assert examined("-epoch", "3", code=2) == []


def test_what_train_py_would_refuse_is_bad(tmp_path, monkeypatch):
    def bad(check, words):
        return [text for level, text in found(check, f"{words} -out {tmp_path}") if level == "bad"]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "-batch_size 2 has not a sample for each of 3 processes" in bad(doctor.data, "-batch_size 2 -cpu 3")[0]
    assert "-micro_batch 24" in bad(doctor.data, "-cpu 1 -micro_batch 24")[0]
    assert "no GPU is visible here" in bad(doctor.devices, "-gpus 0")[0]
    assert "-weights nosuch: cannot be read" in bad(doctor.room, "-cpu 1 -weights nosuch")[0]
    words = "-arch mlp -cpu 1 -epochs 1"
    run(tmp_path, f"{words} -limit_steps 1", wanted=75)
    assert bad(doctor.room, f"{words} -weights nosuch") == [], "a run that goes on has its own"
    assert bad(doctor.data, words) == [] and "-epochs was 1 and is 2" in bad(doctor.data, f"{words} -epochs 2")[0]


def test_little_room_for_loaders_and_checkpoints_is_told_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (1024, 1024))
    assert [level for level, _ in found(doctor.limits)] == ["ok", "ok"]
    message = found(doctor.limits, "-workers 4")
    assert [level for level, _ in message] == ["note", "note"]
    assert "--shm-size" in message[0][1] and "ulimit -n 65536" in message[1][1]
    assert found(doctor.room, f"-out {tmp_path}")[-1][0] == "note", "one checkpoint fits, three do not"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100_000))
    assert found(doctor.room, f"-out {tmp_path}")[-1][0] == "bad"


def test_packages_that_are_missing_or_old_are_bad(monkeypatch):
    real = doctor.importlib.metadata.version

    def version(name):
        if name == "tqdm":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "1.2.3+cu1" if name == "torch" else real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    bad = [text for level, text in found(doctor.versions) if level == "bad"]
    assert (
        len(bad) == 2 and bad[0].startswith("torch 1.2.3+cu1 is older than") and bad[1].startswith("tqdm is missing")
    )


def test_slurms_partitions_are_shown_and_a_wrong_one_is_found(tmp_path, monkeypatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\necho '{LISTED}'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert found(doctor.slurm, "-slurm -slurm_partition general") == [("ok", f"Slurm partition {LISTED}")]
    assert found(doctor.slurm, "-slurm -slurm_partition other")[1:] == [
        ("bad", "-slurm_partition other: there are general")
    ]
    sinfo.write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    assert found(doctor.slurm) == [("note", "sinfo does not answer: no controller")]
    assert found(doctor.slurm, "-slurm")[0][0] == "bad"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert [found(doctor.slurm, words)[0][0] for words in ("", "-slurm")] == ["ok", "bad"]


@pytest.mark.parametrize(("host", "level"), [("localhost", "note"), ("no-such-host.invalid", "note")])
def test_a_name_that_others_could_not_reach_is_told(monkeypatch, host, level):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: host)
    [(said, text)] = found(doctor.network)
    assert said == level and host in text and "/etc/hosts" in text
    assert host != "localhost" or "at localhost, 127.0.0.1, lo;" in text
