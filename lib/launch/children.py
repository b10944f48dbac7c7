"""The processes of a run as their parent sees them: waits for them, and says which failure explains the others."""

import contextlib
import enum
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from lib.launch import multinode, signals
from lib.utils.errors import ABORTED, FAILED, FINISHED, STOPPED

SETTLE_S, END_S = 0.3, 2.0  # for other ranks to report failures; for a cause to be reported, and for ranks to end
RAISED = "rank {} failed with exit code {}; the others are ended"


class Cause(enum.IntEnum):
    """Why a process failed; of several failures the one with the lowest cause explains the others."""

    SECOND_CTRL_C = 0
    KILLED = 1
    RAISED = 2
    SIGABRT = 3  # torch's way to end a rank that lost another
    ELSEWHERE = 4  # on another machine
    LOST_PEER = 5


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

    def listen(self):
        """Receive its report, if there is one."""
        try:
            if not self.reader.closed and self.reader.poll():
                self.report = self.reader.recv()
                self.reader.close()
        except (EOFError, OSError):  # it ended without one, or while it sent it
            self.reader.close()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, negative after a signal."""
        return self.process.exitcode

    @property
    def failed(self) -> bool:
        return bool(self.report) or self.code not in (None, FINISHED, STOPPED)  # after a report its end may hang

    def failure(self, passed: list[int]) -> Failure:
        """Return why it failed; `passed` are the signals that it got from its parent."""
        if self.report:
            return self.report
        code = self.code or FAILED
        if code == ABORTED:
            return Failure(Cause.SECOND_CTRL_C, "ended at the second Ctrl-C; the last checkpoint is good", ABORTED)
        if code > 0:
            return Failure(Cause.RAISED, RAISED.format(self.rank, code))
        number = signal.Signals(-code)
        if number in passed:
            return Failure(Cause.KILLED, signals.OUTSIDE.format(number.name), STOPPED)
        cause = Cause.SIGABRT if number == signal.SIGABRT else Cause.KILLED
        return Failure(cause, f"rank {self.rank} was killed by {number.name}; the others are ended")


def watch(children: list[Child], meeting: multinode.Meeting, passed: list[int]) -> int:
    """Wait for the children. Returns the run's exit code.

    The first failure, here or on another machine, ends the rest. It is printed and sent to the other machines.
    """
    links = meeting.links
    while not any(one.failed for one in (*children, *links)) and wait(children, links):
        pass
    if not any(one.failed for one in (*children, *links)):
        code = max(child.code or FINISHED for child in children)
        meeting.report(code)
        return code
    settled = time.monotonic() + (3 * SETTLE_S if links else SETTLE_S)
    while wait(children, links, SETTLE_S / 3):
        lost = first_cause(children, links, passed).cause == Cause.LOST_PEER  # its peer may still say why
        if time.monotonic() > settled + (END_S if lost else 0.0):
            break
    failure = first_cause(children, links, passed)
    print(f"{failure.traceback}train.py: {failure.message}", file=sys.stderr, flush=True)
    meeting.report(FAILED if failure.exit_code == STOPPED else failure.exit_code, failure.message)
    end(children, END_S)
    return failure.exit_code


def wait(children: list[Child], links: list[multinode.Link], timeout: float = 1.0) -> bool:
    """Wait for news, but not for ever: a child that has just ended wakes nobody. Returns whether a child runs."""
    running = [child for child in children if child.code is None]
    pipes = [child.reader for child in running if not child.reader.closed]
    pipes += [link.pipe for link in links if link.code is None]
    if running:
        connection.wait([*pipes, *(child.process.sentinel for child in running)], timeout)
    for one in (*children, *links):
        one.listen()
    return bool(running)


def first_cause(children: list[Child], links: list[multinode.Link], passed: list[int]) -> Failure:
    """Return the failure that explains the others; `passed` are the signals that this process passed on."""
    failures = [child.failure(passed) for child in children if child.failed]
    failures += [Failure(Cause.ELSEWHERE, link.message) for link in links if link.failed]
    return min(failures, key=lambda failure: (failure.cause, failure.time))


def end(children: list[Child], seconds: float):
    """Give children that still run some seconds to end by themselves, then kill them."""
    until = time.monotonic() + seconds
    for one in children:
        one.process.join(max(0.0, until - time.monotonic()))
    for one in children:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()


@contextlib.contextmanager
def pass_signals_to(children: list[Child]):
    """Pass signals on to the children while the block runs, and end them after it. Yields a list of what came."""
    passed = []

    def pass_on(number, frame):
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
