"""Ends a run that hangs: each rank logs its step and what it was doing, and exits."""

import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.utils.distributed import World
from lib.utils.errors import FAILED

log = logging.getLogger(__name__)
MAX_INTERVAL_S = 10.0  # between two checks


class Watchdog:
    """Watches the steps of this rank. Waiting for a save does not count as a hang, however slow the disk is.

    It is a thread: it cannot run while another one keeps Python's lock, as in a page fault on a dead disk.
    """

    def __init__(self, state: Any, stop: Any, checkpoints: Any, world: World, minutes: float, folder: Path):
        self.state, self.stop, self.checkpoints, self.world = state, stop, checkpoints, world
        self.timeout_s = minutes * 60
        self.interval_s = min(MAX_INTERVAL_S, self.timeout_s / 12)
        self.log_file = folder / "logs" / f"rank_{world.rank}.log"
        self.ended = threading.Event()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch over the run in the block."""
        thread = threading.Thread(target=self.run, args=[self.stop.since], name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join(self.interval_s)

    def run(self, started: float) -> None:
        """Report once nothing has moved for too long. While this process is suspended, no time counts."""
        place, stalled, limit = None, 0, math.ceil(self.timeout_s / self.interval_s)
        while not self.ended.wait(self.interval_s):
            stalled += 1
            # One of these changes with every step, every batch of an evaluation, and every check of a save.
            now = self.state.step, self.stop.ticks, self.stop.since, self.checkpoints.polls
            if now != place or self.stop.since == started:  # before the first step, which a vote follows
                place, stalled = now, 0
            if stalled == limit:  # in a separate thread: a dead disk, or a lock of logging, may block it
                threading.Thread(target=self.report, name="watchdog report", daemon=True).start()
            at_breakpoint = self.world.size == 1 and sys.stdin and sys.stdin.isatty()
            if stalled == limit + 3 and not at_breakpoint:  # the end of one rank ends the others: they report first
                for child in multiprocessing.active_children():  # loader processes: one of them may hang
                    child.kill()
                os._exit(FAILED)

    def report(self) -> None:
        """Log the step and the stacks of this rank's threads."""
        text = "nothing moved for %.0f s (-hang_minutes) at step %d; what this rank was doing: %s"
        log.error(text, self.timeout_s, self.state.step, self.log_file)
        with contextlib.suppress(OSError), self.log_file.open("ab") as file:
            faulthandler.dump_traceback(file)
