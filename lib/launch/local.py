"""The processes of a run on this machine: how many, and on which GPUs.

They are started, sent the signals of their parent, watched, and ended when one of them fails, here or on another
machine.
"""

import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from lib.launch import environment, multinode, requeue
from lib.utils.errors import ABORTED, FAILED, FINISHED, STOPPED, STOPPING, USAGE, UsageError, no_exit

SETTLE_S, END_S = 0.3, 2.0  # to hear of every rank that failed; to hear why, and for the others to go by themselves
MOST_A_CORE = 8  # processes of -cpu
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


def start(args, target: str) -> int:
    """Runs the processes of this machine, to an exit code."""
    count = 1 if args.debug and args.nnodes == 1 else processes(args)
    with environment.exported({visible(): ",".join(chosen(args.gpus))} if args.gpus else {}):
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no agent of torchrun started this process
        late = args.gpus and not fork_is_safe()  # to choose GPUs in this process
        if count == args.nnodes == 1 and not late:
            with environment.exported(environment.place(), OMP_NUM_THREADS=environment.threads(1)):
                return call(target, args)
        return spawn(args, target, count)


def processes(args) -> int:
    """How many processes this machine runs: one a GPU, or -cpu's. Touches no device, so that a fork stays safe."""
    import torch

    if args.cpu:
        if args.cpu > MOST_A_CORE * environment.cores():
            raise UsageError(f"-cpu {args.cpu}: this machine has {environment.cores()} cores for its processes: "
                             f"at most {MOST_A_CORE * environment.cores()}")  # fmt: skip
        return args.cpu
    if args.gpus:
        return len(chosen(args.gpus))
    # NVIDIA's and AMD's are counted by the driver's library; torch.accelerator would initialise the device here.
    return torch.cuda.device_count() or max(1, torch.accelerator.device_count())


def chosen(gpus: str) -> list[str]:
    """The GPUs of -gpus as the variable is to name them: number i is the i-th of those that are visible now, a UUID
    stays what it is. Touches no device.

    Raises UsageError for one that is not there.
    """
    import torch

    wanted, there = gpus.split(","), torch.cuda.device_count()
    if not there:
        raise UsageError(f"-gpus {gpus}: no GPU is visible here; -cpu N trains on the CPU")
    missing = [gpu for gpu in wanted if gpu.isdigit() and int(gpu) >= there]
    numbers = ",".join(str(gpu) for gpu in range(there))
    if missing:
        raise UsageError(f"-gpus {gpus}: {', '.join(missing)} is not one of the GPUs here: {numbers}")
    names = [name.strip() for name in (os.environ.get(visible()) or numbers).split(",")]
    return [names[int(gpu)] if gpu.isdigit() else gpu for gpu in wanted]


def narrowed(gpus: str | None) -> dict[str, str]:
    """The variable that leaves this process, which another launcher started, the GPUs of -gpus alone: its local rank
    counts among them. Raises UsageError where it is too late for that."""
    if not gpus:
        return {}
    names = ",".join(chosen(gpus))
    if not fork_is_safe():  # the driver was started to count the GPUs, and does not look at the variable again
        raise UsageError(f"-gpus {gpus}: here the GPUs must be chosen before the start: set {visible()}={names} for "
                         "torchrun or srun, and leave -gpus out")  # fmt: skip
    return {visible(): names}


def visible() -> str:
    """The variable that names the GPUs which torch is to see. ROCm knows NVIDIA's, too, but goes by its own first."""
    import torch

    own = torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ
    return "HIP_VISIBLE_DEVICES" if own else "CUDA_VISIBLE_DEVICES"


def spawn(args, target: str, count: int) -> int:
    """Runs `count` processes of the run and waits for them, as torchrun's agent would: the store is here, or on node
    0, on a port that nobody can take meanwhile. The first failure is printed, and ends the others.

    Where it is safe the children are forked, torch imported already; else they are spawned and import it themselves.
    """
    context = multiprocessing.get_context("fork" if fork_is_safe() else "spawn")
    if context.get_start_method() == "fork":
        importlib.import_module("torch._dynamo")  # a second, which each child would wait for
    others = multinode.meet(args, count) if args.nnodes > 1 else multinode.alone(count)
    if not args.batch_per_gpu and args.batch_size < others.size:  # before the first one starts
        raise UsageError(f"-batch_size {args.batch_size} has not a sample for each of {others.size} processes: "
                         f"try {others.size}")  # fmt: skip
    alive, parent = context.Pipe(duplex=False)  # ends when this process does: nobody else holds `parent`
    ours = [one for one in (others.listener, parent, *(link.wire for link in others.links)) if one]
    inherited = ours if context.get_start_method() == "fork" else []
    work = Work(functools.partial(call, target, args), others.first, args.grace_s, alive, inherited)
    network = {"GLOO_SOCKET_IFNAME": others.interface} if others.interface else {}
    started = []
    with passing_on(started) as passed:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until there is somebody to pass them to
        with environment.exported(shared(others, count), OMP_NUM_THREADS=environment.threads(count), **network):
            started.extend(start_child(context, local_rank, work) for local_rank in range(count))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _store = store_on(others.listener, others.store[0], others.size) if others.listener else None
        code = watch(started, others, passed)
        others.leave()
        return code


