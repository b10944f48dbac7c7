"""Notices that a run hangs, says at which step each rank stood, and writes down what this one was doing."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import FAILED

log = logging.getLogger(__name__)
MOST_PULSE_S = 10.0  # between two signs of life of a rank
NAMED = 16  # ranks, in a report


class Hang(RuntimeError):
    """The processes of a run wait for one that does not come."""


@contextlib.contextmanager
def watched(state, ballot, world: World, minutes: float, folder: Path, saving=lambda: False):
    """A Watch over the run while the block lasts. Raises Hang, which names the ranks and steps, in place of what a
    collective raises after such a wait. A single process, which has none, is interrupted. `saving()`: whether this
    process writes its part of a checkpoint, however slow the disk is."""
    watch = Watch(state, ballot, world, minutes * 60, folder / "logs" / f"rank_{world.rank}.log", saving)
    before = signal.signal(signal.SIGALRM, watch.interrupt)
    thread = threading.Thread(target=watch.look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield watch
    except RuntimeError as error:
        if isinstance(error, Hang) or watch.stalled_s() < watch.patience_s:
            raise
        watch.told.wait(3 * watch.pulse_s)
        raise Hang(watch.report or f"nothing moved for {watch.stalled_s():.0f} s") from error
    finally:
        watch.over.set()
        thread.join(watch.pulse_s)
        signal.signal(signal.SIGALRM, before)


class Watch:
    """A rank's eye on the others: each leaves its step in the rendezvous store now and then."""

    def __init__(self, state, ballot, world: World, patience_s: float, log_file: Path, saving=lambda: False):
        self.state, self.ballot, self.world, self.patience_s, self.file = state, ballot, world, patience_s, log_file
        self.saving = saving
        self.pulse_s = min(MOST_PULSE_S, patience_s / 12)
        self.begun, self.place, self.since = state.step, self.where(), time.monotonic()
        self.settled = False
        self.over, self.told, self.report = threading.Event(), threading.Event(), ""

    def mark(self):
        """A step is done: from the first on the others must answer within -hang_minutes; collectives wait a little
        longer, so that the report comes first."""
        if not self.settled:
            self.settled = True
            ahead = 0.0 if self.world.device.type == "cpu" else self.patience_s / 2  # of a GPU, which runs behind
            if self.world.size > 1:
                distributed.set_patience(self.patience_s + max(3 * self.pulse_s, ahead))

    def where(self) -> tuple:
        """Another one after every step and every batch of an evaluation."""
        return self.state.step, self.ballot.ticks, self.ballot.since

    def stalled_s(self) -> float:
        """Seconds since this rank last got on; 0 before its first step, which may compile or wait for data."""
        if self.where() != self.place or self.saving():
            self.place, self.since = self.where(), time.monotonic()
        return time.monotonic() - self.since if self.settled else 0.0

    def look(self):
        """Leaves signs of life, and when nothing has moved for too long, reports."""
        store, pulse = distributed.store_of_own(self.pulse_s) if self.world.size > 1 else None, 0
        while not self.rest():
            pulse += 1
            stalled = self.stalled_s() >= self.patience_s
            heard = _heard(store, self.world, {"step": self.state.step, "pulse": pulse}, read=stalled)
            if not stalled:
                self.told.clear()
            elif not self.told.is_set() and not self.over.wait(1.5 * self.pulse_s):
                again = _heard(store, self.world, {"step": self.state.step, "pulse": pulse + 1}, read=True)
                if self.stalled_s() >= self.patience_s:
                    self.tell(told(heard, again))

    def rest(self) -> bool:
        """Waits for the next pulse. Whether the run is over."""
        begun = time.monotonic()
        over = self.over.wait(self.pulse_s)
        if time.monotonic() - begun > 3 * self.pulse_s:  # this process was stopped, as where Slurm suspends a job
            self.since = time.monotonic()
        return over

    def tell(self, text: str):
        """Logs the report, and in this rank's own log the stacks of its threads."""
        self.report = f"nothing moved for {self.stalled_s():.0f} s (-hang_minutes {self.patience_s / 60:g}): {text}"
        log.error("%s; what this rank was doing: %s", self.report, self.file)
        with self.file.open("ab") as file:
            faulthandler.dump_traceback(file)
        self.told.set()
        if self.world.size == 1 and not (sys.stdin and sys.stdin.isatty()):  # else somebody may be at a breakpoint
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            if not self.over.wait(3 * self.pulse_s):  # it waits in C code, and has no ear for signals
                os._exit(FAILED)

    def interrupt(self, number, frame):
        """Ends the wait of a single process's main thread."""
        raise Hang(self.report)


def _heard(store, world: World, word: dict, read: bool) -> list[dict | None]:
    """Leaves this rank's word in the store; gives the last word of every rank, None of one that left none."""
    words: list = [None] * world.size
    if world.size == 1:
        return [word]
    try:
        store.set(f"watchdog/{world.rank}", json.dumps(word))
        for rank in range(world.size if read else 0):
            key = f"watchdog/{rank}"
            words[rank] = json.loads(store.get(key)) if store.check([key]) else None
    except RuntimeError as error:  # the process that holds the store is one of those that hang, or gone
        log.debug("the rendezvous store does not answer: %s", error)
    return words


def told(heard: list, again: list) -> str:
    """Where each rank stands, by what was heard of it twice: the silent and those behind first."""
    places: dict = {}
    for rank, (one, two) in enumerate(zip(heard, again, strict=True)):
        step = two["step"] if two else -1
        alive = bool(one and two and one["pulse"] != two["pulse"])
        places.setdefault((alive, step), []).append(rank)
    return "; ".join(_told(ranks, step, alive) for (alive, step), ranks in sorted(places.items()))


def _told(ranks: list[int], step: int, alive: bool) -> str:
    named = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    who = f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
    where = f"at step {step}" if step >= 0 else "before its first step"
    return (
        f"{who} {'waits' if len(ranks) == 1 else 'wait'} {where}"
        if alive
        else f"{who} gave no sign of life, and was last heard of {where}"
    )
