"""Damaged files, failed saves, full and slow disks: the older checkpoint is used, and the log says so."""

import errno
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import saves
from disk import fail_writes
from runs import distance, outcome, run
from saves import SMALL, all_entries, log_of, names

from lib.utils import files
from lib.utils.checkpoint import resume, shards, state

pytestmark = pytest.mark.usefixtures("small_plugins")


def test_every_one_of_500_flipped_bits_and_50_truncations_is_detected(copy):
    newest, before = names(copy)[:2]
    folder, draw = copy / "checkpoints" / newest, random.Random(0)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 2
    for number in range(550):
        path = draw.choice([*files])
        data = bytearray(files[path])
        if number < 500:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        path.write_bytes(data)
        assert saves.found(copy).folder.name == before, f"{path.name} {number}"
        path.write_bytes(files[path])
    assert saves.found(copy).folder == folder


def _copy_from_older(name):
    return lambda folder: shutil.copy(folder.parent / "000004_step_4" / name, folder / name)


def _put_instead_of(name, make):
    def replace(folder):
        shutil.rmtree(folder) if name == "." else (folder / name).unlink()
        make(folder / name)

    return replace


SHARD, MANIFEST = "shard_0000.safetensors", "manifest.json"
DAMAGE = {
    "garbage behind a shard": lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"?"),
    "a shard missing": lambda folder: (folder / SHARD).unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "a shard of another generation": _copy_from_older(SHARD),
    "a manifest of another generation": _copy_from_older(MANIFEST),
    "an empty folder": _put_instead_of(".", Path.mkdir),
    "a file": _put_instead_of(".", Path.touch),
    "a dangling link": _put_instead_of(".", lambda folder: folder.symlink_to("nowhere")),
    "a link to another good one": _put_instead_of(".", lambda path: path.symlink_to(path.parent.parent / "kept")),
    "a link for a shard": _put_instead_of(SHARD, lambda path: path.symlink_to(f"../../kept/{SHARD}")),
    "a pipe for the manifest": _put_instead_of(MANIFEST, os.mkfifo),
    "a huge shard": lambda folder: os.truncate(folder / SHARD, 1 << 40),  # a hole: it takes no room
}
for odd in (None, [], "x", {"step": 3, "of another version": 1}):
    change = lambda manifest, odd=odd: {**manifest, "state": odd}  # noqa: E731
    DAMAGE[f"the state {odd}"] = lambda folder, change=change: saves.change_manifest(folder, change)
for body in (b"[", b'{"a": ' * 5000, b"nothing"):
    whole = body + state.CHECKSUM_LINE % shards.zlib.crc32(body)
    DAMAGE[f"the manifest {body[:9]}"] = lambda folder, whole=whole: (folder / MANIFEST).write_bytes(whole)


def test_a_damaged_checkpoint_is_reported_with_its_reason_and_the_one_before_is_used(copy):
    newest, before = (copy / "checkpoints" / name for name in names(copy)[:2])
    kept = shutil.copytree(newest, copy / "kept")
    for what, damage in DAMAGE.items():
        damage(newest)
        found = saves.found(copy)
        assert found.folder == before, what
        assert len(found.damaged) == 1 and newest.name in found.damaged[0] and "is left" not in found.damaged[0], what
        shutil.rmtree(newest) if newest.is_dir() and not newest.is_symlink() else newest.unlink()
        shutil.copytree(kept, newest)
    assert saves.found(copy).folder == newest


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(copy, finished_run):
    for name, damage in zip(names(copy)[:2], ("garbage behind a shard", "a shard missing"), strict=True):
        DAMAGE[damage](copy / "checkpoints" / name)
    folder = run(copy.parent, f"{SMALL} -cpu 2 -keep_last 99")
    assert distance(folder, finished_run) == 0.0
    before, _, after = log_of(folder).rpartition("an older checkpoint is taken")
    assert before.count("an older checkpoint is taken") == 1 and "resuming from" in after
    assert saves.steps(folder)[:4] == [12, 12, 11, 10], "new checkpoints count as newer than the damaged ones"
    assert saves.found(folder).damaged == []


def test_a_run_with_only_damaged_checkpoints_does_not_start_from_scratch_without_reset(copy, finished_run, refused):
    for name in names(copy):
        (copy / "checkpoints" / name / SHARD).unlink()
    for count in (1, 2):
        message = refused(f"{SMALL} -cpu {count}", out=copy.parent)
        assert "is left: -reset without -resume starts from scratch" in message
    assert len(names(copy)) == 12, "a checkpoint was moved"
    run(copy.parent, f"{SMALL} -cpu 2 -reset -resume {finished_run}")
    assert names(copy) and distance(copy, finished_run) == 0.0
    run(copy.parent, f"{SMALL} -cpu 2 -reset -epochs 1")
    assert saves.steps(copy) == [4]