def shared(others: multinode.Others, count: int) -> dict[str, str]:
    """torchrun's variables, as far as all processes of this machine share them."""
    address, port = others.store[:2]
    place = {"WORLD_SIZE": others.size, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": address, "MASTER_PORT": port}
    return environment.torchrun(others.run, **place)


def fork_is_safe() -> bool:
    """Whether children may be forked: on Linux, as long as this process has not touched a device. To count GPUs is
    no touch where the driver's library is there to ask (NVML, or AMD's amdsmi)."""
    import torch

    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    if torch.cuda.device_count():
        return getattr(torch.cuda, f"_device_count_{'amdsmi' if torch.version.hip else 'nvml'}", lambda: -1)() >= 0
    return not torch.accelerator.is_available()


def store_on(listener, host: str, size: int):
    """The rendezvous store of so many ranks on a socket that listens already; this process reaches it at the host.
    It lives as long as somebody holds it."""
    from torch.distributed import TCPStore

    port, fd = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def start_child(context, local_rank: int, work: Work) -> Child:
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
        report = {"error": traceback.format_exc(), "time": time.monotonic()}
        writer.send({**report, "lost": importlib.import_module("lib.utils.checkpoint.run_folder").lost_peer(error)})
    handle(signal.SIG_IGN)  # at a second signal it would end with another code
    writer.close()
    sys.exit(code)


def end_with_parent(alive: connection.Connection, grace_s: float):
    """Stops this process, its state saved, when the parent is gone; after the grace it ends without."""
    connection.wait([alive])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + 1)
    os._exit(FAILED)


def call(target: str, args) -> int:
    """The exit code of the function named "module:function"."""
    module, _, function = target.partition(":")
    with environment.exported({}, **environment.of_run(args)), no_exit():
        return getattr(importlib.import_module(module), function)(args)


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


def watch(children, others: multinode.Others, passed: list[int]) -> int:
    """Wait for the children. Returns the run's exit code.

    The first failure, here or on another machine, is printed and sent to the other machines, and ends the rest.
    """
    everybody = [*children, *others.links]
    while not any(one.failed for one in everybody) and wait(children, others.links):
        pass
    if not any(one.failed for one in everybody):
        code = max(one.code for one in children)
        others.report(code)
        return code
    settled = time.monotonic() + (SETTLE_S if not others.links else 3 * SETTLE_S)
    while time.monotonic() < settled + (0.0 if explained(everybody) else END_S):
        if not wait(children, others.links, SETTLE_S / 3):
            break
    code, trace, text = verdict(children, others.links, passed)
    print(f"{trace}train.py: {text}", file=sys.stderr, flush=True)
    others.report(FAILED if code == STOPPED else code, text)  # they are not to wait for this one
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
    """The exit code of a failed run, a traceback, and a message.

    They are those of the rank that was killed, or else of the one that failed first, here or on another machine.
    Ranks that failed because they lost another come last.
    """
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
        return FAILED, "", theirs[0].said["message"]
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


@contextlib.contextmanager
def leaving():
    """A signal that stops a run ends this process at once while the block lasts, but for the training, which listens
    itself. There is nothing to save, and the exit code is that of a stop."""
    before = handle(functools.partial(_leave, os.getpid()))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(pid, number, frame):
    if os.getpid() != pid:  # a process that a plugin forked, as multiprocessing.Pool does
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    with contextlib.suppress(OSError):
        os.write(2, f"train.py: {OUTSIDE.format(signal.Signals(number).name)}\n".encode())
    os._exit(STOPPED)  # an exception might be lost in an import


def refused(error) -> int:
    """Print what the user has to change, in one line. Returns the exit code."""
    text = " ".join(str(error).split())
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.refuse(text)
    return USAGE
