"""A run that hangs is ended, and each rank logs where it was."""

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
from command_line import parsed, plugin_folder
from items import Items
from processes import SOON_S, until
from runs import plugins

import train
from lib import launch
from lib.launch import environment
from lib.utils import watchdog
from lib.utils.data.tensors import Tensors

MINUTES = 0.1
TIMEOUT_S = 0.6  # of the run in a process that steps by itself


def test_a_frozen_rank_fails_the_run_and_all_other_ranks_log_their_stacks(start):
    fault = {"do": "send_signal", "signal": "SIGSTOP", "step": 45, "rank": 0}
    run = start("frozen", "-hang_minutes", MINUTES, "-grace_s", 5, fault=fault, cpu=3, env={"VOTE_S": "1"})
    run.ends_with(1)
    assert time.monotonic() - run.wait_for_notes(1)[0]["time"] < MINUTES * 60 + SOON_S
    outcome = run.outcome()
    assert outcome["state"] == "running" or outcome["lost_peer"], "a requeue counts both as a lost process"
    assert "nothing moved" not in (run.folder / "logs" / "rank_0.log").read_text()
    for other in (1, 2):
        log = (run.folder / "logs" / f"rank_{other}.log").read_text()
        assert re.search(r"nothing moved for 6 s \(-hang_minutes 0.1\) at step 4\d: rank \d on ", log)
        assert re.search(r"Thread 0x.*(exact|distributed)\.py", log, re.S), "no stacks in the rank's own log"


def test_a_single_process_that_hangs_is_ended_and_logs_its_stack(start):
    """It is not ended if it has a terminal, where somebody may be at a breakpoint."""
    pause = {"fault": {"do": "pause", "step": 45}, "cpu": 1}
    run = start("single", "-hang_minutes", MINUTES, **pause)
    on_terminal = start("terminal", "-hang_minutes", MINUTES, **pause, terminal=("stdin",))
    assert run.wait() == 1, run.text()
    message = "nothing moved for 6 s (-hang_minutes 0.1) at step 45: rank 0 on "
    assert message in run.text() and run.outcome()["state"] == "running", "as for a killed process"
    assert "in pause" in (run.folder / "logs" / "rank_0.log").read_text()
    until(lambda: "nothing moved for" in on_terminal.log.read_text())
    on_terminal.release()
    assert on_terminal.wait() == 0, on_terminal.text()


@pytest.fixture
def endings(monkeypatch):
    """The exit codes with which the watchdog would end this process; an event is set with the first one."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(watchdog.sys, "stdin", None)
    monkeypatch.setattr(watchdog, "SAY_AFTER_S", 0.2)
    return ended


def test_a_process_that_hangs_in_a_log_call_is_ended(endings):
    """A dead disk of the log file or an unread terminal causes this. The report must not wait for logging's lock."""
    handler = logging.NullHandler()
    handler.name = "lib.file"
    handler.handle = handler.emit = lambda record: handler.acquire() and handler.release()
    logging.getLogger().addHandler(handler)
    handler.acquire()
    try:
        with watchdog.watch(0.1 / 60):
            assert endings.wait(SOON_S)
    finally:
        handler.release()
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("step", [None, 3])
def test_a_process_without_its_agent_gets_sigterm_from_the_first_moment_and_once(step, monkeypatch):
    signals, looks = [], []
    monkeypatch.setattr(watchdog.distributed, "has_agent", lambda: not looks.append(1))
    monkeypatch.setattr(watchdog, "PARENT", -1)
    monkeypatch.setattr(watchdog.os, "kill", lambda *signal: signals.append(signal))
    with watchdog.watch(1 / 60):
        watchdog.moved(step)
        until(lambda: len(looks) > 1 or len(signals) > 1)
    assert signals == [(os.getpid(), signal.SIGTERM)]


def test_what_a_process_does_is_said_before_it_is_ended_and_movement_prevents_both(endings, caplog):
    with watchdog.watch(0.6 / 60):
        watchdog.begin("waiting for the mail")
        until(lambda: "mail" in caplog.text)
        assert "(-hang_minutes 0.01) before the first step: rank 0 on " in caplog.text
        assert not endings.is_set()
        watchdog.begin("reading")
        watchdog.moved(step=3)
        caplog.clear()
        assert endings.wait(SOON_S)
    assert "at step 3: rank 0 on " in caplog.text and "reading; the stacks of its threads" in caplog.text