def _fail_to_read(monkeypatch, name, code):
    """Make the reading of files and folders of this name fail with this error."""

    def failing(real):
        def read(path, *args, **more):
            if path.name == name:
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **more)

        return read

    monkeypatch.setattr(files, "open_regular", failing(files.open_regular))
    monkeypatch.setattr(Path, "iterdir", failing(Path.iterdir))


def _hide_from_rank_1(monkeypatch, newest):
    real = resume._fault_of

    def fault_of(folder, world, there):
        hidden = os.environ["RANK"] == "1" and folder.name == newest
        return real(folder.parent / "hidden" if hidden else folder, world, there)

    monkeypatch.setattr(resume, "_fault_of", fault_of)


@pytest.mark.parametrize(
    ("name", "code"),
    [(SHARD, errno.ESTALE), (SHARD, errno.EMFILE), (MANIFEST, errno.EIO), ("checkpoints", errno.ESTALE), ("", 0)],
)
def test_what_a_rank_cannot_read_or_see_is_no_damage_and_ends_the_start_on_all_ranks(copy, monkeypatch, name, code):
    before, newest = all_entries(copy), names(copy)[0]
    with monkeypatch.context() as patch:
        _fail_to_read(patch, name, code) if code else _hide_from_rank_1(patch, newest)
        run(copy.parent, f"{SMALL} -cpu 2 -keep_last 9", wanted=1)
    reason = os.strerror(code) if code else "this one does not"
    assert reason in outcome(copy)["reason"] and all_entries(copy) == before
    run(copy.parent, f"{SMALL} -cpu 2 -keep_last 9")
    assert f"resuming from {copy}/checkpoints/{newest}:" in log_of(copy)


def test_a_save_that_fails_on_one_rank_loses_only_this_checkpoint(tmp_path, monkeypatch):
    fail_writes(monkeypatch, lambda rank, step: step in (4, 8) and rank == 0)
    folder = run(tmp_path, f"{SMALL} -cpu 3 -keep_last 9 -save_every 2steps")
    assert saves.steps(folder) == [12, 10, 6, 2]
    assert all_entries(folder) == sorted(names(folder))
    for rank in range(3):
        message = [line for line in log_of(folder, rank).splitlines() if "could not be saved" in line]
        assert len(message) == 2 and "WARNING" in message[0] and "training continues" in message[0]
        assert f"000002_step_4 could not be saved (rank 0: OSError: [Errno {errno.ENOSPC}]" in message[0]


def test_a_failed_last_save_is_retried_and_a_run_that_could_not_save_has_failed(tmp_path, monkeypatch):
    first = iter([True])
    with monkeypatch.context() as patch:
        fail_writes(patch, lambda rank, step: step == 12 and next(first, False))
        folder = run(tmp_path, f"{SMALL} -cpu 1 -model again")
    assert saves.steps(folder)[0] == 12 and "training continues" in log_of(folder)
    with monkeypatch.context() as patch:
        fail_writes(patch, lambda rank, step: step == 6)
        saves.stop_at(patch, 6)
        folder = run(tmp_path, f"{SMALL} -cpu 2 -model never", wanted=1)
    assert all("the last state could not be saved" in log_of(folder, rank) for rank in range(2))
    assert outcome(folder)["state"] == "failed" and saves.steps(folder) == [4]


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


def test_a_disk_that_stays_full_ends_the_run_and_the_older_checkpoint_is_good(disk, monkeypatch, finished_run, capfd):
    with monkeypatch.context() as patch:
        saves.after_step(patch, 5, lambda folder: (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free)))
        with pytest.raises(RuntimeError, match=r"could not be saved .*No space left.*, nor could the 2 before it"):
            run(disk, f"{SMALL} -save_every 1steps -log_every 1")
    folder = disk / finished_run.name
    assert saves.steps(folder)[0] == 4
    assert outcome(folder)["state"] == "running", "there is no space for another outcome.json"
    assert "cannot be written (No space left" in saves.refused(disk, f"{SMALL} -model new", capfd)
    (disk / "filler").unlink()
    assert distance(run(disk, SMALL), finished_run) == 0.0


def test_a_slow_disk_is_no_hang_of_the_ranks_that_wait_for_it(tmp_path, monkeypatch, finished_run):
    """Once the disk of the writing rank takes longer than a process may wait for another one."""
    real, waits = shards.write, iter([8])
    monkeypatch.setattr(shards, "write", lambda *args: (time.sleep(next(waits, 0)), real(*args))[1])
    folder = run(tmp_path, f"{SMALL} -cpu 2 -save_every 99epochs -hang_minutes 0.1")
    assert saves.steps(folder) == [12] and distance(folder, finished_run) == 0.0
