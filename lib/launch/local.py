"""The processes of a run on this machine: how many there are, how they start, and how their parent watches them."""

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock

from lib.config import Args
from lib.launch import environment, requeue
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FAILED, FINISHED, STOP_SIGNALS, STOPPED, USAGE, UsageError, no_exit
from lib.utils.monitoring import startup

SHUTDOWN_S = 2.0  # for the other ranks to end after the first failure; a rank that lost a peer waits as long


def start(args: Args, target: str) -> int:
    """Run the processes of this machine. Returns the exit code."""
    count = 1 if args.debug else count_processes(args)
    with environment.override(environment.visible_devices(args.gpus, args.cpu)):
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no torchrun agent started this process
        too_late = args.gpus and not fork_is_safe()  # to choose GPUs in this process
        if count > 1 or too_late:
            return start_processes(args, target, count)
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        os.environ.update(environment.rank_variables(place, run_id=uuid.uuid4().hex))
        return call_target(target, args)


def count_processes(args: Args) -> int:
    """Return how many processes this machine runs. Touches no device, so that a fork stays safe."""
    import torch

    if args.gpus:
        return len(args.gpus.split(","))
    if args.cpu:
        return args.cpu
    # The driver's library counts NVIDIA's and AMD's; torch.accelerator would initialize them.
    return torch.cuda.device_count() or max(1, torch.accelerator.device_count())


def fork_is_safe() -> bool:
    """Whether children may be forked: on Linux, while this process has not initialized CUDA.

    Counting GPUs does not, if the driver's library (NVML, AMD's amdsmi) answers. Only a forked process can tell.
    """
    import torch

    if sys.platform != "linux":
        return False
    if not torch.cuda.device_count():
        return not torch.accelerator.is_available()
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


def start_processes(args: Args, target: str, count: int) -> int:
    """Run `count` processes on this machine and wait for them. Returns the exit code.

    Like torchrun's agent, this process has the rendezvous store. Its port is open before the children start.
    Where it is safe they are forked, with torch imported already; else each imports it again.
    """
    forked = fork_is_safe()
    ours = ("MainThread", "checkpoint_0")  # the latter of a run that ended in this process
    others = [thread.name for thread in threading.enumerate() if thread.name not in ours]
    if forked and others:  # a pool of a plugin's
        forked = False
        text = f"threads run already ({', '.join(others[:4])}), which a fork would lose: each process imports anew"
        print(f"train.py: {text}", file=sys.stderr, flush=True)
    context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
    if forked:
        importlib.import_module("torch._dynamo")  # takes a second, here once for all
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # no other machine can reach it
    os.register_at_fork(after_in_child=listener.close)  # else it would still accept connections after our end
    children, print_lock, run_id = [], context.Lock(), uuid.uuid4().hex
    with startup.enable_garbage_collector(), forward_signals(children) as forwarded:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until there is a child to forward them to
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            variables = environment.rank_variables(place, run_id, listener.getsockname())
            process = context.Process(target=run_child, args=(variables, target, args, print_lock, os.getpid()))
            process.start()
            children.append(process)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        store = open_store(listener, count)
        code = watch(children, forwarded, print_lock)
        del store  # the children need it until here
    return code


def open_store(listener: socket.socket, size: int) -> object:
    """Return the rendezvous store of `size` processes, on a socket that listens already. Keep it while it is used.

    It has up to two connections from each process, so this one may have as many files open as the machine allows.
    """
    from torch.distributed import TCPStore

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * size + 512, hard)), hard))
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def run_child(variables: dict[str, str], target: str, args: Args, print_lock: Lock, parent: int) -> None:
    """Run in a child: set its environment, run, print why it failed unless another one does."""
    signals.set_handlers(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.update(variables)
    threading.Thread(target=exit_with_parent, args=[parent], daemon=True).start()
    try:
        code, why = call_target(target, args), ""
    except UsageError as error:
        code, why = USAGE, f"train.py: {' '.join(str(error).split())}"
    except Exception as error:
        code, why = FAILED, traceback.format_exc().rstrip()
        if run_folder.is_lost_peer(error):
            time.sleep(SHUTDOWN_S)  # another process has the reason, and prints it first
    signals.set_handlers(signal.SIG_IGN)  # a second signal would change the exit code
    if not why:
        sys.exit(code)
    if print_lock.acquire(block=False):
        print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # what a failed run leaves behind may hang Python's own end, and the others wait for this one


def exit_with_parent(parent: int) -> None:
    """Stop this process when its parent is gone, as a signal to it would."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def call_target(target: str, args: Args) -> int:
    """Call the function named "module:function" with args. Returns the exit code."""
    module, _, function = target.partition(":")
    with environment.override({**environment.for_run(args), **os.environ}), no_exit():
        return getattr(importlib.import_module(module), function)(args)


def watch(children: list[BaseProcess], forwarded: list[int], print_lock: Lock) -> int:
    """Wait for the children, by rank. Returns the run's exit code. The first failure ends the rest.

    `forwarded`: signals that they were sent. The child that takes `print_lock` prints why it failed.
    """
    running, failure = children, None
    while running and not failure:
        # A child that ended before the wait, or whose own children live, wakes nobody: so a second at most.
        connection.wait([child.sentinel for child in running], timeout=1.0)
        running = [child for child in children if child.exitcode is None]
        failure = first_failure(children, forwarded)
    if not failure:
        return max(child.exitcode or FINISHED for child in children)
    print_lock.acquire(block=False)  # a child that fails only now says nothing
    terminate(children, SHUTDOWN_S)
    if failure.code != USAGE:  # the child has printed what is wrong
        print(f"train.py: {failure.message}", file=sys.stderr, flush=True)
    return failure.code


@dataclass(frozen=True)
class Failure:
    """Why a run ends: its exit code, and what the terminal shows."""

    code: int
    message: str


def first_failure(children: list[BaseProcess], forwarded: list[int]) -> Failure | None:
    """Return the failure that explains the others, None if there is none."""
    failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, FINISHED, STOPPED)]
    if not failed:
        return None
    rank = min(failed, key=lambda rank: children[rank].exitcode == -signal.SIGABRT)  # so ends a rank that lost a peer
    code = children[rank].exitcode or FAILED
    if code > 0:
        return Failure(code, f"rank {rank} failed with exit code {code}; the others are ended")
    name = signal.Signals(-code).name
    if -code in forwarded:
        return Failure(STOPPED, signals.OUTSIDE.format(name))
    return Failure(FAILED, f"rank {rank} was killed by {name}; the others are ended")


def terminate(children: list[BaseProcess], seconds: float) -> None:
    """Give children that still run some seconds to end by themselves, then kill them."""
    until = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    for child in children:
        child.kill()
        child.join()


@contextlib.contextmanager
def forward_signals(children: list[BaseProcess]) -> Iterator[list[int]]:
    """Forward signals to the children while the block runs, and end them after it. Yields a list of what came."""
    forwarded = []

    def forward(number: int, frame: object) -> None:
        forwarded.append(number)
        for child in children:
            # A child that was reaped in this instant still seems alive. An error from here would be lost in
            # multiprocessing's own `except OSError`, and the child's exit code with it.
            with contextlib.suppress(ProcessLookupError):
                if child.pid and child.is_alive():
                    os.kill(child.pid, number)

    with signals.use_handler(forward):
        try:
            yield forwarded
        finally:
            terminate(children, 0.0)


def report_usage_error(error: UsageError) -> int:
    """Print what the user has to change, in one line. Returns the exit code."""
    text = " ".join(str(error).split())
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.record_refusal(text)
    return USAGE
