"""Notices that a run hangs: each rank logs its step and what it was doing, and a single process ends."""

import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import FAILED

log = logging.getLogger(__name__)
LONGEST_PULSE_S = 10.0  # between two looks at the run


class Watch:
    """Watches the steps of this rank.

    `saving()`: whether this process is writing its part of a checkpoint, however slow the disk is.
    """

    def __init__(self, state: Any, ballot: Any, world: World, minutes: float, folder: Path, saving: Callable):
        self.state, self.ballot, self.world, self.saving = state, ballot, world, saving
        self.patience_s = minutes * 60
        self.pulse_s = min(LONGEST_PULSE_S, self.patience_s / 12)
        self.log_file = folder / "logs" / f"rank_{world.rank}.log"
        self.stepped = False  # the first step may take any time
        self.over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch over the run in the block."""
        thread = threading.Thread(target=self.run, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join(self.pulse_s)

    def mark(self) -> None:
        """Note that a step is done. From then on, collectives fail a little later than -hang_minutes."""
        if not self.stepped and self.world.size > 1:
            queued_s = 0.0 if self.world.device.type == "cpu" else self.patience_s / 2  # a GPU runs behind
            distributed.set_patience(self.patience_s + max(4 * self.pulse_s, queued_s))
        self.stepped = True

    def run(self) -> None:
        """Report once nothing has moved for too long. While this process is suspended, no time counts."""
        place, stalled, patience = None, 0, math.ceil(self.patience_s / self.pulse_s)
        while not self.over.wait(self.pulse_s):
            stalled += 1
            now = self.state.step, self.ballot.ticks, self.ballot.since  # differs after every step or batch
            if now != place or self.saving() or not self.stepped:
                place, stalled = now, 0
            if stalled == patience:
                self.report()

    def report(self) -> None:
        """Log the step, and the stacks of this rank's threads. The collectives of several ranks fail soon.

        A single process ends here, unless it has a terminal, where somebody may be at a breakpoint.
        """
        text = "nothing moved for %.0f s (-hang_minutes) at step %d; what this rank was doing: %s"
        log.error(text, self.patience_s, self.state.step, self.log_file)
        with contextlib.suppress(OSError), self.log_file.open("ab") as file:
            faulthandler.dump_traceback(file)
        if self.world.size == 1 and not (sys.stdin and sys.stdin.isatty()):
            for child in multiprocessing.active_children():  # loader processes, one of which may be what hangs
                child.kill()
            os._exit(FAILED)
