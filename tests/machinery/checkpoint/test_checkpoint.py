"""Checkpoints: saves in the background, retention, best weights, and the check of free disk space."""

import math
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import saves
import torch
from command_line import usage_error
from runs import few, lines, outcome, plugins, run, same_tensors
from safetensors.torch import load_file
from saves import SMALL, log_of, names, new_checkpoints, save

from lib.utils import runtime
from lib.utils.checkpoint import run_folder, shards, state, weights
from lib.utils.monitoring import metrics

pytestmark = pytest.mark.usefixtures("small_plugins")


def test_a_save_contains_the_state_at_its_beginning_whatever_changes_then(tmp_path, monkeypatch):
    may_continue, real = threading.Event(), shards.write
    monkeypatch.setattr(shards, "write", lambda *args: (may_continue.wait(30), real(*args))[1])
    checkpoints, live, now = new_checkpoints(tmp_path), saves.state(3), saves.state(3)
    checkpoints.save(live, saves.facts(3), step=3)
    for tensor in live.values():
        tensor.zero_()
    checkpoints.poll()
    assert checkpoints.saving and not names(tmp_path) and not may_continue.is_set()
    may_continue.set()
    checkpoints.close()
    assert same_tensors(saves.tensors(tmp_path / "checkpoints" / "000001_step_3"), now)


def test_at_most_one_save_is_in_progress_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    in_progress, most, events = [], [], []
    real, may_continue = shards.write, threading.Semaphore(0)

    def write(path, *blocks):
        in_progress.append(path)
        most.append(len(in_progress))
        assert may_continue.acquire(timeout=30), "the loop waits for the save that it started"
        time.sleep(0.2)  # long enough for another save to start
        answer = real(path, *blocks)
        in_progress.pop()
        events.append("written")
        return answer

    monkeypatch.setattr(shards, "write", write)
    checkpoints = new_checkpoints(tmp_path, keep_last=9)
    for step in range(1, 5):
        checkpoints.save(saves.state(step), saves.facts(step), step=step)
        events.append("begun")
        may_continue.release()
    checkpoints.close()
    assert most == [1] * 4 and events == ["begun", "written"] * 4
    assert saves.steps(tmp_path) == [4, 3, 2, 1]


def test_the_checkpoint_that_was_saved_last_is_the_newest_whatever_its_step_and_never_removed(tmp_path, monkeypatch):
    checkpoints = new_checkpoints(tmp_path, keep_last=1)
    for step in (8, 8, 9, 3, 4, 4, 1):
        save(checkpoints, step)
        assert len(names(tmp_path)) == 1 and saves.newest(tmp_path) == step
    assert names(tmp_path) == ["000007_step_1"]
    save(checkpoints, 2, keep=True)
    save(checkpoints, 1)
    assert names(tmp_path) == ["000009_step_1", "000008_step_2"] and saves.kept(tmp_path) == [2]
    monkeypatch.setattr(run_folder, "NAME", re.compile("other"))
    assert "no start would find it" in usage_error(save, checkpoints, 3)
    checkpoints.close()


def test_the_first_checkpoint_of_each_hour_stays_as_long_as_it_is_wanted(tmp_path):
    checkpoints = new_checkpoints(tmp_path, keep_last=1, keep_hours=4)
    middle = time.time() // 3600 * 3600 + 1800
    for step, hours in enumerate((9, 2, 2, 1, 1, 0)):
        save(checkpoints, step)
        os.utime(tmp_path / "checkpoints" / names(tmp_path)[0], (middle - 3600 * hours,) * 2)
    checkpoints.close()
    assert saves.steps(tmp_path) == [5, 3, 1]


def test_an_unknown_best_metric_is_one_clear_error_and_no_epoch_is_lost(refused, tmp_path):
    _, events, there = refused(f"{SMALL} -cpu 2 -best bleu -save_every 9epochs").partition("-best bleu: ")
    given = there.removeprefix("the validation gives ").split(", ")
    assert events and sorted(given) == "accuracy f1 loss val/accuracy val/f1 val/loss".split()
    folder = tmp_path / "few_norm_net"
    assert saves.steps(folder) == [4], "the epoch's training is saved"
    run(tmp_path, f"{SMALL} -cpu 2 -best accuracy -save_every 9epochs")
    assert "resuming from" in log_of(folder)
    about = state.read_manifest(folder / "checkpoints" / names(folder)[0])["about"]
    assert about["git"] == runtime._git_status(), "the commit of the code"
    scores = {line["epoch"]: line["val/accuracy"] for line in lines(folder) if "val/accuracy" in line}
    assert list(scores) == [1, 2, 3], "the evaluation was repeated"
    assert outcome(folder)["best"]["epoch"] == max(scores, key=scores.get)


