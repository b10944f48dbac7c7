"""The processes of a run on this machine: how many, and on which GPUs; starts, watches and ends them."""

import contextlib
import enum
import functools
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from lib.launch import environment, multinode, requeue
from lib.utils.checkpoint import run_folder
from lib.utils.errors import ABORTED, FAILED, FINISHED, STOPPED, STOPPING, USAGE, UsageError, no_exit

SETTLE_S, END_S = 0.3, 2.0  # for other ranks to report failures; for a cause to be reported, and for ranks to end
VISIBLE = "CUDA_VISIBLE_DEVICES"  # ROCm reads it, too
RAISED = "rank {} failed with exit code {}; the others are ended"
OUTSIDE = "{} before or after the training: stopped at once, and what is saved is whole"


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
            return Failure(Cause.KILLED, OUTSIDE.format(number.name), STOPPED)
        cause = Cause.SIGABRT if number == signal.SIGABRT else Cause.KILLED
        return Failure(cause, f"rank {self.rank} was killed by {number.name}; the others are ended")


def start(args, target: str) -> int:
    """Run the processes of this machine. Returns the exit code."""
    count = 1 if args.debug and args.nnodes == 1 else processes(args)
    with environment.exported({VISIBLE: ",".join(chosen(args.gpus))} if args.gpus else {}):
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no torchrun agent started this process
        too_late = args.gpus and not fork_is_safe()  # to choose GPUs in this process
        if args.nnodes > 1 or count > 1 or too_late:
            return spawn(args, target, count)
        place = environment.rank_variables(rank=0, local_rank=0, size=1, local_size=1, run_id=uuid.uuid4().hex)
        os.environ.setdefault("OMP_NUM_THREADS", environment.threads(1))
        os.environ.update(place)
        return call(target, args)


def processes(args) -> int:
    """Return how many processes this machine runs. Touches no device, so that a fork stays safe."""
    import torch

    if args.cpu or args.gpus:
        return args.cpu or len(chosen(args.gpus))
    # The driver's library counts NVIDIA's and AMD's; torch.accelerator would initialize them.
    return torch.cuda.device_count() or max(1, torch.accelerator.device_count())


def chosen(gpus: str) -> list[str]:
    """Return the GPUs of -gpus under the names of the variable that makes them visible. Touches no device.

    Number i means the i-th of those that are visible now; a UUID stays as it is.
    """
    import torch

    wanted, count = gpus.split(","), torch.cuda.device_count()
    if not count:
        raise UsageError(f"-gpus {gpus}: no GPU is visible here; -cpu N trains on the CPU")
    numbers = ",".join(str(gpu) for gpu in range(count))
    missing = [gpu for gpu in wanted if gpu.isdigit() and int(gpu) >= count]
    if missing:
        raise UsageError(f"-gpus {gpus}: {', '.join(missing)} is not one of the GPUs here: {numbers}")
    names = [name.strip() for name in (os.environ.get(VISIBLE) or numbers).split(",")]
    return [names[int(gpu)] if gpu.isdigit() else gpu for gpu in wanted]


def narrowed(gpus: str | None) -> dict[str, str]:
    """Return the variable that leaves a process of torchrun or srun only the GPUs of -gpus.

    Raises:
        UsageError: the driver was started to count the GPUs, and will not read the variable again.
    """
    if not gpus:
        return {}
    names = ",".join(chosen(gpus))
    if not fork_is_safe():
        raise UsageError(
            f"-gpus {gpus}: here the GPUs must be chosen before the start: set {VISIBLE}={names} for torchrun or "
            "srun, and leave -gpus out"
        )
    return {VISIBLE: names}


def fork_is_safe() -> bool:
    """Whether children may be forked: on Linux, while this process has touched no device.

    Counting GPUs touches none if the driver's library can be asked (NVML, or AMD's amdsmi).
    """
    import torch

    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    if torch.cuda.device_count():
        return getattr(torch.cuda, f"_device_count_{'amdsmi' if torch.version.hip else 'nvml'}", lambda: -1)() >= 0
    return not torch.accelerator.is_available()


def spawn(args, target: str, count: int) -> int:
    """Run `count` processes on this machine and wait for them. Returns the exit code.

    Like torchrun's agent, this process (on node 0) has the rendezvous store, on a port that is its own before the
    children start. Where it is safe they are forked, with torch imported already; else each imports it again.
    """
    meeting = multinode.meet(args, count) if args.nnodes > 1 else multinode.alone(count)
    if not args.batch_per_gpu and args.batch_size < meeting.size:
        raise UsageError(
            f"-batch_size {args.batch_size} has not a sample for each of {meeting.size} processes: try {meeting.size}"
        )
    children = []
    with pass_signals_to(children) as passed:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until there is a child to pass them to
        alive = start_children(children, functools.partial(call, target, args), args.grace_s, count, meeting)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        store = multinode.open_store(meeting.listener, meeting.store[0], meeting.size) if meeting.listener else None
        code = watch(children, meeting, passed)
        meeting.leave()
        del store, alive  # the children need both until here
    return code


