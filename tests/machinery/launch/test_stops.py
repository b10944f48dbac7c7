"""However a run ends, it saves its state if it can, and the next start ends with the same weights, bit for bit."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import SOON_S, until
from saves import steps

from lib.utils import preemption
from lib.utils.distributed import World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inspects its runs in /proc")
EPOCH, STEPS = 20, 60  # steps of an epoch, and of the run
PAUSE = {"do": "pause", "step": 25}
NEXT = PAUSE["step"] + 1  # the step at which a run stops that was asked to stop during its pause
QUIET = "stopped at once, as there was nothing to save"


def wait_until_noticed(run, number):
    """Wait until a rank has noticed this signal and wants to stop."""
    message, logs = f"signal {number.name}: stopping", run.folder / "logs"
    until(lambda: any(message in log.read_text() for log in logs.glob("rank_*.log")), what=message)


def wait_until_stopped(run, reason) -> int:
    """Wait until the run has stopped with its state saved, and return the step."""
    run.ends_with(75)
    outcome = run.outcome()
    assert outcome["state"] == "stopped" and reason in outcome["reason"]
    assert steps(run.folder)[0] == outcome["step"] < STEPS and "Traceback" not in run.text()
    return outcome["step"]


def check_resumes(start, name, uninterrupted, *flags, **how):
    """Check that the next start of a run resumes and ends as if it had not been interrupted."""
    run = start(name, *flags, **how)
    assert run.wait() == 0, run.text()
    assert "resuming from" in run.text()
    assert [run.outcome()[name] for name in ("state", "step", "samples")] == ["finished", STEPS, 3 * 1259]
    assert run.weights() == uninterrupted.weights()


@pytest.mark.parametrize(("to_all", "workers"), [(False, 0), (True, 2)])
def test_a_signal_stops_all_ranks_at_one_step_and_the_next_start_resumes(start, uninterrupted, to_all, workers):
    run = start("signalled", "-workers", workers, fault=PAUSE)
    rank_1 = run.wait_for_notes(2)[1]["pid"]
    for _ in range(3):  # repeated signals change nothing
        os.kill(-run.pid if to_all else rank_1, signal.SIGTERM)
    wait_until_noticed(run, signal.SIGTERM)
    run.release()
    assert wait_until_stopped(run, "SIGTERM") == NEXT
    assert steps(run.folder)[1] == EPOCH
    check_resumes(start, "signalled", uninterrupted, "-workers", workers)


def test_one_ctrl_c_stops_the_run_and_a_second_one_ends_it_at_once(start, uninterrupted):
    terminal = {"terminal": ("stdin", "stdout", "stderr")}
    run = start("keys", fault=PAUSE, **terminal)
    run.wait_for_notes(2)
    run.type("\x03")
    run.wait_for_output("signal SIGINT: stopping")
    run.release()
    first = wait_until_stopped(run, "SIGINT")
    run = start("keys", fault={**PAUSE, "step": 45}, **terminal)
    run.wait_for_notes(2)
    run.type("\x03")
    run.wait_for_output("signal SIGINT: stopping")
    time.sleep(1.2)  # Ctrl-C twice within a second counts as once
    run.type("\x03")
    assert run.wait(SOON_S) == 130, run.text()
    run.wait_until_gone(SOON_S)
    assert first in steps(run.folder)  # the save of the second epoch may have been in progress
    check_resumes(start, "keys", uninterrupted)


def test_a_lost_terminal_stops_only_runs_that_write_to_it(start, uninterrupted):
    run = start("terminal", fault=PAUSE, terminal=("stdin", "stdout", "stderr"))
    run.wait_for_notes(2)
    run.hang_up()
    wait_until_noticed(run, signal.SIGHUP)
    run.release()
    assert wait_until_stopped(run, "SIGHUP") == NEXT
    run = start("elsewhere", fault=PAUSE, terminal=("stdin", "stderr"))
    run.wait_for_notes(2)
    run.hang_up()
    run.release()
    assert run.wait() == 0, run.text()
    assert run.weights() == uninterrupted.weights()


def test_a_hangup_stops_a_run_of_torchrun_which_would_kill_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    stop = preemption.Stop(tmp_path, World(), max_hours=None, grace_s=60)
    with stop.handle_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        until(stop.is_requested)


def test_max_hours_stops_a_run_and_the_file_stop_stops_it_once_whatever_its_timestamp(start, uninterrupted):
    first = wait_until_stopped(start("limited", "-max_hours", 1e-9), "-max_hours is over")
    run = start("limited", fault=PAUSE)
    run.wait_for_notes(2)
    os.kill(run.pid, signal.SIGUSR2)
    wait_until_noticed(run, signal.SIGUSR2)
    (run.folder / "STOP").touch()  # as if during a preemption or while the job waits to be requeued
    run.release()
    assert first < wait_until_stopped(run, "SIGUSR2") == NEXT
    for number, age in enumerate((-86400, 86400), 1):  # clocks of machines differ
        (run.folder / "STOP").touch()
        os.utime(run.folder / "STOP", 2 * (time.time() + age,))
        assert wait_until_stopped(start("limited"), "STOP") == NEXT + number
        assert not (run.folder / "STOP").exists()
    check_resumes(start, "limited", uninterrupted)


def test_a_start_waits_for_ranks_that_are_still_saving_after_their_launcher_was_killed(start, uninterrupted):
    old = start("again", "-workers", 1, fault=PAUSE)
    old.wait_for_notes(2)
    os.kill(old.pid, signal.SIGKILL)
    new = start("again")
    new.wait_for_output("waiting up to")
    assert new.ended() is None
    old.wait_for_output("signal SIGINT")
    old.release()
    assert new.wait() == 0, new.text()
    assert f"_step_{NEXT}: epoch" in new.text().partition("resuming from")[2]
    assert new.weights() == uninterrupted.weights()
    old.wait_until_gone(SOON_S)
    assert "the parent process is gone" in old.text() and "parent process" not in new.text()


def test_a_stop_that_takes_longer_than_grace_s_shows_the_stack_and_ends(start, uninterrupted):
    run = start("stuck", "-grace_s", 2, fault={"do": "send_signal", "signal": "SIGSTOP", "step": 45, "rank": 1})
    run.wait_for_notes(1)
    time.sleep(0.2)  # rank 0 is in its collective, waiting for rank 1
    os.kill(run.pid, signal.SIGTERM)
    sent = time.monotonic()
    run.ends_with(1)
    assert 2 < time.monotonic() - sent < 2 + SOON_S
    assert re.search(r"Timeout \(0:00:02\)!\nThread 0x", run.text())
    assert re.search(r"File .*trainer\.py.* in ", run.text())
    assert "rank 0 failed with exit code 1" in run.text()
    assert EPOCH in steps(run.folder)  # the save of the second epoch waited for it, and may still be in progress
    check_resumes(start, "stuck", uninterrupted)


def test_a_signal_in_the_first_seconds_exits_with_75_and_does_no_harm(start, uninterrupted):
    for number in (signal.SIGTERM, signal.SIGINT):
        run = start("early", "-arch", "mlp", "-epochs", 3, command=["train.py"])
        maps = Path(f"/proc/{run.pid}/maps")
        until(lambda maps=maps: "libtorch_cpu" in maps.read_text())  # torch is being imported
        os.kill(run.pid, number)
        run.ends_with(75)
        assert run.text() == f"train.py: {number.name} before or after the training: {QUIET}\n"
    run = start("early", fault={"do": "pause", "step": "start", "rank": 0})
    run.wait_for_notes(1)
    time.sleep(1)  # rank 1 is there, too
    os.kill(run.pid, signal.SIGTERM)
    run.ends_with(75)
    assert run.outcome()["state"] == "running" and QUIET in run.text(), "and not failed, for want of a process"
    run = start("early")
    assert run.wait() == 0, run.text()
    assert run.weights() == uninterrupted.weights()
