"""The processes of a run as their parent sees them: waits for them, and says which failure explains the others."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock

from lib.launch import signals
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE

END_S = 2.0  # after the first failure: for the others to end, and for a rank that lost another to keep silent


def watch(children: list[BaseProcess], passed: list[int], first: Lock) -> int:
    """Wait for the children, by rank. Returns the run's exit code. The first failure ends the rest.

    Args:
        children: the processes of the run.
        passed: the signals that were passed on to them.
        first: the child that takes it prints why it failed. No other one does.
    """
    running, failure = children, None
    while running and not failure:
        # A child that ended before the wait, or whose own children live, wakes nobody: so a second at most.
        connection.wait([child.sentinel for child in running], timeout=1.0)
        running = [child for child in children if child.exitcode is None]
        failure = first_failure(children, passed)
    if not failure:
        return max(child.exitcode or FINISHED for child in children)
    code, message = failure
    first.acquire(block=False)  # a child that fails only now says nothing
    end(children, END_S)
    if code != USAGE:  # it stands there
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    return code


def first_failure(children: list[BaseProcess], passed: list[int]) -> tuple[int, str] | None:
    """Return exit code and message of the failure that explains the others, None if there is none."""
    failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, FINISHED, STOPPED)]
    if not failed:
        return None
    rank = min(failed, key=lambda rank: children[rank].exitcode == -signal.SIGABRT)  # torch aborts who lost another
    code = children[rank].exitcode or FAILED
    if code > 0:
        return code, f"rank {rank} failed with exit code {code}; the others are ended"
    name = signal.Signals(-code).name
    if -code in passed:
        return STOPPED, signals.OUTSIDE.format(name)
    return FAILED, f"rank {rank} was killed by {name}; the others are ended"


def end(children: list[BaseProcess], seconds: float) -> None:
    """Give children that still run some seconds to end by themselves, then kill them."""
    until = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    for child in children:
        child.kill()
        child.join()


@contextlib.contextmanager
def pass_signals_to(children: list[BaseProcess]) -> Iterator[list[int]]:
    """Pass signals on to the children while the block runs, and end them after it. Yields a list of what came."""
    passed = []

    def pass_on(number: int, frame: object) -> None:
        passed.append(number)
        for child in children:
            # A child that was reaped in this instant still seems alive. An error from here would be lost in
            # multiprocessing's own `except OSError`, and the child's exit code with it.
            with contextlib.suppress(ProcessLookupError):
                if child.pid and child.is_alive():
                    os.kill(child.pid, number)

    with signals.handled_by(pass_on):
        try:
            yield passed
        finally:
            end(children, 0.0)
