"""A stop is a request until all ranks agree on it at a step boundary.

A signal only leaves its number in a pipe. A thread reads it at once, even while the main thread waits in a
collective. It notes the request and sets a timer: if the stop takes longer than -grace_s, the process ends with a
dump of all stacks.
"""

import contextlib
import dataclasses
import faulthandler
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lib.utils import distributed, signals
from lib.utils.errors import ABORTED, STOP_SIGNALS

log = logging.getLogger(__name__)
TWICE_S = 1.0  # a terminal's Ctrl-C and a dying parent's signal each arrive twice: within this time they count once
ASK_EVERY_S = 1.0  # between votes, and between checks for a reason to stop
FILE_THERE = "the file STOP is in the run's folder"
MOST_STEPS = 100  # between votes, so that steps that grow slow are noticed


@dataclasses.dataclass(frozen=True)
class Request:
    """Why a run is to stop."""

    reason: str | None
    signal: str | None = None  # its name, where a signal is the reason


class Stopped(Exception):
    """All ranks agree to stop, in an evaluation."""


class Stop:
    """This process's request to stop, and the vote of all ranks on it, at step boundaries that all know beforehand.

    A request comes from a signal, the file STOP in the run folder, or -max_hours. Every rank must call `tick` equally
    often. Alone, each tick answers. Together, they vote about once a second: the slowest rank's time for a step
    decides after how many steps, so that a vote costs well under 1 % of the time.
    """

    def __init__(self, folder: Path, world: distributed.World, *, max_hours: float | None, grace_s: float):
        self.file, self.world, self.grace_s = folder / "STOP", world, grace_s
        self.deadline = time.monotonic() + max_hours * 3600 if max_hours else math.inf
        self.next_check = -math.inf  # of the clock, the file and the agent
        self.signalled_at: float | None = None  # time.monotonic() of the first signal
        self.parent = os.getppid()  # the launcher, also of a process that it has forked
        self.request: Request | None = None  # of this process, the first one
        self.agreed: Request | None = None  # by all ranks
        self.ticks, self.since = 0, time.monotonic()  # steps and time since the last vote
        self.vote_at = 1  # ticks
        self.voted = False  # whether all ranks voted at the last tick
        self.training = True

    def request_stop(self, reason: str, signal: str | None = None) -> None:
        """Request a stop, unless there is a request."""
        self.request = self.request or Request(reason, signal)

    def is_requested(self) -> bool:
        """Return whether this process wants to stop."""
        now = time.monotonic()
        if self.request is None and now >= self.next_check:
            self.next_check = now + ASK_EVERY_S
            if now >= self.deadline:
                self.request_stop("-max_hours is over")
            elif os.path.exists(self.file):  # noqa: PTH110  # Path.exists raises where a network disk fails
                self.request_stop(FILE_THERE)
        return self.request is not None

    def check_limit(self, step: int, limit: int | None) -> None:
        """Agree to stop once the step of -limit_steps is reached, which all ranks see at once."""
        if limit is not None and step >= limit and self.agreed is None:
            self.agreed = Request(f"-limit_steps {limit} is reached")

    def tick(self, training: bool) -> bool:
        """Return whether all ranks agree to stop, after an optimizer step (training) or a batch of an evaluation."""
        self.ticks += 1
        if self.training != training:  # their speeds differ: the first tick after a change votes
            self.training, self.ticks, self.vote_at = training, 1, 1
        self.voted = self.world.size == 1 or self.ticks >= self.vote_at
        if not self.voted:
            return False
        step_s = (time.monotonic() - self.since) / self.ticks
        stop, step_s = distributed.all_reduce_max([self.is_requested(), step_s], self.world)
        # Twice as many at most: a GPU that was just waited for takes the next steps' launches in no time.
        self.vote_at = max(1, min(MOST_STEPS, 2 * self.ticks, int(ASK_EVERY_S / max(step_s, 1e-9))))
        self.ticks, self.since = 0, time.monotonic()
        if stop:
            self.agreed = next(filter(None, distributed.gather(self.request, self.world)))
        return bool(stop)

    @property
    def cause(self) -> Request:
        """What stops the run; without a reason if nothing does."""
        return self.agreed or self.request or Request(None)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Let signals request a stop in the block; afterwards they do again what they did before."""
        ours, theirs = socket.socketpair()

        def forget_signals() -> None:  # in a process that a plugin forks, as multiprocessing.Pool does
            if theirs.fileno() >= 0:  # else nobody listens any more
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        with ours, theirs, signals.use_handler(lambda *_: None, hangup=distributed.has_agent()):  # read from the pipe
            theirs.setblocking(False)
            before_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            thread = threading.Thread(target=self._listen, args=(ours,), name="stop", daemon=True)
            thread.start()
            os.register_at_fork(after_in_child=forget_signals)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a task of a Slurm job blocks them until now
            try:
                yield
            finally:
                signal.set_wakeup_fd(before_fd)
                theirs.shutdown(socket.SHUT_WR)  # the thread reads the end, though loader processes have it open too
                thread.join()
                faulthandler.cancel_dump_traceback_later()
                if self.signalled_at and os.getppid() != self.parent:
                    log.info("the parent process is gone")  # its end sent the signal, before there was a new parent

    def _listen(self, pipe: socket.socket) -> None:
        while numbers := pipe.recv(64):
            for number in numbers:
                now = time.monotonic()
                if number in STOP_SIGNALS and self.signalled_at is None:
                    name, self.signalled_at = signal.Signals(number).name, now
                    self.request_stop(f"signal {name}", signal=name)
                    # This timer ends the process with all stacks. No Python code can be in its way.
                    faulthandler.dump_traceback_later(self.grace_s, exit=True, file=2)
                    log.info("signal %s: stopping after this step, or after -grace_s %g", name, self.grace_s)
                elif number == signal.SIGINT and now - (self.signalled_at or now) > TWICE_S:
                    os._exit(ABORTED)
