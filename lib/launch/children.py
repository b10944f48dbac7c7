"""The processes of a run as their parent sees them: waits for them, and says which failure explains the others."""

import contextlib
import enum
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from lib.launch import multinode, signals
from lib.utils.errors import ABORTED, FAILED, FINISHED, STOPPED

END_S = 2.0  # after the first failure: for other processes to report theirs, and again for them to end
RAISED = "rank {} failed with exit code {}; the others are ended"


class Cause(enum.IntEnum):
    """Why a process failed; of several failures the one with the lowest cause explains the others."""

    KILLED = 0
    RAISED = 1
    SIGABRT = 2  # torch's way to end a rank that lost another
    ELSEWHERE = 3  # on another machine
    LOST_PEER = 4


@dataclass
class Failure:
    """A failure as it is printed."""

    cause: Cause
    message: str
    exit_code: int = FAILED
    traceback: str = ""
    time: float = math.inf


@dataclass
class Child:
    """A process of the run, as its parent sees it."""

    rank: int
    process: BaseProcess
    reader: connection.Connection
    report: Failure | None = None

    def listen(self) -> None:
        """Receive its report, if there is one."""
        try:
            if not self.reader.closed and self.reader.poll():
                self.report = self.reader.recv()
                self.reader.close()
        except (EOFError, OSError):  # it ended without one, or while it sent it
            self.reader.close()

    @property
    def failed(self) -> bool:
        """Whether it reported a failure, after which its end may hang, or ended with one."""
        return bool(self.report) or self.process.exitcode not in (None, FINISHED, STOPPED)

    def failure(self, passed: list[int]) -> Failure:
        """Return why it failed; `passed` are the signals that it got from its parent."""
        if self.report:
            return self.report
        code = self.process.exitcode or FAILED
        if code == ABORTED:
            return Failure(Cause.KILLED, "ended at the second Ctrl-C; the last checkpoint is good", ABORTED)
        if code > 0:
            return Failure(Cause.RAISED, RAISED.format(self.rank, code))
        number = signal.Signals(-code)
        if number in passed:
            return Failure(Cause.KILLED, signals.OUTSIDE.format(number.name), STOPPED)
        cause = Cause.SIGABRT if number == signal.SIGABRT else Cause.KILLED
        return Failure(cause, f"rank {self.rank} was killed by {number.name}; the others are ended")


def watch(children: list[Child], meeting: multinode.Meeting, passed: list[int]) -> int:
    """Wait for the children. Returns the run's exit code.

    The first failure, here or on another machine, ends the rest. The one that explains the others is printed and
    sent to the other machines.
    """
    links, failure, running = meeting.links, None, True
    while running and not failure:
        running = wait(children, links)
        failure = first_cause(children, links, passed)
    if not failure:
        code = max(child.process.exitcode or FINISHED for child in children)
        meeting.report(code)
        return code
    until = time.monotonic() + END_S
    while running and time.monotonic() < until:
        running = wait(children, links, END_S / 20)
    failure = first_cause(children, links, passed) or failure
    if failure.cause == Cause.LOST_PEER:
        for link in links:  # another machine may say why
            link.listen(END_S)
        failure = first_cause(children, links, passed) or failure
    print(f"{failure.traceback}train.py: {failure.message}", file=sys.stderr, flush=True)
    meeting.report(FAILED if failure.exit_code == STOPPED else failure.exit_code, failure.message)
    end(children, END_S)
    return failure.exit_code


def wait(children: list[Child], links: list[multinode.Link], timeout: float = 1.0) -> bool:
    """Wait for news, but not for ever: a child that has just ended wakes nobody. Returns whether a child runs."""
    running = [child for child in children if child.process.exitcode is None]
    pipes = [child.reader for child in running if not child.reader.closed]
    pipes += [link.pipe for link in links if link.code is None]
    if running:
        connection.wait([*pipes, *(child.process.sentinel for child in running)], timeout)
    for one in (*children, *links):
        one.listen()
    return bool(running)


def first_cause(children: list[Child], links: list[multinode.Link], passed: list[int]) -> Failure | None:
    """Return the failure that explains the others, None if there is none. `passed`: the signals passed on."""
    failures = [child.failure(passed) for child in children if child.failed]
    failures += [Failure(Cause.ELSEWHERE, link.message) for link in links if link.failed]
    return min(failures, key=lambda failure: (failure.cause, failure.time), default=None)


def end(children: list[Child], seconds: float) -> None:
    """Give children that still run some seconds to end by themselves, then kill them."""
    until = time.monotonic() + seconds
    for one in children:
        one.process.join(max(0.0, until - time.monotonic()))
    for one in children:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()


@contextlib.contextmanager
def pass_signals_to(children: list[Child]) -> Iterator[list[int]]:
    """Pass signals on to the children while the block runs, and end them after it. Yields a list of what came."""
    passed = []

    def pass_on(number: int, frame: object) -> None:
        passed.append(number)
        for one in children:
            with contextlib.suppress(ProcessLookupError):
                if one.process.pid and one.process.is_alive():
                    os.kill(one.process.pid, number)

    with signals.handled_by(pass_on):
        try:
            yield passed
        finally:
            end(children, 0.0)
