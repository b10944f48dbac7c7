"""Says what a process waits for, ends it when it hangs, and stops it when its torchrun agent is gone."""

import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from lib.utils import distributed
from lib.utils.errors import FAILED, PARENT

log = logging.getLogger(__name__)
MAX_INTERVAL_S = 1.0  # between two checks
SAY_AFTER_S = 30.0  # without a movement; then after twice as long, and so on


class Watchdog:
    """A thread that looks at the progress of this process, unless another one keeps Python's lock."""

    def __init__(self, minutes: float):
        self.minutes, self.interval_s = minutes, min(MAX_INTERVAL_S, minutes * 60 / 12)
        self.ended = threading.Event()
        self.activity = "starting"
        self.step: int | None = None  # of the optimizer; None before the first one of this start
        self.moves = 0

    def run(self) -> None:
        """Check until the end. While this process is suspended, no time counts."""
        moves, stalled, since, say_after, signalled = -1, 0, "", SAY_AFTER_S, False
        while not self.ended.wait(self.interval_s):
            if distributed.has_agent() and os.getppid() != PARENT and not signalled:  # torchrun's agent is gone
                signalled = True
                os.kill(os.getpid(), signal.SIGTERM)  # nobody would pass one on, restart this process, or end it
            if moves != self.moves:
                moves, stalled, since = self.moves, 0, time.strftime("%H:%M:%S")
                say_after = SAY_AFTER_S if self.step is None else say_after
            stalled += 1
            if stalled * self.interval_s >= say_after:
                say_after *= 2
                threading.Thread(target=self.report, args=(stalled, since, False), daemon=True).start()
            self.end_if_hung(stalled, since)

    def end_if_hung(self, stalled: int, since: str) -> None:
        """Report a hang after -hang_minutes, and end the process a little later."""
        seconds = self.minutes * 60 if self.step is not None else max(self.minutes * 60, SAY_AFTER_S)
        limit = math.ceil(seconds / self.interval_s)
        if stalled == limit:
            threading.Thread(target=self.report, args=(stalled, since, True), daemon=True).start()
        at_breakpoint = distributed.place().size == 1 and sys.stdin and sys.stdin.isatty()
        # The end of one rank ends the others: they report first.
        if stalled == limit + max(3, limit // 20) and not at_breakpoint:
            for child in multiprocessing.active_children():  # loader processes: one of them may hang
                child.kill()
            os._exit(FAILED)

    def report(self, stalled: int, since: str, stacks: bool) -> None:
        """Log for how long nothing has moved and where, maybe with all threads' stacks; a dead disk may block it."""
        where = "before the first step" if self.step is None else f"at step {self.step}"
        who = f"rank {distributed.place().rank} on {socket.gethostname()}, since {since}"
        seconds = f"{stalled * self.interval_s:.0f} s (-hang_minutes {self.minutes:g})"
        text = f"nothing moved for {seconds} {where}: {who}: {self.activity}"
        text += "; the stacks of its threads follow in its log" if stacks else ""
        log.log(logging.ERROR if stacks else logging.WARNING, text)  # on stderr while there is no log
        if stacks:
            streams = [getattr(one, "stream", 2) for one in logging.getLogger().handlers if one.name == "lib.file"]
            faulthandler.dump_traceback(streams[0] if streams else 2)


_watchdog = Watchdog(math.inf)  # of this process


@contextlib.contextmanager
def watch(minutes: float) -> Iterator[None]:
    """Watch over this process in the block: end it after so many minutes without a movement."""
    global _watchdog
    _watchdog = Watchdog(minutes)
    thread = threading.Thread(target=_watchdog.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _watchdog.ended.set()
        thread.join(SAY_AFTER_S)  # as long as it lives, no process is forked


def begin(activity: str) -> None:
    """Note what this process does from now on."""
    _watchdog.activity = activity
    _watchdog.moves += 1


def moved(step: int | None = None) -> None:
    """Note that this process is not stuck, and how many optimizer steps are done."""
    _watchdog.step = _watchdog.step if step is None else step
    _watchdog.moves += 1