def start_children(children: list, run: Callable[[], int], grace_s: float, count: int, meeting: multinode.Meeting):
    """Start the processes of this machine. Returns a connection; they end when it is closed."""
    context = multiprocessing.get_context("fork") if fork_is_safe() else multiprocessing.get_context("spawn")
    ended, alive = context.Pipe(duplex=False)
    shared = {"run": run, "grace_s": grace_s, "parent_ended": ended, "inherited": []}
    if context.get_start_method() == "fork":
        importlib.import_module("torch._dynamo")  # takes a second, here once for all
        shared["inherited"] = [
            one for one in (alive, meeting.listener, *(link.pipe for link in meeting.links)) if one
        ]
    defaults = {"OMP_NUM_THREADS": environment.threads(count), "GLOO_SOCKET_IFNAME": meeting.interface}
    defaults = {name: value for name, value in defaults.items() if value and name not in os.environ}
    for local_rank in range(count):
        rank = meeting.first_rank + local_rank
        place = {"rank": rank, "local_rank": local_rank, "size": meeting.size, "local_size": count}
        variables = environment.rank_variables(**place, run_id=meeting.run_id, store=meeting.store)
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(rank, {**defaults, **variables}, writer), kwargs=shared)
        process.start()
        writer.close()
        children.append(Child(rank, process, reader))
    return alive


def child(
    rank: int, variables: dict[str, str], writer: connection.Connection, *, run, grace_s, parent_ended, inherited
):
    """Run in a child: set its environment, run, report a failure."""
    for one in inherited:  # the parent's own; open here, they would seem to be in use after its end
        one.close()
    set_handlers(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.environ.update(variables)
    threading.Thread(target=end_with_parent, args=(parent_ended, grace_s), daemon=True).start()
    try:
        code = run()
    except UsageError as error:
        code = USAGE
        writer.send(Failure(Cause.RAISED, " ".join(str(error).split()), USAGE, time=time.monotonic()))
    except Exception as error:
        code = FAILED
        cause = Cause.LOST_PEER if run_folder.lost_peer(error) else Cause.RAISED
        writer.send(Failure(cause, RAISED.format(rank, code), code, traceback.format_exc(), time.monotonic()))
    set_handlers(signal.SIG_IGN)  # a second signal would change the exit code
    writer.close()
    sys.exit(code)


def end_with_parent(parent_ended: connection.Connection, grace_s: float):
    """Stop this process when its parent is gone: with its state saved, or after the grace without."""
    connection.wait([parent_ended])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + 1)
    os._exit(FAILED)


def call(target: str, args) -> int:
    """Call the function named "module:function" with args. Returns the exit code."""
    module, _, function = target.partition(":")
    with environment.exported({**environment.of_run(args), **os.environ}), no_exit():
        return getattr(importlib.import_module(module), function)(args)


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
    while time.monotonic() < settled and wait(children, links, SETTLE_S / 3):
        pass
    while first_cause(children, links, passed).cause == Cause.LOST_PEER and time.monotonic() < settled + END_S:
        if not wait(children, links, SETTLE_S / 3):
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

    with handled_by(pass_on):
        try:
            yield passed
        finally:
            end(children, 0.0)


def leaving():
    """End this process at once if a signal stops the run while the block lasts, with the exit code of a stop.

    There is nothing to save before and after the training, which handles signals itself.
    """
    return handled_by(functools.partial(_leave, os.getpid()))


def _leave(pid, number, frame):
    if os.getpid() != pid:  # a process that a plugin forked, as multiprocessing.Pool does
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    with contextlib.suppress(OSError):
        os.write(2, f"train.py: {OUTSIDE.format(signal.Signals(number).name)}\n".encode())
    os._exit(STOPPED)  # an exception might be lost in an import


@contextlib.contextmanager
def handled_by(handler):
    """Set the handler of the signals that stop a run while the block lasts."""
    before = set_handlers(handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_handlers(handler) -> dict:
    """Set the handler of the signals that stop a run, except for what nohup ignores. Returns the handlers before."""
    heard = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def refused(error: UsageError) -> int:
    """Print what the user has to change, in one line. Returns the exit code."""
    text = " ".join(str(error).split())
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.refuse(text)
    return USAGE
