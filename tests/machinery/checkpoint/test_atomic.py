"""Atomic writing of files and folders. Whole saves are cut short at each of their calls in test_crash_states."""

import contextlib
import errno
import os

import disk
import pytest

from lib.utils.checkpoint import atomic

pytestmark = pytest.mark.usefixtures("no_fsync")


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


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_folder_without_fsync_support_is_no_error_and_a_broken_disk_is(code, tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(code, "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="fsync") if code == errno.EIO else contextlib.nullcontext():
        atomic.fsync(tmp_path)