def test_a_suspended_process_does_not_count_as_hanging(tmp_path):
    """A scheduler may suspend a job by SIGSTOP for longer than -hang_minutes."""
    (tmp_path / "logs").mkdir()
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=step_until_message, args=(tmp_path, reader))
    process.start()
    until(lambda: (tmp_path / "started").exists())
    for _ in range(2):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(TIMEOUT_S / 4)
    writer.send("end")
    process.join(SOON_S)
    assert process.exitcode == 0


def step_until_message(folder, reader):
    """A run whose steps take a third of the limit."""
    with watchdog.watch(TIMEOUT_S / 60):
        watchdog.moved(step=3)
        (folder / "started").touch()
        while not reader.poll():
            for _ in range(10):  # a single sleep would be over as soon as the process continues
                time.sleep(TIMEOUT_S / 30)
            watchdog.moved(step=3)


class WaitsInForward(torch.nn.Linear):
    """Waits for ever in its first pass."""

    def forward(self, inputs):
        threading.Event().wait()


ZEROS = Tensors(torch.zeros(16, 64), torch.zeros(16, dtype=torch.int64))
WAITS = Items([threading.Event().wait] * 16)


@pytest.mark.parametrize(
    ("dataset", "model", "flags", "message"),
    [
        (lambda args: threading.Event().wait(), None, "", "get_dataset of -dataset waits"),
        (lambda args: WAITS, None, "-workers 0", "waiting for a batch of Items from this process"),
        (lambda args: WAITS, None, "-workers 2", "waiting for a batch of Items from 2 loader processes (-workers)"),
        (lambda args: ZEROS, lambda args: threading.Event().wait(), "", "building -arch waits"),
        (lambda args: ZEROS, lambda args: WaitsInForward(64, 4), "-workers 2", "computing a batch"),
    ],
    ids=["get_dataset", "sample", "loader", "get_model", "forward"],
)
def test_a_start_that_hangs_says_where_and_is_ended(dataset, model, flags, message, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "SAY_AFTER_S", 2.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without pytest's, as in a run
    model = model or (lambda args: torch.nn.Linear(64, 4))
    with plugins(dataset={"waits": dataset}, arch={"waits": model}):
        small = "-dataset waits -arch waits -cpu 2 -batch_size 4 -num_classes 4 -hang_minutes 0.04"
        assert train.main([*f"{small} {flags}".split(), "-out", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert message in "".join([shown.out, shown.err, *[file.read_text() for file in tmp_path.glob("*/logs/*.log")]])


@pytest.mark.parametrize("more", [{"WORLD_SIZE": 3}, {"MASTER_PORT": 9}], ids=["a rank is missing", "no store"])
def test_who_waits_for_other_processes_says_for_whom_and_where(more, tmp_path, monkeypatch, capfd):
    real = environment.rank_variables
    variables = lambda *args: real(*args) | {name: str(value) for name, value in more.items()}  # noqa: E731
    monkeypatch.setattr(environment, "rank_variables", variables)
    monkeypatch.setattr(watchdog, "SAY_AFTER_S", 1.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without pytest's, as in a run
    assert train.main(f"-arch mlp -cpu 2 -hang_minutes 0.02 -out {tmp_path}".split()) == 1
    [(name, value)] = more.items()
    wanted = rf"rank \d on .*waiting for the other processes of the run, .* {name}={value}\b"
    assert re.search(wanted, capfd.readouterr().err)


@pytest.mark.parametrize("kind", ["dataset", "arch", "trainer"])
def test_a_plugin_that_hangs_while_it_is_imported_is_named_and_ended(kind, tmp_path, monkeypatch, endings, caplog):
    launch.prepare(parsed("-cpu 1"))  # imports what is slow, and does not hang
    text = f"import threading; threading.endings.wait({SOON_S})\nget_model = get_dataset = Trainer = None"
    plugin_folder(monkeypatch, tmp_path, kind, "waits", text)
    monkeypatch.setattr(threading, "endings", endings, raising=False)
    args = parsed("-cpu 1 -hang_minutes 0.01")
    vars(args)[kind] = "waits"
    launch.prepare(args)
    del sys.modules[f"lib.{kind}.waits"]
    assert endings.is_set() and f": importing -{kind} waits" in caplog.text
