"""The processes of a run on this machine: how many there are, and how they are started."""

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock

from lib.config import Args
from lib.launch import environment, multinode, requeue, signals
from lib.launch.children import END_S, pass_signals_to, watch
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FAILED, STOPPING, USAGE, UsageError, no_exit
from lib.utils.monitoring import startup


def start(args: Args, target: str) -> int:
    """Run the processes of this machine. Returns the exit code."""
    count = 1 if args.debug and args.nnodes == 1 else processes(args)
    with environment.exported(environment.visible(args.gpus)):
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no torchrun agent started this process
        too_late = args.gpus and not fork_is_safe()  # to choose GPUs in this process
        if args.nnodes > 1 or count > 1 or too_late:
            return spawn(args, target, count)
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        os.environ.update(environment.rank_variables(place, run_id=uuid.uuid4().hex))
        return call(target, args)


def processes(args: Args) -> int:
    """Return how many processes this machine runs. Touches no device, so that a fork stays safe."""
    import torch

    if args.gpus:
        return len(args.gpus.split(","))
    if args.cpu:
        return args.cpu
    # The driver's library counts NVIDIA's and AMD's; torch.accelerator would initialize them.
    return torch.cuda.device_count() or max(1, torch.accelerator.device_count())


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


def spawn(args: Args, target: str, count: int) -> int:
    """Run `count` processes on this machine and wait for them. Returns the exit code.

    Like torchrun's agent, this process (on node 0) has the rendezvous store, on a port that is its own before the
    children start. Where it is safe they are forked, with torch imported already; else each imports it again.
    """
    meeting = multinode.meet(args, count) if args.nnodes > 1 else multinode.alone(count)
    children = []
    with startup.garbage_collector(), pass_signals_to(children) as passed:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until there is a child to pass them to
        first = start_children(children, functools.partial(call, target, args), count, meeting)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        store = multinode.open_store(meeting.listener, meeting.store[0], meeting.size) if meeting.listener else None
        code = watch(children, meeting, passed, first)
        meeting.leave()
        del store  # the children need it until here
    return code


def start_children(
    children: list[BaseProcess], run: Callable[[], int], count: int, meeting: multinode.Meeting
) -> Lock:
    """Start the processes of this machine. Returns a lock: the child that takes it prints why it failed."""
    context = multiprocessing.get_context("fork") if fork_is_safe() else multiprocessing.get_context("spawn")
    first, inherited = context.Lock(), []
    if context.get_start_method() == "fork":
        importlib.import_module("torch._dynamo")  # takes a second, here once for all
        inherited = [*filter(None, [meeting.listener]), *(link.pipe for link in meeting.links)]
    for local_rank in range(count):
        rank = meeting.first_rank + local_rank
        place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": meeting.size, "LOCAL_WORLD_SIZE": count}
        variables = environment.rank_variables(place, meeting.run_id, meeting.store, meeting.interface)
        process = context.Process(target=child, args=(variables, run, first, os.getpid(), inherited))
        process.start()
        children.append(process)
    return first


def child(variables: dict[str, str], run: Callable[[], int], first: Lock, parent: int, inherited: list) -> None:
    """Run in a child: set its environment, run, print why it failed unless another one does."""
    for one in inherited:  # the parent's own; open here, they would seem to be in use after its end
        one.close()
    signals.set_handlers(signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.environ.update(variables)
    threading.Thread(target=end_with_parent, args=[parent], daemon=True).start()
    try:
        code, why = run(), ""
    except UsageError as error:
        code, why = USAGE, f"train.py: {' '.join(str(error).split())}"
    except Exception as error:
        code, why = FAILED, traceback.format_exc().rstrip()
        if run_folder.lost_peer(error):
            time.sleep(END_S)  # another process has the reason, and prints it first
    signals.set_handlers(signal.SIG_IGN)  # a second signal would change the exit code
    if not why:
        sys.exit(code)
    if first.acquire(block=False):
        print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # what a failed run leaves behind may hang Python's own end, and the others wait for this one


def end_with_parent(parent: int) -> None:
    """Stop this process when its parent is gone, as a signal to it would."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def call(target: str, args: Args) -> int:
    """Call the function named "module:function" with args. Returns the exit code."""
    module, _, function = target.partition(":")
    with environment.exported({**environment.of_run(args), **os.environ}), no_exit():
        return getattr(importlib.import_module(module), function)(args)


def refused(error: UsageError) -> int:
    """Print what the user has to change, in one line. Returns the exit code."""
    text = " ".join(str(error).split())
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.refuse(text)
    return USAGE
