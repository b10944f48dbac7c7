"""The processes of a run as their parent sees them: waits for them, and says which failure explains the others."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock

from lib.launch import multinode, signals
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE

END_S = 2.0  # after the first failure: for the others to end, and for a rank that lost another to keep silent


def watch(children: list[BaseProcess], meeting: multinode.Meeting, passed: list[int], first: Lock) -> int:
    """Wait for the children. Returns the run's exit code. The first failure, here or elsewhere, ends the rest.

    Args:
        children: the processes of this machine, by local rank.
        meeting: the other machines, which are sent the failure.
        passed: the signals that were passed on to the children.
        first: the child that takes it prints why it failed. No other one does.
    """
    failure, running = None, True
    while running and not failure:
        running = wait(children, meeting.links)
        failure = first_failure(children, meeting, passed)
    if not failure:
        code = max(child.exitcode or FINISHED for child in children)
        meeting.report(code)
        return code
    until = time.monotonic() + END_S / 2
    while time.monotonic() < until and not any(child.exitcode for child in children):
        time.sleep(0.05)  # it failed elsewhere, and ours may be about to say why
    code, message = first_failure(children, meeting, passed) or failure
    first.acquire(block=False)  # a child that fails only now says nothing
    meeting.report(FAILED if code == STOPPED else code, message)
    end(children, END_S)
    if code != USAGE:  # it stands there
        multinode.say(message)
    return code


def wait(children: list[BaseProcess], links: list[multinode.Link]) -> bool:
    """Wait for news, but not for ever: a child that has just ended wakes nobody. Returns whether a child runs."""
    running = [child.sentinel for child in children if child.exitcode is None]
    if running:
        connection.wait([*running, *(link.pipe for link in links if link.code is None)], timeout=1.0)
    for link in links:
        link.listen()
    return bool(running)


def first_failure(
    children: list[BaseProcess], meeting: multinode.Meeting, passed: list[int]
) -> tuple[int, str] | None:
    """Return exit code and message of the failure that explains the others, None if there is none."""
    fine = (None, FINISHED, STOPPED)
    failed = [rank for rank, child in enumerate(children) if child.exitcode not in fine]
    if not failed:
        return next(((FAILED, link.message) for link in meeting.links if link.code not in fine), None)
    # torch aborts a rank that lost another.
    local_rank = min(failed, key=lambda rank: children[rank].exitcode == -signal.SIGABRT)
    code, rank = children[local_rank].exitcode or FAILED, meeting.first_rank + local_rank
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
