"""Disks that fill up, vanish or are slow during a run."""

import os
import shutil
import subprocess
import threading
import time

import pytest
import saves
from runs import distance, outcome, run
from saves import SMALL

from lib.utils import preemption

pytestmark = pytest.mark.usefixtures("small_plugins")


@pytest.fixture
def disk(tmp_path):
    """A small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a disk cannot be mounted here: {tried.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk):
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))


def test_a_disk_that_stays_full_ends_the_run_and_the_older_checkpoint_is_good(disk, monkeypatch, finished_run, capfd):
    with monkeypatch.context() as patch:
        saves.after_step(patch, 5, lambda folder: fill(disk))
        with pytest.raises(RuntimeError, match=r"could not be saved .*No space left.*, nor could the 2 before it"):
            run(disk, f"{SMALL} -save_every 1steps -log_every 1")
    folder = disk / finished_run.name
    assert saves.steps(folder)[0] == 4
    assert outcome(folder)["state"] == "running", "there is no space for another outcome.json"
    assert "cannot be written (No space left" in saves.refused(disk, f"{SMALL} -model new", capfd)
    (disk / "filler").unlink()
    assert distance(run(disk, SMALL), finished_run) == 0.0


def test_a_run_whose_folder_is_moved_away_fails_with_the_reason_and_does_not_create_it_again(tmp_path, monkeypatch):
    folder = tmp_path / "out" / "few_norm_net"
    monkeypatch.setattr(preemption, "ASK_EVERY_S", 0.0)
    saves.after_step(monkeypatch, 5, lambda folder: folder.rename(tmp_path / "moved"))
    with pytest.raises((OSError, RuntimeError), match=f"No such file or directory: '{folder}/"):
        run(tmp_path / "out", SMALL)
    assert not folder.exists()


def test_a_slow_disk_is_no_hang_of_the_ranks_that_wait_for_it(tmp_path, monkeypatch, finished_run):
    """Once the disk of the writing rank takes longer than a process may wait for another one."""
    real, waits = os.fsync, [8]

    def fsync(fd):
        if threading.current_thread().name.startswith("checkpoint") and waits:
            time.sleep(waits.pop())
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = run(tmp_path, f"{SMALL} -cpu 2 -save_every 99epochs -hang_minutes 0.1")
    assert saves.steps(folder) == [12] and distance(folder, finished_run) == 0.0
