"""Starts the processes of a run: here, several on this machine, or by Slurm. Writes torchrun's environment, no more.

Already launched (RANK is set: torchrun, a child of ours) it calls the run at once, so one worker serves every
launcher.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from multiprocessing import connection

from lib import slurm_job
from lib.utils.errors import UsageError

FINISHED, FAILED, USAGE, STOPPED, ABORTED = 0, 1, 2, 75, 130  # exit codes; 75 is EX_TEMPFAIL: try again, it goes on
# Of those who lost an agent, torchrun's other agents restart what fails: the run goes on with whoever is left.
EXIT_CODES = {"finished": FINISHED, "stopped": STOPPED, "lost an agent": FAILED}
PASSED_ON = tuple(getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2"))
SETTLE_S, END_S = 0.3, 2.0  # to hear of every rank that failed; for the others to go by themselves


def launch(args, target: str) -> int:
    """Runs `target` ("module:function", called with args) in as many processes as args ask for, to an exit code.

    Raises UsageError where the devices are not there, and with one process whatever the run raises.
    """
    if launched():
        code = call(target, args)
        # torchrun restarts whatever does not exit 0; outcome.json tells a stopped run from a finished one.
        return FINISHED if code == STOPPED and "TORCHELASTIC_MAX_RESTARTS" in os.environ else code
    if slurm_job.is_task():
        return slurm_job.step(args, target)
    if args.slurm or args.slurm_dry:
        from lib import slurm

        return slurm.submit(args, target)
    count = processes(args)
    if count == 1:
        with exported(place(0, 1), OMP_NUM_THREADS=threads(1)):
            return call(target, args)
    return spawn(args, target, count)


def launched() -> bool:
    """Whether this is a process of a run already: torchrun's, or a child of ours."""
    return "RANK" in os.environ


def refused(error) -> int:
    """Tells what the user is to mend, in one line. Returns the exit code."""
    print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return USAGE


