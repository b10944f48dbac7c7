"""Atomic writing: whatever call of a save is the last, the old or new state is complete, and the next save works."""

import contextlib
import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import crash
import disk
import pytest
import torch

from lib.utils.checkpoint import atomic
from lib.utils.compat import atomic_directory

pytestmark = pytest.mark.usefixtures("no_fsync")
ROOT = Path(__file__).resolve().parents[3]
OLD, NEW, NEWER = 8, 9, 10  # steps; sorted as strings, the last is the first


class File:
    """One of two ways to save, with save(folder, step) and found(folder), the step that a reader gets: a file."""

    def save(self, folder, step):
        atomic.write_file(folder / "state.txt", "\n".join([f"{step}"] * 5000))

    def found(self, folder):
        steps = (folder / "state.txt").read_text().split("\n")
        assert len(steps) == 5000 and len(set(steps)) == 1
        return int(steps[0])


class Directory:
    """The class of cycling_utils, read as its documentation says: a file, in a folder, behind a link."""

    def save(self, folder, step):
        saver = atomic_directory.AtomicDirectory(folder, is_master=True, keep_last=1)
        path = saver.prepare_checkpoint_directory()
        atomic_directory.atomic_torch_save(
            {"step": step, "weights": torch.full((9999,), step)}, f"{path}/checkpoint.pt"
        )
        saver.symlink_latest(path)

    def found(self, folder):
        latest = (folder / "AtomicDirectory.latest_checkpoint").readlink()
        checkpoint = torch.load(latest / "checkpoint.pt")
        assert (checkpoint["weights"] == checkpoint["step"]).all()
        return checkpoint["step"]


# A whole checkpoint, which is made of files and folders, is cut in test_crash_states.
KINDS = pytest.mark.parametrize("kind", [File(), Directory()], ids=["file", "directory"])


def prepare(kind, tmp_path):
    """A folder with the old state, and a function that saves the new one."""
    folder = tmp_path / "out"
    folder.mkdir()
    kind.save(folder, OLD)
    return folder, lambda: kind.save(folder, NEW)


def wrong_after(cut, kind, folder):
    """What is wrong after a cut: a lost state, or a next save that fails or leaves files. None if all is well."""
    try:
        step = kind.found(folder)
        assert step == NEW if cut.finished else step in (OLD, NEW)
        kind.save(folder, NEWER)
        assert kind.found(folder) == NEWER
        atomic.sweep(folder)
        assert not [name for name in disk.read_tree(folder) if name.endswith(".partial")]
    except (AssertionError, OSError, ValueError, RuntimeError, EOFError, IndexError, TypeError) as error:
        return f"{cut.what}: {type(error).__name__} {error}"


@KINDS
def test_a_save_that_is_killed_at_any_call_or_loses_power_leaves_the_old_or_new_state(kind, tmp_path):
    folder, save = prepare(kind, tmp_path)
    cuts = itertools.chain(crash.kills(save, folder), crash.power_loss_states(save, folder))
    assert not [wrong for cut in cuts if (wrong := wrong_after(cut, kind, folder))]
    assert kind.found(folder) == OLD  # the folder was restored


@KINDS
def test_any_call_of_a_save_may_fail_once_or_from_then_on(kind, tmp_path):
    folder, save = prepare(kind, tmp_path)
    cuts = itertools.chain(crash.failures(save, folder), crash.failures(save, folder, lasting=True))
    assert not [wrong for cut in cuts if (wrong := wrong_after(cut, kind, folder))]


def test_two_simultaneous_writers_of_a_file_do_not_mix_their_content(tmp_path):
    path = tmp_path / "state"
    with atomic.new_version(path) as partial:
        partial.write_bytes(b"slow")
        atomic.write_file(path, b"quick")
        assert path.read_bytes() == b"quick"
    assert path.read_bytes() == b"slow" and list(tmp_path.iterdir()) == [path]


def test_sweep_removes_files_left_by_crashes_and_nothing_else(tmp_path):
    left = ["a.1.partial", "step_3.partial/x", "step_1.partial/y/z"]
    others = ["step_2/m", "partial/m", "b.partial.txt"]
    for name in left + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "latest.1.ab.partial").symlink_to("step_2")
    atomic.sweep(tmp_path, start="a.")
    assert not (tmp_path / "a.1.partial").exists() and (tmp_path / "step_3.partial").exists()
    atomic.sweep(tmp_path)
    assert set(disk.read_tree(tmp_path)) == {"step_2", "partial", *others}


def test_publish_does_not_overwrite_a_folder(tmp_path):
    (tmp_path / "step_1" / "x").mkdir(parents=True)
    (tmp_path / "step_1.partial").mkdir()
    with pytest.raises(OSError, match="not empty"):
        atomic.publish(tmp_path / "step_1.partial", tmp_path / "step_1")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_folder_without_fsync_support_is_no_error_and_a_broken_disk_is(code, tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(code, "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="fsync") if code == errno.EIO else contextlib.nullcontext():
        atomic.fsync(tmp_path)


@pytest.mark.parametrize(
    ("modules", "avoided"),
    [("atomic", "torch"), ("manager, resume, shards, weights", "torch.distributed.tensor")],
)
def test_files_are_written_without_torch(modules, avoided):
    """And checkpoints without the tensors of FSDP, whose import takes long."""
    probe = f"import sys; from lib.utils.checkpoint import {modules}; sys.exit({avoided!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True, timeout=120)
