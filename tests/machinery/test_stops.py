"""Whatever ends a run, it saves its state where it can, and the next start ends at the same weights, bit for bit."""

import contextlib
import errno
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import until

from lib.utils import preemption
from lib.utils.distributed import World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at its runs through /proc")
EPOCH, STEPS = 20, 60  # steps of an epoch, and of the run
PAUSE = {"do": "pause", "step": 25}
NEXT = PAUSE["step"] + 1  # where a run stops that was told to in its pause
QUIET = "stopped at once, as there was nothing to save"
SOON_S = 30  # until a run reacts, on a machine that has much else to do


def to_parent(run, number):
    os.kill(run.pid, number)


def to_all(run, number):
    os.killpg(run.pid, number)


def to_rank(rank):
    def send(run, number):
        os.kill(run.noted(2)[rank]["pid"], number)

    return send


def heard(run, number):
    """Waits until a rank wishes to stop for this signal: a thread hears of it."""
    message, logs = f"signal {number.name}: stopping", run.folder / "logs"
    until(lambda: any(message in log.read_text() for log in logs.glob("rank_*.log")), what=message)


def saved_steps(run) -> list[int]:
    """The steps of the checkpoints, sorted."""
    return sorted(
        int(folder.name.partition("_step_")[2]) for folder in (run.folder / "checkpoints").glob("*_step_*[0-9]")
    )


def stopped(run, reason) -> int:
    """The step at which a run stopped, its state saved."""
    assert run.ends() == 75, run.text()
    run.is_gone(SOON_S)
    outcome = run.outcome()
    assert outcome["state"] == "stopped"
    assert reason in outcome["reason"]
    assert saved_steps(run)[-1] == outcome["step"] < STEPS
    assert "Traceback" not in run.text()
    return outcome["step"]


def stop_of(folder, world=None):
    return preemption.Stop(folder, world or World(), max_hours=None, grace_s=60, limit_steps=None)


def test_a_pool_of_a_plugin_ends_without_stopping_the_run(tmp_path):
    """multiprocessing.Pool ends its processes, which are forked from the run's, by SIGTERM."""
    stop, context = stop_of(tmp_path), multiprocessing.get_context("fork")
    begun = context.Event()
    with stop.handle_signals():
        process = context.Process(target=lambda: (begun.set(), time.sleep(SOON_S)))
        process.start()
        assert begun.wait(SOON_S)
        process.terminate()
        process.join()
    assert process.exitcode == -signal.SIGTERM
    assert stop.request is None


def goes_on(start, name, undisturbed, *words, **how):
    """The next start of a run goes on, and ends as if nothing had been."""
    run = start(name, *words, **how)
    assert run.ends() == 0, run.text()
    assert "resuming from" in run.text()
    outcome = run.outcome()
    assert [outcome[name] for name in ("state", "step", "samples")] == ["finished", STEPS, 3 * 1259]
    assert run.weights() == undisturbed.weights()


@pytest.mark.parametrize(
    ("number", "send", "workers"),
    [
        (signal.SIGTERM, to_parent, 0),
        (signal.SIGTERM, to_rank(1), 0),
        (signal.SIGTERM, to_all, 2),
        (signal.SIGUSR1, to_parent, 0),
        (signal.SIGUSR2, to_rank(0), 2),
    ],
)
def test_a_signal_stops_all_ranks_at_one_step_and_the_next_start_goes_on(start, undisturbed, number, send, workers):
    run = start("told", "-workers", workers, deed=PAUSE)
    run.noted(2)
    for _ in range(3):  # impatience changes nothing
        send(run, number)
    heard(run, number)
    run.go()
    assert stopped(run, number.name) == NEXT
    assert saved_steps(run)[-2:-1] == [EPOCH]
    goes_on(start, "told", undisturbed, "-workers", workers)


def test_votes_once_a_second_are_soon_enough(start):
    run = start("long", "-epochs", 1000, deed={**PAUSE, "step": 150}, env={"VOTE_S": "1"})
    run.noted(2)
    to_parent(run, signal.SIGTERM)
    run.go()
    assert run.ends(2 * SOON_S) == 75, run.text()
    assert run.outcome()["step"] > 150


def test_a_network_disk_that_fails_for_a_moment_stops_nothing(tmp_path, monkeypatch):
    def stale(path, **more):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    stop = stop_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        assert not stop.is_requested()
    (tmp_path / "STOP").touch()
    stop.next_check = 0.0
    assert stop.is_requested()


