"""Links that survive copies, and AtomicDirectory on one and two processes: names, retention, errors on all ranks."""

import errno
import itertools
import os
import time
from pathlib import Path
from unittest import mock

import crash
import disk
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from lib.utils.checkpoint import atomic
from lib.utils.compat.atomic_directory import AtomicDirectory, atomic_torch_save

OLD, NEW, NEWER = 8, 9, 10  # steps; sorted as strings, the last is the first


def save(saver, force=False):
    path = saver.prepare_checkpoint_directory(force_save=force)
    Path(path, f"shard_{saver.world.rank}").write_text("x")
    saver.symlink_latest(path)
    return Path(path).name


def kept_numbers(folder):
    names = [entry.name for entry in folder.glob("AtomicDirectory_checkpoint_*")]
    return sorted(name.removeprefix("AtomicDirectory_checkpoint_") for name in names)


def latest(saver):
    return Path(os.readlink(os.path.join(saver.output_directory, saver.symlink_name)))  # noqa: PTH115, PTH118


def test_checkpoints_are_numbered_linked_and_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver = AtomicDirectory("out/run", is_master=True)
    assert saver.symlink_name == "AtomicDirectory.latest_checkpoint"
    assert not os.path.exists(os.path.join("out/run", saver.symlink_name))  # noqa: PTH110, PTH118
    path = saver.prepare_checkpoint_directory()
    assert isinstance(path, str) and os.listdir(path) == []  # noqa: PTH208
    atomic_torch_save({"epoch": 3}, f"{path}/checkpoint.pt")
    monkeypatch.chdir("/")
    saver.symlink_latest(path)
    assert torch.load(latest(saver) / "checkpoint.pt") == {"epoch": 3}
    assert [save(saver) for _ in range(11)][-1] == "AtomicDirectory_checkpoint_11"
    again = AtomicDirectory(tmp_path / "out/run", is_master=True)
    assert save(again) == latest(again).name == "AtomicDirectory_checkpoint_12"
    assert len(kept_numbers(tmp_path / "out/run")) == 13


def test_the_last_checkpoints_and_all_forced_ones_are_kept(tmp_path):
    saver = AtomicDirectory(tmp_path, is_master=True, keep_last=2)
    for step in range(12):
        save(saver, force=step in (1, 4))
        assert len(kept_numbers(tmp_path)) <= 4
    assert kept_numbers(tmp_path) == ["10", "11", "1_force", "4_force"]
    last = AtomicDirectory(tmp_path, is_master=True, keep_last=1)
    last.prepare_checkpoint_directory()
    assert latest(last).is_dir()  # until the next one is complete
    assert [save(last) for _ in range(2)] and kept_numbers(tmp_path) == ["13", "1_force", "4_force"]


def test_incomplete_checkpoints_are_removed(tmp_path):
    saver = AtomicDirectory(tmp_path, is_master=True)
    for _ in range(2):
        path = saver.prepare_checkpoint_directory(force_save=True)
        assert path.endswith("_checkpoint_0_force")
        Path(path, "half").write_text("")
    assert save(saver) == "AtomicDirectory_checkpoint_0"
    Path(saver.prepare_checkpoint_directory(), "half").write_text("")
    (tmp_path / "AtomicDirectory.latest_checkpoint_temp").symlink_to("a saver of another make was killed")
    (tmp_path / "AtomicDirectory_checkpoint_7").mkdir()
    (tmp_path / "Other_checkpoint_7.partial").mkdir()
    assert save(AtomicDirectory(tmp_path, is_master=True)) == "AtomicDirectory_checkpoint_1"
    assert kept_numbers(tmp_path) == ["0", "1"] and (tmp_path / "Other_checkpoint_7.partial").exists()
    with pytest.raises(FileNotFoundError):
        saver.symlink_latest(tmp_path / "Other_checkpoint_7.partial")


def save_step(folder, step):
    saver = AtomicDirectory(folder, is_master=True, keep_last=1)
    path = saver.prepare_checkpoint_directory()
    atomic_torch_save({"step": step, "weights": torch.full((9999,), step)}, f"{path}/checkpoint.pt")
    saver.symlink_latest(path)


def found_step(folder):
    """The step that a reader gets who follows the link, as the documentation of cycling_utils says."""
    checkpoint = torch.load((folder / "AtomicDirectory.latest_checkpoint").readlink() / "checkpoint.pt")
    assert (checkpoint["weights"] == checkpoint["step"]).all()
    return checkpoint["step"]


def test_a_save_that_is_killed_at_any_call_or_loses_power_leaves_the_old_or_new_state(tmp_path, no_fsync):
    """A whole checkpoint of a run is cut in checkpoint/test_crash_states."""
    folder, save = tmp_path / "out", lambda: save_step(tmp_path / "out", NEW)
    folder.mkdir()
    save_step(folder, OLD)
    for cut in itertools.chain(crash.kills(save, folder), crash.power_loss_states(save, folder)):
        step = found_step(folder)
        assert step == NEW if cut.finished else step in (OLD, NEW), cut.what
        save_step(folder, NEWER)
        assert found_step(folder) == NEWER, cut.what
        assert not [name for name in disk.read_tree(folder) if name.endswith(".partial")], cut.what


def test_two_ranks_share_folders_and_an_error_on_one_is_raised_on_both(tmp_path):
    def run(rank):
        for check in (_check_forced_saves, _check_failing_saves, _check_async):
            check(rank, tmp_path / check.__name__)

    torch.set_num_threads(1)
    on_ranks(2, run, tmp_path)


def _check_forced_saves(rank, folder):
    for strategy, wanted in (("sync_any", ["0", "1_force", "2_force"]), ("sync_all", ["0", "1", "2_force"])):
        saver = AtomicDirectory(folder / strategy, is_master=rank == 1, strategy=strategy)
        for step in range(3):
            path = Path(saver.prepare_checkpoint_directory(force_save=step > rank))  # rank 1 forces later than rank 0
            time.sleep(0.05 * rank)
            (path / f"shard_{rank}").write_text(f"{step}")
            saver.symlink_latest(path)
            assert latest(saver) == path
            assert sorted(file.name for file in path.iterdir()) == ["shard_0", "shard_1"]
        assert kept_numbers(folder / strategy) == wanted


def _check_failing_saves(rank, folder):
    saver = AtomicDirectory(folder, is_master=rank == 0)
    first = save(saver)
    for place, owner, name in ((0, atomic, "write_file"), (1, atomic, "fsync"), (0, Path, "symlink_to")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="says the test") as message:
            if rank == place:
                patch.setattr(owner, name, mock.Mock(side_effect=OSError(errno.ENOSPC, "full, says the test")))
            save(saver)
        assert rank == place or f"rank {place}: " in str(message.value)
        assert latest(saver).name == first
    assert save(saver) == latest(saver).name == "AtomicDirectory_checkpoint_1"


def _check_async(rank, folder):
    saver = AtomicDirectory(folder, is_master=True, strategy="async", keep_last=1)
    assert saver.symlink_name == f"AtomicDirectory_rank_{rank}.latest_checkpoint"
    for step in range(1 + 2 * rank):  # a different number on each rank
        save(saver, force=step == 1)
    dist.barrier()
    left = sorted(entry.name.split("_checkpoint_")[1] for entry in folder.glob("*_rank_1_checkpoint_*"))
    assert left == ["1_force", "2"]
    assert latest(saver).name == f"AtomicDirectory_rank_{rank}_checkpoint_{2 * rank}"
