"""Checkpoints: written beside the run, kept and removed as asked, and refused before they cannot be written."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import saves
import torch
from runs import few, lines, outcome, plugins, run, same
from safetensors.torch import load_file
from saves import SMALL, everything, log_of, names, save, saver

from lib.utils import distributed
from lib.utils.checkpoint import manager, resume, shards
from lib.utils.distributed import World
from lib.utils.monitoring import metrics

pytestmark = pytest.mark.usefixtures("small_plugins")


# Beside the run


def test_a_save_holds_the_moment_it_began_whatever_changes_once_it_returns(tmp_path, monkeypatch):
    go_on, real = threading.Event(), shards.write
    monkeypatch.setattr(shards, "write", lambda *words: (go_on.wait(30), real(*words))[1])
    checkpoints, live, now = saver(tmp_path), saves.state(3), saves.state(3)
    checkpoints.save(live, saves.facts(3), step=3, rank_dependent={"model.bias"})
    for tensor in live.values():
        tensor.zero_()
    checkpoints.poll()
    assert checkpoints.saving and not names(tmp_path) and not go_on.is_set()
    go_on.set()
    checkpoints.close()
    held = saves.tensors(tmp_path / "checkpoints" / "000001_step_3")
    assert same(held, now)


def test_a_run_goes_on_beside_a_slow_write_and_each_checkpoint_is_that_of_an_easy_run(done, tmp_path, monkeypatch):
    """With dropout, BatchNorm and accumulation."""
    real = shards.write
    monkeypatch.setattr(shards, "write", lambda *words: (time.sleep(0.03), real(*words))[1])
    slow = run(tmp_path, f"{SMALL} -cpu 2 -save_every 1steps -keep_last 99")
    assert names(slow) == names(done) and len(names(slow)) == 13
    for name in names(slow):
        manifests = [shards.read_manifest(folder / "checkpoints" / name) for folder in (slow, done)]
        assert manifests[0]["shards"] == manifests[1]["shards"], name


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_a_save_leaves_the_cores_to_the_training(tmp_path, monkeypatch):
    """It has the least weight, and no team of OpenMP threads: more of them than cores would not wait actively."""
    found, real, threads = [], shards.write, Path("/proc/self/task")

    def write(*words):
        found.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), len([*threads.iterdir()])))
        return real(*words)

    monkeypatch.setattr(shards, "write", write)
    checkpoints, before = saver(tmp_path), os.getpriority(os.PRIO_PROCESS, 0)
    wide = {"model.weight": torch.ones(1 << 20)}
    checkpoints.make_room(wide, set())
    count = len([*threads.iterdir()])
    checkpoints.save(wide, {}, step=1, rank_dependent=set())
    checkpoints.close()
    assert found == [(19, count + 1)] and os.getpriority(os.PRIO_PROCESS, 0) == before


def test_one_save_at_most_is_in_flight_and_the_loop_is_stopped_by_none_before(tmp_path, monkeypatch):
    flying, most, message = [], [], []
    real, goes_on = shards.write, threading.Semaphore(0)

    def write(path, *blocks):
        flying.append(path)
        most.append(len(flying))
        assert goes_on.acquire(timeout=30), "the loop waits for the save that it began"
        time.sleep(0.2)  # long enough for another to come in between
        answer = real(path, *blocks)
        flying.pop()
        message.append("written")
        return answer

    monkeypatch.setattr(shards, "write", write)
    checkpoints = saver(tmp_path, keep_last=9)
    for step in range(1, 5):
        checkpoints.save(saves.state(step), saves.facts(step), step=step, rank_dependent=set())
        message.append("begun")
        goes_on.release()
    checkpoints.close()
    assert most == [1] * 4 and message == ["begun", "written"] * 4
    assert saves.steps(tmp_path) == [4, 3, 2, 1]


def test_buffers_are_made_once_and_shapes_may_change(tmp_path):
    checkpoints = saver(tmp_path)
    checkpoints.make_room(saves.state(0), set())
    before = {name: copy.data_ptr() for name, copy in checkpoints.copies.values.items() if copy.numel()}
    for step in (1, 2):
        save(checkpoints, step)
        assert before == {name: copy.data_ptr() for name, copy in checkpoints.copies.values.items() if copy.numel()}
    tensors = {"model.weight": torch.arange(6.0).reshape(2, 3).t(), "model.on": torch.tensor([True, False])}
    checkpoints.save(tensors, {}, step=3, rank_dependent=set())
    checkpoints.close()
    held = saves.tensors(tmp_path / "checkpoints" / "000003_step_3")
    assert same(held, tensors)


def test_a_stray_manifest_beside_the_checkpoints_is_none_of_them(copy):
    there = names(copy)
    shutil.copy(copy / "checkpoints" / there[0] / "manifest.json", copy / "checkpoints")
    run(copy.parent, f"{SMALL} -cpu 2 -model {copy.name}")
    assert set(there) <= set(names(copy)) and outcome(copy)["state"] == "finished"


def test_a_save_starts_no_process(monkeypatch):
    from lib.utils import runtime

    started, alone = [], World(launch="a test")
    real = runtime.subprocess.run
    monkeypatch.setattr(
        runtime.subprocess, "run", lambda *args, **more: started.append(args[0][2]) or real(*args, **more)
    )
    before = runtime.describe(alone)
    assert started == ["rev-parse", "status"] and before["git"] == runtime.describe(alone)["git"]
    assert started == ["rev-parse", "status"]


def test_only_rank_0_asks_git_and_once(tmp_path, monkeypatch):
    from lib.utils import runtime

    real = runtime._git

    def noted(*words):
        with (tmp_path / "asked").open("a") as file:
            file.write(f"{os.environ['RANK']} {words[0]}\n")
        return real(*words)

    monkeypatch.setattr(runtime, "_git", noted)
    folder = run(tmp_path, f"{SMALL} -cpu 2 -save_every 4steps")
    assert (tmp_path / "asked").read_text().splitlines() == ["0 rev-parse", "0 status"]
    newest = folder / "checkpoints" / names(folder)[0]
    assert shards.read_manifest(newest)["about"]["git"] == real("rev-parse", "HEAD")


def test_to_ask_git_takes_no_lock_that_a_kill_would_leave_behind(tmp_path, monkeypatch):
    from lib.utils import runtime

    source = tmp_path / "lib" / "utils" / "code.py"
    source.parent.mkdir(parents=True)
    source.touch()
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    os.utime(source, (1, 1))  # git would note that it is unchanged, in its index, under a lock
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(runtime, "__file__", str(source))
    assert runtime._git("status", "--porcelain") == ""
    assert (tmp_path / ".git" / "index").read_bytes() == before
    subprocess.run(["git", "status"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / ".git" / "index").read_bytes() != before, "the test could not tell"


# Kept and removed


def test_retention_keeps_the_last_ones_and_milestones_and_all_of_them_are_whole(tmp_path):
    folder = run(tmp_path, f"{SMALL} -epochs 7 -keep_last 2 -keep_every 3 -save_every 1epoch")
    assert saves.steps(folder) == [28, 24, 20, 12] and saves.kept(folder) == [24, 12]
    assert everything(folder) == sorted([*names(folder), "latest"])
    assert (folder / "checkpoints" / "latest").resolve().name == names(folder)[0]
    for name in names(folder):
        assert len(saves.tensors(folder / "checkpoints" / name)) > 10
    assert (folder / "best" / "weights.safetensors").exists()


def test_what_was_saved_last_counts_as_newest_whatever_its_step_and_is_never_removed(tmp_path):
    checkpoints = saver(tmp_path, keep_last=1)
    for step in (8, 8, 9, 3, 4, 4, 1):
        save(checkpoints, step)
        assert len(names(tmp_path)) == 1 and saves.newest(tmp_path) == step
    assert names(tmp_path) == ["000007_step_1"]
    save(checkpoints, 2, keep=True)
    save(checkpoints, 1)
    assert names(tmp_path) == ["000009_step_1", "000008_step_2"] and saves.kept(tmp_path) == [2]
    checkpoints.close()


def test_a_removal_that_stops_half_way_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    checkpoints = saver(tmp_path, keep_last=1)
    save(checkpoints, 1)

    def remove(path, *words, ignore_errors):
        assert ignore_errors
        next(path.glob("*.safetensors")).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        save(checkpoints, 2)
    assert names(tmp_path) == ["000002_step_2"] and len(everything(tmp_path)) == 3
    assert saves.newest(tmp_path) == 2
    assert everything(tmp_path) == ["000002_step_2", "latest"]


def test_the_best_by_a_metric_that_is_not_there_is_one_clear_error_and_costs_no_epoch(refused, tmp_path):
    _, message, there = refused(f"{SMALL} -cpu 2 -best bleu -save_every 9epochs").partition("-best bleu: ")
    given = there.removeprefix("the evaluation on val gives ").split(", ")
    assert message and sorted(given) == ["accuracy", "f1", "loss"]
    folder = tmp_path / "few_norm_net"
    assert saves.steps(folder) == [4], "the epoch's training"
    run(tmp_path, f"{SMALL} -cpu 2 -best accuracy -save_every 9epochs")
    assert "resuming from" in log_of(folder)
    scores = {line["epoch"]: line["val/accuracy"] for line in lines(folder) if "val/accuracy" in line}
    best = outcome(folder)["best"]
    assert list(scores) == [1, 2, 3] and best["epoch"] == max(scores, key=scores.get), "its evaluation came after it"


def test_the_best_without_a_val_split_is_refused_before_anything_is_written(refused, tmp_path):
    with plugins(dataset={"trained": lambda args: few(args)["train"]}):
        assert "-best loss: there is no val split" in refused(f"{SMALL} -dataset trained -best loss -model alone")
    assert not (tmp_path / "alone").exists()


def test_a_checkpoint_that_names_the_best_weights_waits_for_them(tmp_path, caplog):
    checkpoints = saves.saver(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "best").touch()  # where a folder is to be: they cannot be written
    checkpoints.set_best({"a": torch.ones(2)})
    save(checkpoints, 2)
    assert f"{tmp_path / 'best'}" in caplog.text and saves.newest(tmp_path) == 1
    (tmp_path / "best").unlink()
    save(checkpoints, 3)
    assert saves.newest(tmp_path) == 3 and load_file(tmp_path / "best" / "weights.safetensors")["a"].sum() == 2


def test_of_best_weights_only_the_last_before_a_save_are_written_with_it(tmp_path, monkeypatch):
    """Also where an earlier save is still in flight, or has failed."""
    checkpoints, begun, goes_on, written = saves.saver(tmp_path), threading.Event(), threading.Event(), []

    def write(folder, tensors):
        begun.set()
        assert goes_on.wait(60)
        written.append(tensors["a"])
        if written == [1, 4]:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(manager.weights, "write", write)
    checkpoints.set_best({"a": 1})
    checkpoints.save(saves.state(1), saves.facts(1), step=1, rank_dependent=set())
    assert begun.wait(60)
    for number in (2, 3, 4):
        checkpoints.set_best({"a": number})
    goes_on.set()
    save(checkpoints, 2)
    save(checkpoints, 3)
    checkpoints.close()
    assert written == [1, 4, 4] and saves.steps(tmp_path) == [3, 1]


def test_a_kill_while_the_best_weights_are_written_leaves_the_older_ones_and_their_checkpoint(tmp_path):
    checkpoints = saves.saver(tmp_path)
    checkpoints.set_best({"a": torch.ones(2)})
    save(checkpoints, 1)
    child = os.fork()
    if not child:
        shards.as_bytes = lambda values: os.kill(os.getpid(), signal.SIGKILL)  # within the file
        again = saves.saver(tmp_path)
        again.set_best({"a": torch.zeros(2)})
        save(again, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert saves.newest(tmp_path) == 1 and load_file(tmp_path / "best" / "weights.safetensors")["a"].sum() == 2
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["weights.safetensors"], "swept at the next start"


def test_best_is_the_highest_score_and_never_one_that_is_not_a_number(caplog):
    best = None
    for epoch, loss in enumerate((float("nan"), 3.0, 2.0, float("nan"), 2.5)):
        best = metrics.new_best(best, {"loss": loss}, None, epoch) or best
    assert (best["value"], best["epoch"]) == (2.0, 2)
    assert metrics.new_best(None, {"loss": float("nan"), "accuracy": 0.1}, None, 1) is None
    best = metrics.new_best(best, {"loss": 9.0, "accuracy": 0.1}, "accuracy", 5)
    assert (best["metric"], best["value"]) == ("accuracy", 0.1)
    assert metrics.new_best(best, {"loss": 9.0, "accuracy": 0.1}, "accuracy", 6) is None
    for asked, wanted in (("rec", 3), ("rec:max", 3), ("rec:min", 1), ("loss:max", 3)):
        best = None
        for epoch, value in enumerate((2.0, 1.0, 5.0, 4.0)):
            best = metrics.new_best(best, {"rec": value, "loss": value}, asked, epoch + 1) or best
        assert best["epoch"] == {3: 3, 1: 2}[wanted] and best["metric"] == asked.partition(":")[0]
    assert metrics.new_best(None, {"rec": 1.0}, None, 1) is None
    assert "the evaluation gives rec; choose one by -best" in caplog.text


# Room


def test_a_disk_without_room_for_one_checkpoint_is_refused_with_figures(refused, tmp_path, monkeypatch):
    size = 4 * (64 * 24 + 24 * 4 + 4 + 48) * 3 + 4 * 5 + 4 * 48 + 8  # weights and moments, AdamW's steps, BatchNorm
    for cpu in (1, 2):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size - 1))
        line = refused(f"{SMALL} -cpu {cpu}")
        assert f"a checkpoint takes {size:,} bytes, and {size - 1:,} are free" in line
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))
        run(tmp_path, f"{SMALL} -cpu {cpu} -model enough_{cpu}")


def test_the_size_told_ahead_is_that_of_the_files(done):
    newest = done / "checkpoints" / names(done)[0]
    size = sum(tensor.nbytes for tensor in saves.tensors(newest).values())
    on_disk = sum(shard.stat().st_size for shard in newest.glob("shard_*"))
    assert size <= on_disk < size + 6000


def test_a_folder_of_checkpoints_may_hold_other_things(tmp_path):
    checkpoints = saver(tmp_path)
    save(checkpoints, 4)
    for name in ("000009_step_9.txt", "9_step_9", "000008_steps_8", "000009_step_9.partial2", "notes"):
        (tmp_path / "checkpoints" / name).touch()
    (tmp_path / "checkpoints" / "000008_step_8_best").mkdir()
    assert names(tmp_path) == ["000001_step_4"] and saves.newest(tmp_path) == 4
    save(checkpoints, 5)
    checkpoints.close()
    assert {"notes", "000008_step_8_best"} <= set(everything(tmp_path))


def test_a_rank_alone_needs_no_group_and_finds_nothing_in_a_new_folder(tmp_path):
    checkpoints = saver(tmp_path / "new")
    assert resume.find_newest_good(checkpoints.folder, checkpoints.disk) is None
    assert distributed.gather_json(1, World()) == [1]
