"""A trainer that misbehaves when a test tells it to: the variable DEED says how, when, and on which rank.

`faulty.py WORDS` is train.py that knows it as `-trainer faulty`.
"""

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
from lib.utils.errors import STOP_SIGNALS, UsageError

LIMIT = 120  # seconds a rank waits: to be let go, or for a thread to hear of its signal
NAMES = {number.name for number in STOP_SIGNALS}


class Trainer(trainer.Trainer):
    """The usual trainer, but for its deed; its ranks vote at every step unless VOTE_S says how often."""

    def __init__(self, *parts):
        preemption.ASK_EVERY_S = float(os.environ.get("VOTE_S", 0))
        preemption.LAST_S = float(os.environ.get("LAST_S", preemption.LAST_S))
        super().__init__(*parts)
        self.deed = json.loads(os.environ.get("DEED", "{}"))

    def training_step(self, batch):
        self.act("training")
        return super().training_step(batch)

    def evaluation_step(self, model, batch, count):
        self.act("evaluation")
        return super().evaluation_step(model, batch, count)

    def act(self, where):
        deed, here = self.deed, (where, self.state.step)
        epochs = deed.get("epochs", self.state.epoch)  # done: 3 of 3 while the test split is evaluated
        if (*here, self.state.epoch) != (deed.get("where", "training"), deed.get("step"), epochs):
            return
        if deed.get("rank", self.world.rank) == self.world.rank:
            self.deed = {}
            note(Path(deed["notes"]), self.world.rank)
            DEEDS[deed["do"]](deed)
            if deed.get("signal") in NAMES:
                wait(lambda: self.stop.signalled_at is not None)


def note(folder: Path, rank: int):
    """Leaves word of this process at the moment of its deed."""
    facts = {"pid": os.getpid(), "parent": os.getppid(), "time": time.monotonic(), "environ": dict(os.environ)}
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"rank_{rank}.partial"
    partial.write_text(json.dumps({**facts, "threads": torch.get_num_threads()}))
    partial.replace(folder / f"rank_{rank}.json")


def pause(deed):
    """Waits until the test lets it go."""
    wait((Path(deed["notes"]) / "go").exists)


def wait(condition):
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and not condition():
        time.sleep(0.01)


def fail(deed):
    raise ValueError(deed.get("text", "a sample that nobody can bear"))


def fail_and_linger(deed):
    """Fails, and a thread keeps the process from ending."""
    threading.Thread(target=time.sleep, args=(LIMIT,)).start()
    fail(deed)


def refuse(deed):
    raise UsageError("-epochs 3: not today")


def strike(deed):
    """Sends itself a signal."""
    os.kill(os.getpid(), signal.Signals[deed["signal"]])


def debug(deed):
    breakpoint()


DEEDS = {act.__name__: act for act in (pause, fail, fail_and_linger, refuse, strike, debug)}


def register():
    """Makes this file known as lib/trainer/faulty.py."""
    there = plugins.names
    plugins.names = lambda kind: [*there(kind), "faulty"] if kind == "trainer" else there(kind)
    sys.modules["lib.trainer.faulty"] = sys.modules[__name__]


if __name__ == "__main__":
    import faulty

    import train

    faulty.register()
    sys.exit(train.main())
