"""Notices that a run hangs, says at which step each rank stood, and ends the run."""

import contextlib
import faulthandler
import json
import logging
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import FAILED

log = logging.getLogger(__name__)
LONGEST_PULSE_S = 10.0  # between two signs of life of a rank


class Hang(RuntimeError):
    """The processes of a run wait for one that does not come."""


@contextlib.contextmanager
def watched(watch: "Watch") -> Iterator[None]:
    """Watch over the run in the block.

    Raises:
        Hang: names the ranks and steps, in place of what a collective raises after such a wait.
    """
    thread = threading.Thread(target=watch.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        if not watch.report:
            raise
        raise Hang(watch.report) from error
    finally:
        watch.over.set()
        thread.join(watch.pulse_s)


class Watch:
    """A rank's view of the others: at each pulse, a rank leaves its step in the rendezvous store.

    `saving()`: whether this process is writing its part of a checkpoint, however slow the disk is.
    """

    def __init__(self, state: Any, ballot: Any, world: World, minutes: float, folder: Path, saving: Callable):
        self.state, self.ballot, self.world, self.saving = state, ballot, world, saving
        self.patience_s = minutes * 60
        self.log_file = folder / "logs" / f"rank_{world.rank}.log"
        self.pulse_s = min(LONGEST_PULSE_S, self.patience_s / 12)
        self.patience = math.ceil(self.patience_s / self.pulse_s)  # pulses
        self.stalled = 0  # pulses since the last progress: of a process that is suspended, none is counted
        self.stepped = False  # the first step may take any time
        self.over, self.report = threading.Event(), ""

    def mark(self) -> None:
        """Note that a step is done. After the first, collectives wait a little longer than -hang_minutes."""
        if not self.stepped and self.world.size > 1:
            queued_s = 0.0 if self.world.device.type == "cpu" else self.patience_s / 2  # a GPU runs behind
            distributed.set_patience(self.patience_s + max(4 * self.pulse_s, queued_s))
        self.stepped = True

    def run(self) -> None:
        """Leave signs of life, and report once nothing has moved for too long."""
        store = distributed.store_of_own(self.pulse_s) if self.world.size > 1 else None
        place = None
        self.exchange(store, read=False)  # the request for all signs fails without one
        while not self.over.wait(self.pulse_s):
            self.stalled += 1
            now = self.state.step, self.ballot.ticks, self.ballot.since  # differs after every step or batch
            if now != place or self.saving() or not self.stepped:
                place, self.stalled, self.report = now, 0, ""
            signs = self.exchange(store, read=self.stalled == self.patience)
            if self.stalled == self.patience:
                self.end(describe(signs, self.patience_s / 2))

    def exchange(self, store: Any, read: bool) -> list[dict]:
        """Leave a sign of life in the store. Return the last one of every rank, in one request: docs/scaling.md."""
        mine = {"step": self.state.step, "time": time.time()}
        if store is None:
            return [mine]
        try:
            store.set(f"watchdog/{self.world.rank}", json.dumps(mine))
            keys = [f"watchdog/{rank}" for rank in range(self.world.size)]
            return [json.loads(sign) for sign in store.multi_get(keys)] if read else []
        except RuntimeError as error:  # the process that holds the store is one of those that hang, or gone
            log.debug("the rendezvous store does not answer: %s", error)
            return []

    def end(self, text: str) -> None:
        """Log the report, and in this rank's own log the stacks of its threads. End a single process.

        It has no collectives that would fail. At a terminal, somebody may be at a breakpoint.
        """
        self.report = f"nothing moved for {self.patience_s:.0f} s (-hang_minutes {self.patience_s / 60:g}): {text}"
        log.error("%s; what this rank was doing: %s", self.report, self.log_file)
        with self.log_file.open("ab") as file:
            faulthandler.dump_traceback(file)
        if self.world.size == 1 and not (sys.stdin and sys.stdin.isatty()):
            for child in multiprocessing.active_children():  # loader processes, one of which may be what hangs
                child.kill()
            os._exit(FAILED)


def describe(signs: list[dict], silence_s: float) -> str:
    """Return where each rank stands: first those that gave no sign of life for so long, then those behind."""
    groups: dict = {}
    for rank, sign in enumerate(signs):
        groups.setdefault((time.time() - sign["time"] < silence_s, sign["step"]), []).append(str(rank))
    words = {False: "no sign of life since step", True: "waiting at step"}
    found = [f"{words[alive]} {step}: rank {', '.join(ranks)}" for (alive, step), ranks in sorted(groups.items())]
    return "; ".join(found) or "the rendezvous store does not answer"
