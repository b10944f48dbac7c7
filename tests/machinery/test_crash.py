"""The crash harness itself: the calls that it records, and what its disk loses."""

import os
import shutil
import threading
import time

import crash
import disk
import pytest
import safetensors.torch
import torch


def test_the_harness_records_threads_safetensors_and_copies_and_notices_unrecorded_changes(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "log").write_text("line\n")

    def save():
        thread = threading.Thread(target=lambda: (folder / "x").write_text("x"))
        thread.start()
        thread.join()
        safetensors.torch.save_file({"a": torch.ones(3)}, folder / "y")
        shutil.copy(folder / "y", folder / "z")
        with (folder / "log").open("a") as log:
            log.write("line\n")
        os.truncate(folder / "log", 7)

    lines = crash.points(save, folder)
    assert [line for line in lines if "write" in line] == ["write x", "write y", "write z", "write log"]
    crash.kill_at(save, folder, lines.index("write y"), half=True)
    assert disk.read_tree(folder)["x"] == b"x" and not (folder / "z").exists()
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(folder / "y")
    with pytest.raises(AssertionError, match=r"not watched.*unseen"):
        crash.points(lambda: torch.save({}, folder / "unseen"), folder)
    with pytest.raises(AssertionError, match=r"(?s)by itself.*ZeroDivisionError"):
        crash.points(lambda: 1 / 0, folder)


def test_the_disk_loses_only_what_was_not_synced(tmp_path):
    (tmp_path / "old").write_bytes(b"abcd")

    def save():
        with (tmp_path / "new").open("wb") as file:
            file.write(b"1234")
        (tmp_path / "new").rename(tmp_path / "old")

    states = {(tmp_path / "old").read_bytes() for _ in crash.power_loss_states(save, tmp_path)}
    assert states == {b"abcd", b"1234", b"12", b"", b"\0\0\0\0"}


def test_many_unsynced_renames_are_lost_in_every_order_and_one_by_one(tmp_path):
    def save():
        for name in range(9):
            (tmp_path / f"{name}").touch()

    states = {tuple(disk.read_tree(tmp_path)) for _ in crash.power_loss_states(save, tmp_path)}
    names = [f"{name}" for name in range(9)]
    assert {(), tuple(names), *((name,) for name in names)} < states
    assert {tuple(names[:at] + names[at + 1 :]) for at in range(9)} < states


def test_a_save_that_hangs_or_dies_by_itself_is_reported(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="status 256"):
        crash.points(lambda: os._exit(1), tmp_path)
    monkeypatch.setattr(crash, "LIMIT", 0.3)
    with pytest.raises(AssertionError, match="hangs"):
        crash.points(lambda: time.sleep(60), tmp_path)