def call(target: str, args) -> int:
    """The exit code of the function named "module:function"."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(args)


def processes(args) -> int:
    """How many processes this machine runs: one a GPU, or -cpu's. Touches no device, so that a fork stays safe."""
    import torch

    if args.cpu:
        return args.cpu
    if not args.gpus:
        # NVIDIA's and AMD's are counted by the driver's library; torch.accelerator would initialise the device here.
        return torch.cuda.device_count() or max(1, torch.accelerator.device_count())
    wanted = [gpu.strip() for gpu in args.gpus.split(",")]
    there = torch.cuda.device_count()
    if not there:
        raise UsageError(f"-gpus {args.gpus}: no GPU is visible here; -cpu N trains on the CPU")
    missing = [gpu for gpu in wanted if gpu.isdigit() and int(gpu) >= there]
    if missing or len(set(wanted)) < len(wanted) or not all(wanted):
        names = ",".join(str(gpu) for gpu in range(there))
        raise UsageError(f"-gpus {args.gpus}: {', '.join(missing) or 'a name'} is not one of the GPUs here: {names}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(wanted)
    return len(wanted)


def place(rank: int, size: int) -> dict[str, str]:
    """torchrun's variables for a rank of a run on this one machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in ranks.items()} | {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}


def threads(count: int) -> str:
    """A fair share of the cores, for OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, cores // count))


@contextlib.contextmanager
def exported(variables: dict[str, str], **unless_set: str):
    """The environment with these variables while the block runs; the second kind only where not set by the user."""
    before = dict(os.environ)
    os.environ.update({**{name: value for name, value in unless_set.items() if name not in before}, **variables})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def spawn(args, target: str, count: int) -> int:
    """Runs `count` processes of the run and waits for them, as torchrun's agent would: the store is here, on a port
    that the kernel chose and nobody can take meanwhile. The first failure is told, and ends the others.

    Where it is safe the children are forked, torch imported already; else they are spawned and import it themselves.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=4 * count)
    shared = place(0, count) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    context = multiprocessing.get_context("fork" if fork_is_safe() else "spawn")
    alive, parent = context.Pipe(duplex=False)  # ends when this process does: nobody else holds `parent`
    inherited = [listener, parent] if context.get_start_method() == "fork" else []
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # nothing listens to the outside
    children = []
    with passing_on(children) as passed:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to pass them on to
        with exported(shared, OMP_NUM_THREADS=threads(count), **loopback):
            children.extend(start(context, rank, target, args, alive, inherited) for rank in range(count))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _store = serve(listener, count)  # while the children run
        return watch(children, passed)


def fork_is_safe() -> bool:
    """Whether children may be forked: on Linux, as long as this process has not touched a device."""
    import torch

    other = torch.accelerator.is_available() if not torch.cuda.device_count() else False
    return sys.platform == "linux" and not torch.cuda.is_initialized() and not other


def serve(listener: socket.socket, count: int):
    """The rendezvous store on a socket that listens already."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    return TCPStore(host, port, count, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass
class Child:
    """A process of the run as its parent sees it."""

    rank: int
    process: multiprocessing.process.BaseProcess
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


def start(context, rank, target, args, alive, inherited) -> Child:
    """Starts the process of a rank."""
    reader, writer = context.Pipe(duplex=False)
    words = (target, args, rank, writer, alive, inherited)
    process = context.Process(target=child, args=words, name=f"rank {rank}")
    process.start()
    writer.close()
    return Child(rank, process, reader)


def child(target, args, rank, writer, alive, inherited):
    """What a child does: its rank into the environment, the run, a report of how it ended."""
    for one in inherited:
        one.close()
    handle(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    threading.Thread(target=end_with_parent, args=(alive, args.grace_s), daemon=True).start()
    try:
        code = call(target, args)
    except UsageError as error:
        code = USAGE
        writer.send({"usage": str(error), "time": time.monotonic()})
    except Exception:
        code = FAILED
        writer.send({"error": traceback.format_exc(), "time": time.monotonic()})
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
    heard = [number for number in PASSED_ON if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def watch(children, passed: list[int]) -> int:
    """Waits for the children; the first that fails is told, the others are ended. Returns the run's exit code."""
    while not any(one.failed for one in children) and wait(children):
        pass
    if not any(one.failed for one in children):
        return max(one.code for one in children)
    settled = time.monotonic() + SETTLE_S
    while time.monotonic() < settled and wait(children, SETTLE_S / 3):
        pass
    code, text = verdict(children, passed)
    print(text, file=sys.stderr, flush=True)
    end(children, END_S)
    return code


def wait(children, timeout: float = 1.0) -> bool:
    """Waits for news of a child, not for ever: one that ended just before wakes nobody. False if none runs."""
    running = [one for one in children if one.code is None]
    pipes = [one.reader for one in running if not one.reader.closed]
    connection.wait([*pipes, *(one.process.sentinel for one in running)], timeout) if running else None
    for one in children:
        one.listen()
    return bool(running)


def verdict(children, passed: list[int]) -> tuple[int, str]:
    """The exit code of a failed run and what to tell: the rank that was killed or else the one that failed first."""
    if any(one.code == ABORTED for one in children):
        return ABORTED, "train.py: ended at the second Ctrl-C; the last checkpoint is good"
    killed = [one for one in children if one.code is not None and one.code < 0]
    if killed:
        number, name = -killed[0].code, signal.Signals(-killed[0].code).name
        told = f"train.py: rank {killed[0].rank} was killed by {name}; the others are ended"
        return 128 + number if number in passed else FAILED, told
    first = min((one for one in children if one.failed), key=lambda one: one.said.get("time", float("inf")))
    if "usage" in first.said:
        return USAGE, f"train.py: {' '.join(first.said['usage'].split())}"
    told, code = first.said.get("error", ""), first.code or FAILED
    return FAILED, f"{told}train.py: rank {first.rank} failed with exit code {code}; the others are ended"


def end(children, seconds: float):
    """Ends what still runs: those that lost a peer have some seconds to go by themselves, the rest is killed."""
    until = time.monotonic() + seconds
    for one in children:
        one.process.join(max(0.0, until - time.monotonic()))
    for one in children:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()
