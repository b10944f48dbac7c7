"""The processes of a run on this machine: how many there are, how they start, and how their parent watches them."""

import contextlib
import importlib
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
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from typing import Any

from lib.config import Args
from lib.launch import environment, requeue
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FAILED, FINISHED, STOP_SIGNALS, STOPPED, USAGE, UsageError, no_exit, printable
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
    import torch.multiprocessing

    method = "fork" if fork_is_safe() else "spawn"
    others = [thread.name for thread in threading.enumerate() if thread.name not in ("MainThread", "checkpoint_0")]
    if method == "fork" and others:  # a pool of a plugin's
        method = "spawn"
        text = f"threads run already ({', '.join(others[:4])}), which a fork would lose: each process imports anew"
        print(f"train.py: {text}", file=sys.stderr, flush=True)
    if method == "fork":
        importlib.import_module("torch._dynamo")  # takes a second, here once for all
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # no other machine can reach it
    os.register_at_fork(after_in_child=listener.close)  # else it would still accept connections after our end
    print_lock = torch.multiprocessing.get_context(method).Lock()
    arguments = (count, listener.getsockname(), uuid.uuid4().hex, target, args, print_lock)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until there are children to forward them to
    startup.enable_garbage_collector()
    started: Any = torch.multiprocessing.start_processes(run_child, arguments, count, join=False, start_method=method)
    with forward_signals(started.processes) as forwarded:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        store = open_store(listener, count)
        code = watch(started.processes, forwarded, print_lock)
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


def run_child(
    rank: int, count: int, store: tuple[str, int], run_id: str, target: str, args: Args, print_lock: Lock
) -> None:
    """Run in a child, which ends with its parent. It prints why it failed, unless another one does."""
    signals.set_handlers(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update(environment.rank_variables(place, run_id, store))
    try:
        code, failure = call_target(target, args), None
    except Exception as error:
        code, failure = USAGE if isinstance(error, UsageError) else FAILED, error
    signals.set_handlers(signal.SIG_IGN)  # a second signal would change the exit code
    if failure is None:
        sys.exit(code)
    if run_folder.is_lost_peer(failure):
        time.sleep(SHUTDOWN_S)  # another process has the reason, and prints it first
    if print_lock.acquire(block=False):
        if isinstance(failure, UsageError):
            report_usage_error(failure)
        else:
            print(printable("".join(traceback.format_exception(failure)).rstrip()), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # what a failed run leaves behind may hang Python's own end, and the others wait for this one


def call_target(target: str, args: Args) -> int:
    """Call the function named "module:function" with args. Returns the exit code."""
    import torch

    torch.set_num_threads(1)  # until the run sets them: what `get_dataset` computes has the same bits everywhere
    module, _, function = target.partition(":")
    with environment.override({**environment.for_run(args), **os.environ}), no_exit():
        return getattr(importlib.import_module(module), function)(args)


def watch(children: list[BaseProcess], forwarded: list[int], print_lock: Lock) -> int:
    """Wait for the children, by rank, or for the first failure. Returns the run's exit code.

    `forwarded`: signals that they were sent. The child that takes `print_lock` prints why it failed.
    """
    codes = [child.exitcode for child in children]
    while None in codes and failed_rank(codes) is None:
        # A child whose own children live wakes nobody when it is killed: so a second at most.
        connection.wait([child.sentinel for child in children if child.exitcode is None], timeout=1.0)
        codes = [child.exitcode for child in children]
    rank = failed_rank(codes)
    if rank is None:
        return max(code or FINISHED for code in codes)
    print_lock.acquire(block=False)  # a child that fails only now says nothing
    until = time.monotonic() + SHUTDOWN_S
    for child in children:  # they may end by themselves
        child.join(max(0.0, until - time.monotonic()))
    code, message = explain(rank, codes[rank] or FAILED, forwarded)
    if code != USAGE:  # the child has printed what is wrong
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    return code


def failed_rank(codes: list[int | None]) -> int | None:
    """Return the rank whose failure explains the others, None if there is none."""
    failed = [rank for rank, code in enumerate(codes) if code not in (None, FINISHED, STOPPED)]
    return min(failed, key=lambda rank: codes[rank] == -signal.SIGABRT, default=None)  # so ends one that lost a peer


def explain(rank: int, code: int, forwarded: list[int]) -> tuple[int, str]:
    """Return the run's exit code and what the terminal shows, from how a rank ended."""
    if code > 0:
        return code, f"rank {rank} failed with exit code {code}; the others are ended"
    name = signal.Signals(-code).name
    if -code in forwarded:
        return STOPPED, signals.OUTSIDE.format(name)
    return FAILED, f"rank {rank} was killed by {name}; the others are ended"


@contextlib.contextmanager
def forward_signals(children: list[BaseProcess]) -> Iterator[list[int]]:
    """Forward signals to the children while the block runs, and kill them after it. Yields a list of what came."""
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
            for child in children:
                child.kill()
                child.join()


def report_usage_error(error: UsageError) -> int:
    """Print what the user has to change, in one line. Returns the exit code."""
    text = printable(" ".join(str(error).split()))
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.record_refusal(text)
    return USAGE