def test_votes_are_soon_enough_on_a_gpu_that_was_waited_for(monkeypatch):
    """Its next steps are launched at once: they would seem to take no time. Steps of 1 s, four of them in its queue,
    and a log line that waits for it every ten."""
    clock, queue, votes = [0.0], [], []
    stop = stop_of(Path("nowhere"), World(size=2))
    monkeypatch.setattr(stop, "is_requested", lambda: bool(votes.append(clock[0])))
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(preemption.distributed, "reduce_json", lambda value, merge, world: value)
    for step in range(1, 400):
        clock[0] += 0.02
        queue.append(max([clock[0], *queue]) + 1.0)
        if len(queue) > 4 or step % 10 == 0:
            clock[0] = max(clock[0], queue[-1] if step % 10 == 0 else queue[-5])
        queue = queue[-4:]
        stop.tick(training=True)
    assert len(votes) > 40 and max(after - before for before, after in itertools.pairwise(votes)) < 10


def test_one_ctrl_c_stops_the_run_and_a_second_one_ends_it_at_once(start, undisturbed):
    terminal = {"terminal": ("stdin", "stdout", "stderr")}
    run = start("keys", deed=PAUSE, **terminal)
    run.noted(2)
    run.type("\x03")
    run.says("signal SIGINT: stopping")
    run.go()
    first = stopped(run, "SIGINT")
    run = start("keys", deed={**PAUSE, "step": 45}, **terminal)
    run.noted(2)
    run.type("\x03")
    run.says("signal SIGINT: stopping")
    time.sleep(1.2)  # presses nearer together count as one
    run.type("\x03")
    assert run.ends(SOON_S) == 130, run.text()
    run.is_gone(SOON_S)
    assert first in saved_steps(run)  # that of the second epoch was in flight, or whole
    goes_on(start, "keys", undisturbed)


def test_one_process_stops_and_goes_on_in_the_parent(start):
    alone = start("alone", cpu=1)
    assert alone.ends() == 0, alone.text()
    run = start("told", "-workers", 1, deed=PAUSE, cpu=1)
    run.noted(1)
    to_parent(run, signal.SIGINT)
    heard(run, signal.SIGINT)
    run.go()
    assert stopped(run, "SIGINT") == NEXT
    goes_on(start, "told", alone, "-workers", 1, cpu=1)


def test_a_lost_terminal_stops_a_run_that_writes_there_and_no_other(start, undisturbed):
    run = start("there", deed=PAUSE, terminal=("stdin", "stdout", "stderr"))
    run.noted(2)
    run.hang_up()
    heard(run, signal.SIGHUP)
    run.go()
    assert stopped(run, "SIGHUP") == NEXT
    goes_on(start, "there", undisturbed)
    run = start("elsewhere", deed=PAUSE, terminal=("stdin", "stderr"))
    run.noted(2)
    run.hang_up()
    run.go()
    assert run.ends() == 0, run.text()
    assert run.weights() == undisturbed.weights()


def test_all_processes_killed_at_once_lose_what_was_done_since_the_last_save(start, undisturbed):
    for step, whole in ((15, 0), (45, EPOCH)):  # that of the second epoch is in flight, or whole
        run = start("power", deed={**PAUSE, "step": step})
        run.noted(2)
        to_all(run, signal.SIGKILL)
        assert run.ends() == -signal.SIGKILL
        run.is_gone(SOON_S)
        assert saved_steps(run)[:1] == ([whole] if whole else [])
        assert run.outcome()["state"] == "running"
    goes_on(start, "power", undisturbed)


def test_a_stop_while_evaluating_is_heard_there(start, undisturbed):
    deed = {"do": "strike", "signal": "SIGTERM", "where": "evaluation", "step": EPOCH, "rank": 1}
    run = start("evaluates", deed=deed)
    assert stopped(run, "SIGTERM") == EPOCH
    assert run.outcome()["epoch"] == 0, "the evaluation is still to be done"
    goes_on(start, "evaluates", undisturbed)


@pytest.mark.parametrize(("where", "step"), [("training", STEPS - 1), ("evaluation", STEPS)])
def test_a_stop_on_the_last_step_finishes_the_run(start, undisturbed, where, step):
    run = start(
        "last",
        deed={"do": "strike", "signal": "SIGTERM", "where": where, "step": step, "rank": 1},
        env={"LAST_S": "60"},
    )
    assert run.ends() == 0, run.text()
    assert run.outcome()["state"] == "finished"
    assert run.weights() == undisturbed.weights()


