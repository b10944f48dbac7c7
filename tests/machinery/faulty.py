"""A trainer with faults for tests: the variable FAULT says which fault, when, and on which rank."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from lib.config import plugins
from lib.trainer import trainer
from lib.utils import preemption
from lib.utils.errors import STOP_SIGNALS

LIMIT = 120  # seconds a rank waits for the test to release it, or for its signal handler


class Trainer(trainer.Trainer):
    """The default trainer with one fault. Its ranks vote at every step, or every VOTE_S seconds."""

    def __init__(self, *parts):
        preemption.ASK_EVERY_S = float(os.environ.get("VOTE_S", 0))
        super().__init__(*parts)
        self.fault = json.loads(os.environ.get("FAULT", "{}"))
        self.act("start")

    def training_step(self, batch):
        self.act(self.state.step)
        return super().training_step(batch)

    def act(self, moment):
        fault = self.fault
        if fault.get("step") == moment and fault.get("rank", self.world.rank) == self.world.rank:
            self.fault = {}
            write_note(Path(fault["notes"]), self.world.rank)
            FAULTS[fault["do"]](fault)
            if fault.get("signal") in {number.name for number in STOP_SIGNALS}:
                wait(lambda: self.stop.signalled_at is not None)


def write_note(folder: Path, rank: int):
    facts = {"pid": os.getpid(), "parent": os.getppid(), "time": time.monotonic(), "environ": dict(os.environ)}
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"rank_{rank}.partial"
    partial.write_text(json.dumps({**facts, "threads": torch.get_num_threads()}))
    partial.replace(folder / f"rank_{rank}.json")


def pause(fault):
    wait((Path(fault["notes"]) / "go").exists)


def wait(condition):
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and not condition():
        time.sleep(0.01)


def fail(fault):
    raise ValueError(fault.get("text", "a sample that nobody can bear"))


def fail_and_linger(fault):
    """Fail while a thread keeps the process alive."""
    threading.Thread(target=time.sleep, args=(LIMIT,)).start()
    fail(fault)


def send_signal(fault):
    os.kill(os.getpid(), signal.Signals[fault["signal"]])


def debug(fault):
    breakpoint()


FAULTS = {act.__name__: act for act in (pause, fail, fail_and_linger, send_signal, debug)}


def register():
    names_before = plugins.names
    plugins.names = lambda kind: [*names_before(kind), "faulty"] if kind == "trainer" else names_before(kind)
    sys.modules["lib.trainer.faulty"] = sys.modules[__name__]