def test_a_choice_without_a_val_split_is_refused_before_anything_is_written(refused, tmp_path):
    with plugins(dataset={"trained": lambda args: few(args)["train"]}):
        for flag in ("-best loss", "-stop_after 2"):
            assert f"{flag}: there is no val split" in refused(f"{SMALL} -dataset trained {flag} -model alone")
    assert not (tmp_path / "alone").exists()


def test_a_checkpoint_is_not_written_before_the_best_weights_that_it_names(tmp_path, caplog):
    checkpoints = saves.new_checkpoints(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "best").touch()  # a file in place of the folder: the weights cannot be written
    checkpoints.best = {"a": torch.ones(2)}
    save(checkpoints, 2)
    assert f"{tmp_path / 'best'}" in caplog.text and saves.newest(tmp_path) == 1
    (tmp_path / "best").unlink()
    save(checkpoints, 3)
    assert saves.newest(tmp_path) == 3 and load_file(tmp_path / "best" / "weights.safetensors")["a"].sum() == 2


def test_best_is_the_highest_score_and_never_nan(caplog):
    best = None
    for epoch, loss in enumerate((math.nan, 3.0, 2.0, math.nan, 2.5, -math.inf)):
        best = metrics.new_best(best, {"loss": loss}, None, epoch) or best
    assert (best["value"], best["evaluation"]) == (2.0, 2)
    sets = {"val/loss": math.nan, "val/f1": 0.9, "val_a/loss": 1.0, "val_a/f1": 0.5, "loss": math.nan, "f1": 0.9}
    assert metrics.new_best(None, sets, None, 1) is metrics.new_best(None, sets, "f1", 1) is None
    assert metrics.new_best(None, sets, "val_a/f1", 1)["value"] == 0.5
    assert metrics.new_best(None, {**sets, "val_a/loss": math.nan}, "val_a/f1", 1) is None
    best = metrics.new_best(best, same := {"loss": 9.0, "accuracy": 0.1}, "accuracy", 5)
    assert (best["metric"], best["value"]) == ("accuracy", 0.1)
    assert metrics.new_best(best, same, "accuracy", 6) is metrics.new_best(best, {"loss": 1.0}, None, 7) is None
    for flag, wanted in (("rec", 3), ("rec:max", 3), ("rec:min", 1), ("loss:max", 3), ("mae", 1), ("loss/box", 1)):
        best = None
        for epoch, value in enumerate((2.0, 1.0, 5.0, 4.0)):
            best = metrics.new_best(best, {flag.partition(":")[0]: value}, flag, epoch + 1) or best
        assert best["evaluation"] == {3: 3, 1: 2}[wanted] and best["metric"] == flag.partition(":")[0]
    assert metrics.new_best(None, {"rec": 1.0}, None, 1) is None
    assert metrics.new_best({"metric": "rec", "value": 9.0, "score": 9.0}, {"rec": 1.0}, "rec:min", 6)
    for said in ("the validation gives rec; choose one by -best", "its val_a/loss is nan"):
        assert said in caplog.text


def test_a_disk_without_room_for_one_checkpoint_is_refused_with_both_sizes(refused, tmp_path, monkeypatch):
    size = 3 * (4 * (64 * 24 + 24 * 4 + 4 + 4 * 24) + 8)  # weights and BatchNorm; as much twice for AdamW
    for cpu in (1, 2):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size - 1))
        assert f"a checkpoint takes about {size:,} bytes, and {size - 1:,} are free" in refused(f"{SMALL} -cpu {cpu}")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))
        run(tmp_path, f"{SMALL} -cpu {cpu} -model enough_{cpu}")


def test_weights_have_the_same_bytes_in_whatever_order_their_tensors_come(tmp_path):
    """A node that gets `best` from another one writes it from what it has read: in the order of the names."""
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate("zbya")}
    weights.write(tmp_path / "one", tensors)
    weights.write(tmp_path / "two", shards.read_weights(tmp_path / "one" / "weights.safetensors"))
    weights.write(tmp_path / "three", dict(sorted(tensors.items())))
    assert len({(tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two", "three")}) == 1