@pytest.mark.parametrize(("split", "epochs"), [("val", 2), ("test", 3)])
def test_a_stop_in_a_long_last_evaluation_leaves_that_to_the_next_start(start, undisturbed, split, epochs):
    deed = {"do": "strike", "signal": "SIGTERM", "where": "evaluation", "step": STEPS, "epochs": epochs, "rank": 1}
    run = start("leaves", deed=deed, env={"LAST_S": "0"})
    assert run.ends() == 75, run.text()
    outcome = run.outcome()
    assert [outcome[name] for name in ("state", "step", "epoch")] == ["stopped", STEPS, epochs]
    assert saved_steps(run)[-1] == STEPS and f"epoch 3/3  {split}" not in run.text()
    assert f"in {'epoch 3' if split == 'val' else 'the last evaluation'} at step {STEPS}, state saved" in run.text()
    goes_on(start, "leaves", undisturbed)
    lines = (run.folder / "metrics.jsonl").read_text()
    assert [lines.count(f'"{name}/loss"') for name in ("val", "test")] == [3, 1], "evaluated once"


def test_max_hours_stop_a_run_and_the_file_stop_does_once_whatever_its_time(start, undisturbed):
    first = stopped(start("asked", "-max_hours", 1e-9), "-max_hours is over")
    run = start("asked", deed=PAUSE)
    run.noted(2)
    to_parent(run, signal.SIGTERM)
    heard(run, signal.SIGTERM)
    (run.folder / "STOP").touch()  # as while a job is preempted, or waits to be requeued
    run.go()
    assert first < stopped(run, "SIGTERM") == NEXT
    for number, age in enumerate((-86400, 86400), 1):  # clocks of different machines differ
        (run.folder / "STOP").touch()
        os.utime(run.folder / "STOP", 2 * (time.time() + age,))
        assert stopped(start("asked"), "STOP") == NEXT + number
        assert not (run.folder / "STOP").exists()
    goes_on(start, "asked", undisturbed)


def test_a_start_waits_for_the_ranks_that_still_save_after_their_launcher_was_killed(start, undisturbed):
    old = start("again", deed=PAUSE)
    old.noted(2)
    os.kill(old.pid, signal.SIGKILL)
    new = start("again")
    new.says("waiting up to")
    assert new.ended() is None
    old.says("signal SIGTERM: stopping")  # within a second
    old.go()
    assert new.ends() == 0, new.text()
    assert f"_step_{NEXT}: epoch" in new.text().partition("resuming from")[2]
    assert new.weights() == undisturbed.weights()


def test_a_stop_that_takes_longer_than_the_grace_shows_where_and_ends(start, undisturbed):
    run = start("stuck", "-grace_s", 2, deed={"do": "strike", "signal": "SIGSTOP", "step": 45, "rank": 1})
    run.noted(1)
    time.sleep(0.2)  # rank 0 is in its collective, waiting for rank 1
    to_parent(run, signal.SIGTERM)
    sent = time.monotonic()
    assert run.ends() == 1, run.text()
    assert 2 < time.monotonic() - sent < 2 + SOON_S
    assert re.search(r"Timeout \(0:00:02\)!\nThread 0x", run.text())
    assert re.search(r"File .*trainer\.py.* in ", run.text())
    assert "rank 0 failed with exit code 1" in run.text()
    run.is_gone(SOON_S)
    assert EPOCH in saved_steps(run)  # the second epoch's waited for it, and may be in flight itself
    goes_on(start, "stuck", undisturbed)


def test_a_run_told_to_stop_again_and_again_at_any_instant_gets_there(start, undisturbed):
    codes = []
    for attempt in range(40):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)[attempt % 4]
        run = start("haste")
        time.sleep(0.1 + 0.06 * attempt)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            to_all(run, number)
        codes.append(run.ends(2 * SOON_S))
        run.is_gone(SOON_S)
        assert codes[-1] in (0, 75, -number), run.text()  # the last: before main() was called
        if codes[-1] == 0:
            break
    assert 75 in codes, codes
    if codes[-1] == 0:
        assert run.weights() == undisturbed.weights()
    else:
        goes_on(start, "haste", undisturbed)


def test_a_signal_in_the_first_seconds_gives_75_and_does_no_harm(start, undisturbed):
    words = ("-arch", "mlp", "-epochs", 3)
    for number in (signal.SIGTERM, signal.SIGINT):
        run = start("early", *words, command=["train.py"])
        until(lambda maps=Path(f"/proc/{run.pid}/maps"): "libtorch_cpu" in maps.read_text())  # it imports
        to_parent(run, number)
        assert run.ends() == 75, run.text()
        assert run.text() == f"train.py: {number.name} before or after the training: {QUIET}\n"
        run.is_gone(SOON_S)
    run = start("early", *words, "-trainer", "trainer", command=["train.py"])
    assert run.ends() == 0, run.text()
    assert run.weights() == undisturbed.weights()
