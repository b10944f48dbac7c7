"""A save that is cut short at any file-system call leaves the old or the new state; the next start and save work."""

import contextlib
import errno
import itertools
import os
import shutil
from unittest import mock

import crash
import disk
import pytest
import saves
import torch
from safetensors import SafetensorError

from lib.utils.checkpoint import atomic, shards, weights

pytestmark = pytest.mark.usefixtures("no_fsync")
OLD, NEW, NEWER = 8, 9, 10  # sorted as strings, the last is the first


class Case:
    """A save, and the state before it."""

    def __init__(self, old=OLD, new=NEW, keep_last=1, keep=False, best=False):
        self.old, self.new, self.options, self.keep = old, new, {"keep_last": keep_last}, keep
        self.best = best  # each save has better weights than the one before

    def prepare(self, tmp_path):
        folder = tmp_path / "run"
        folder.mkdir()
        if self.old is not None:
            self.save(folder, self.old)
        return folder

    def save(self, folder, step):
        checkpoints = saves.new_checkpoints(folder, **self.options)
        checkpoints.best = {"of_step": torch.tensor(step)} if self.best else None
        checkpoints.save(saves.state(step), saves.facts(step), step=step % 5, keep=self.keep)
        checkpoints.close()

    def wrong_after(self, cut, folder):
        try:
            found = saves.newest(folder)
            assert found == self.new if cut.finished else found in (self.old, self.new), f"{found} found"
            best = shards.read_weights(folder / "best" / weights.FILE)["of_step"] if self.best else found
            assert best in (found, self.new), f"the best weights are those of {best}, the checkpoint is of {found}"
            if best != found:
                with pytest.raises(shards.Damaged, match=f"is of step {best}, not of step {found}"):
                    shards.read_weights(folder / "best" / weights.FILE, found)
            for name in saves.names(folder):
                saves.tensors(folder / "checkpoints" / name)
            self.save(folder, NEWER)
            assert saves.newest(folder) == NEWER
            saves.new_checkpoints(folder)
            left = [name for name in disk.read_tree(folder) if name.endswith(".partial")]
            assert not left, left
        except (AssertionError, OSError, RuntimeError, SafetensorError, shards.Damaged) as error:
            return f"{cut.what}: {type(error).__name__} {error}"


CASES = {
    "the old one of the same step is removed": Case(OLD, OLD + 5),
    "the first save": Case(None),
    "a milestone next to the old one": Case(keep_last=2, keep=True),
    "better weights than those of the old one": Case(best=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_save_that_is_killed_fails_or_loses_power_leaves_the_old_or_the_new_checkpoint(name, tmp_path):
    case = CASES[name]
    folder = case.prepare(tmp_path)
    ways = (crash.kills, crash.failures, crash.power_loss_states)
    cuts = itertools.chain.from_iterable(way(lambda: case.save(folder, case.new), folder) for way in ways)
    outcomes = [case.wrong_after(cut, folder) for cut in cuts]
    assert not [wrong for wrong in outcomes if wrong] and len(outcomes) >= 55


def test_after_starts_that_are_killed_during_their_cleanup_a_later_start_completes_it(tmp_path):
    case = Case()
    folder = case.prepare(tmp_path)
    save = lambda: case.save(folder, NEW)  # noqa: E731
    crash.kill_at(save, folder, number=len(crash.points(save, folder)) - 1)
    for name in ("000099_step_99.partial", "000001_step_1.partial"):
        shutil.copytree(folder / "checkpoints" / saves.names(folder)[0], folder / "checkpoints" / name)
    for cut in crash.kills(lambda: saves.new_checkpoints(folder), folder):
        assert not case.wrong_after(cut, folder)


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
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(code, "fsync")))
    with pytest.raises(OSError, match="fsync") if code == errno.EIO else contextlib.nullcontext():
        atomic.fsync(tmp_path)
