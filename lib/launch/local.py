"""The processes of a run on this machine: how many there are, how they start, and how their parent watches them."""

import contextlib
import importlib
import os
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
from pathlib import Path
from typing import Any

from lib.config import Args
from lib.launch import environment
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE, UsageError, no_exit, printable

SHUTDOWN_S = 2.0  # for the other ranks to end after the first failure; a rank that lost a peer waits as long


def start(args: Args, target: str) -> int:
    """Run `target` ("module:function") in as many processes as args ask for. Returns the exit code."""
    if args.debug:  # at a breakpoint, Ctrl-C is the debugger's
        return start_one(args, target)
    with signals.exit_on_signal():
        count, run_id = count_processes(args), uuid.uuid4().hex
        if count == 1 and not args.restarts:
            return start_one(args, target)
        for number in range(args.restarts + 1):
            if number:
                with contextlib.suppress(OSError):  # as in `watch`
                    sys.stderr.write(f"train.py: starting again: {number} of -restarts {args.restarts}\n")
            if (code := start_processes(args, target, count, run_id)) >= 0:  # none was killed
                return code
        return FAILED


def start_one(args: Args, target: str) -> int:
    """Run the only process of a run, which is this one. Returns the exit code."""
    before = dict(os.environ)  # another run may start in this process
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ.update(environment.rank_variables(place, run_id=uuid.uuid4().hex))
    try:
        return call_target(target, args)
    finally:
        os.environ.clear()
        os.environ.update(before)


def count_processes(args: Args) -> int:
    """Return how many processes this machine runs."""
    import torch

    if args.gpus:
        return len(args.gpus.split(","))
    return args.cpu or max(1, torch.accelerator.device_count())


def fork_is_safe() -> bool:
    """Whether children may be forked: on Linux, without GPUs, and without threads or files of a plugin's."""
    import torch

    from lib.utils.data import fetch

    files = [number for number in fetch.files_to_read() if os.fstat(number).st_nlink]  # whose place they would share
    others = {thread.name for thread in threading.enumerate()} - {"MainThread", "checkpoint_0"}
    return sys.platform == "linux" and not (torch.accelerator.is_available() or others or files)


def start_processes(args: Args, target: str, count: int, run_id: str) -> int:
    """Run `count` processes on this machine and wait for them. Returns what `watch` does. A restart keeps `run_id`.

    Like torchrun's agent, this process has the rendezvous store. Its port is open before the children start.
    Where it is safe they are forked, with torch imported already; else each imports it again.
    """
    import torch.multiprocessing
    from torch.distributed import TCPStore

    method = "fork" if fork_is_safe() else "spawn"
    if method == "fork":
        importlib.import_module("torch._dynamo")  # takes a second, here once for all
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)  # no other machine can reach it
    os.register_at_fork(after_in_child=server.close)  # else it would still accept connections after our end
    print_lock = torch.multiprocessing.get_context(method).Lock()
    host, port = server.getsockname()
    variables = environment.rank_variables({"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}, run_id, (host, port))
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # this process has it
    arguments = (variables, target, args, print_lock)
    started: Any = torch.multiprocessing.start_processes(run_child, arguments, count, join=False, start_method=method)
    with forward_signals(started.processes) as forwarded:
        _store = TCPStore(host, port, count, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        grace_s = args.grace_s if args.cpu or not torch.accelerator.is_available() else SHUTDOWN_S
        return watch(started.processes, forwarded, print_lock, run_folder.path_of(args), grace_s)


def run_child(rank: int, variables: dict[str, str], target: str, args: Args, print_lock: Lock) -> None:
    """Run in a child, which ends with its parent. It prints why it failed, unless another one does."""
    signals.set_handlers(signal.SIG_DFL)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
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
    with no_exit():
        return getattr(importlib.import_module(module), function)(args)


def watch(children: list[BaseProcess], forwarded: list[int], print_lock: Lock, folder: Path, grace_s: float) -> int:
    """Wait for the children, by rank, or for the first failure. Returns the exit code, or -N: signal N killed one.

    `forwarded`: signals that they were sent. The child that takes `print_lock` prints why it failed. The others then
    have `grace_s` for their last step (just_in_time.py), on GPUs none: they may wait for a lost one for ever.
    """
    while None in (codes := [child.exitcode for child in children]) and failed_rank(codes) is None:
        # A child whose own children live wakes nobody when it is killed: so a second at most.
        connection.wait([child.sentinel for child in children if child.exitcode is None], timeout=1.0)
    rank = failed_rank(codes)
    if rank is None:
        return max(code or FINISHED for code in codes)
    print_lock.acquire(block=False)  # a child that fails only now says nothing
    code = codes[rank] or FAILED
    how = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    trains = run_folder.read_json(folder / "outcome.json").get("pid") in [child.pid for child in children]
    message = f"rank {rank} {how}{'; the others end' if len(children) > 1 else ''}"
    if -code in forwarded:
        code, message = STOPPED, signals.OUTSIDE.format(signal.Signals(-code).name)
    if code != USAGE:  # the child has printed what is wrong
        with contextlib.suppress(OSError):  # the terminal may be gone: the others save all the same
            print(f"train.py: {message}", file=sys.stderr, flush=True)
    until = time.monotonic() + (max(SHUTDOWN_S, grace_s) if trains else SHUTDOWN_S)
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    return FAILED if code < 0 and forwarded else code


def failed_rank(codes: list[int | None]) -> int | None:
    """Return the rank whose failure explains the others, None for none: a killed one, not one that lost it."""
    failed = {rank: code for rank, code in enumerate(codes) if code not in (None, FINISHED, STOPPED)}
    return min(failed, key=lambda rank: (failed[rank] == -signal.SIGABRT, failed[rank] > 0), default=None)


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
    if "BATON_HISTORY" in os.environ:  # in a job of Slurm's, which then is not requeued
        importlib.import_module("scripts.slurm.requeue").record_refusal(text)
    return USAGE
