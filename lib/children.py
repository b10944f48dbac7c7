"""The processes of a run on this machine as their parent sees them: started, sent its signals, watched, and ended
when one of them fails, here or on another machine.
"""

import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from lib import nodes
from lib.utils.errors import ABORTED, FAILED, FINISHED, STOPPED, STOPPING, USAGE, UsageError

SETTLE_S, END_S = 0.3, 2.0  # to hear of every rank that failed; to hear why, and for the others to go by themselves
OUTSIDE = "{} before or after the training: stopped at once, and what is saved is whole"


@dataclass
class Child:
    """A process of the run as its parent sees it."""

    rank: int
    process: BaseProcess
    reader: connection.Connection
    said: dict = field(default_factory=dict)  # what it reported before it ended

    def listen(self):
        """Takes its report, the only thing it sends, if there is one."""
        try:
            if not self.reader.closed and self.reader.poll():
                self.said = self.reader.recv()
                self.reader.close()
        except (EOFError, OSError):  # it ended without, or in the middle of it
            self.reader.close()

    @property
    def code(self):
        """Its exit code; None while it runs, negative after a signal."""
        return self.process.exitcode

    @property
    def failed(self) -> bool:
        return bool(self.said) or self.code not in (None, FINISHED, STOPPED)  # a report is enough: its end may hang


@dataclass
class Work:
    """What every child is given."""

    run: Callable[[], int]
    first: int  # rank of the first process of this machine
    grace_s: float
    alive: connection.Connection  # ends when the parent does
    inherited: list  # what a forked child has open and must not


def start(context, local_rank: int, work: Work) -> Child:
    """Starts one process of the run."""
    reader, writer = context.Pipe(duplex=False)
    rank = work.first + local_rank
    process = context.Process(target=child, args=(local_rank, work, writer), name=f"rank {rank}")
    process.start()
    writer.close()
    return Child(rank, process, reader)


def child(local_rank: int, work: Work, writer):
    """What a child does: its rank into the environment, the run, a report of how it ended."""
    for one in work.inherited:
        one.close()
    handle(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.environ.update(RANK=str(work.first + local_rank), LOCAL_RANK=str(local_rank))
    threading.Thread(target=end_with_parent, args=(work.alive, work.grace_s), daemon=True).start()
    try:
        code = work.run()
    except UsageError as error:
        code = USAGE
        writer.send({"usage": str(error), "time": time.monotonic()})
    except Exception as error:
        code = FAILED
        told = {"error": traceback.format_exc(), "time": time.monotonic()}
        writer.send({**told, "lost": importlib.import_module("lib.utils.run_folder").lost_peer(error)})
    handle(signal.SIG_IGN)  # told again to stop, it would end with another code
    writer.close()
    sys.exit(code)


def end_with_parent(alive: connection.Connection, grace_s: float):
    """Stops this process, its state saved, when the parent is gone; after the grace it ends without."""
    connection.wait([alive])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + 1)
    os._exit(FAILED)


@contextlib.contextmanager
def passing_on(children):
    """Signals reach the children while the block runs, after which none is left. Gives a list of those that came."""
    passed = []

    def pass_on(number, frame):
        passed.append(number)
        for one in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process.pid, number) if one.process.is_alive() else None

    before = handle(pass_on)
    try:
        yield passed
    finally:
        end(children, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def handle(handler) -> dict:
    """Sets the handler of signals that are passed on, but for what nohup ignores. Returns the handlers before."""
    heard = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def watch(children, others: nodes.Others, passed: list[int]) -> int:
    """Waits for the children; the first that fails is told, also to the other machines, and the rest is ended. So it
    is when another machine fails. Returns the run's exit code."""
    everybody = [*children, *others.links]
    while not any(one.failed for one in everybody) and wait(children, others.links):
        pass
    if not any(one.failed for one in everybody):
        code = max(one.code for one in children)
        others.tell(code)
        return code
    settled = time.monotonic() + (SETTLE_S if not others.links else 3 * SETTLE_S)
    while time.monotonic() < settled + (0.0 if explained(everybody) else END_S):
        if not wait(children, others.links, SETTLE_S / 3):
            break
    code, trace, text = verdict(children, others.links, passed)
    print(f"{trace}train.py: {text}", file=sys.stderr, flush=True)
    others.tell(FAILED if code == STOPPED else code, text)  # they are not to wait for this one
    end(children, END_S)
    return code


def wait(children, links=(), timeout: float = 1.0) -> bool:
    """Waits for news of a child or another machine, not for ever: a child that ended just before wakes nobody. False
    if no child runs."""
    running = [one for one in children if one.code is None]
    pipes = [one.reader for one in running if not one.reader.closed]
    heard = [*pipes, *(one.process.sentinel for one in running), *(one for one in links if not one.over)]
    connection.wait(heard, timeout) if running else None
    for one in (*children, *links):
        one.listen()
    return bool(running)


def explained(everybody) -> bool:
    """Whether one of those that failed says more than that it lost another one."""
    return any(one.failed and not one.said.get("lost") for one in everybody)


def verdict(children, links, passed: list[int]) -> tuple[int, str, str]:
    """The exit code of a failed run, a traceback and what to tell: the rank that was killed, or else the one that
    failed first, here or on another machine. Those that failed because they lost another come last."""
    if any(one.code == ABORTED for one in children):
        return ABORTED, "", "ended at the second Ctrl-C; the last checkpoint is good"
    reported = any(one.said and not one.said.get("lost") for one in children)
    killed = [one for one in children if one.code is not None and one.code < 0 and not one.said]
    aborted = [] if reported else killed  # torch aborts a rank that lost another, which says more
    killed = [one for one in killed if one.code != -signal.SIGABRT] or aborted
    if killed:
        number, name = -killed[0].code, signal.Signals(-killed[0].code).name
        if number in passed:
            return STOPPED, "", OUTSIDE.format(name)
        return FAILED, "", f"rank {killed[0].rank} was killed by {name}; the others are ended"
    failed = [one for one in children if one.failed]
    mine = sorted(failed, key=lambda one: (one.said.get("lost", False), one.said.get("time", math.inf)))
    if mine and "usage" in mine[0].said:
        return USAGE, "", " ".join(mine[0].said["usage"].split())
    theirs = [one for one in links if one.failed]
    if theirs and not explained(mine):
        return FAILED, "", theirs[0].said["told"]
    code = mine[0].code or FAILED
    return (
        FAILED,
        mine[0].said.get("error", ""),
        f"rank {mine[0].rank} failed with exit code {code}; the others are ended",
    )


def end(children, seconds: float):
    """Ends what still runs: those that lost a peer have some seconds to go by themselves, the rest is killed."""
    until = time.monotonic() + seconds
    for one in children:
        one.process.join(max(0.0, until - time.monotonic()))
    for one in children:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()
