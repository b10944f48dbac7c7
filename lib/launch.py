"""Starts the processes of a run: here, several on this machine, or by Slurm. Writes torchrun's environment, no more.

Already launched (RANK and WORLD_SIZE are set: torchrun, a child of ours) it calls the run at once, so one worker
serves every launcher.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import uuid

from lib import children, nodes, requeue, slurm_job, variables
from lib.utils.errors import FINISHED, STOPPED, STOPPING, USAGE, UsageError, no_exit

MOST_A_CORE = 8  # processes of -cpu


def launch(args, target: str) -> int:
    """Runs `target` ("module:function", called with args) in as many processes as args ask for, to an exit code.

    Raises UsageError where the devices are not there, and with one process whatever the run raises.
    """
    if args.nnodes > 1 and (launched() or slurm_job.is_task()):
        raise UsageError(f"-nnodes {args.nnodes} under torchrun or srun: they start the processes of all machines")
    if launched():
        with exported(narrowed(args.gpus)):
            code = call(target, args)
        # torchrun restarts whatever does not exit 0; outcome.json tells a stopped run from a finished one.
        return FINISHED if code == STOPPED and "TORCHELASTIC_MAX_RESTARTS" in os.environ else code
    if slurm_job.is_task():
        with exported(narrowed(args.gpus)):
            return slurm_job.step(args, target)
    if args.slurm or args.slurm_dry:
        from lib import slurm

        return slurm.submit(args, target)
    with contextlib.nullcontext() if args.debug else leaving():  # at a breakpoint, Ctrl-C is the debugger's
        return start(args, target)


def start(args, target: str) -> int:
    """Runs the processes of this machine, to an exit code."""
    count = 1 if args.debug and args.nnodes == 1 else processes(args)
    with exported({visible(): ",".join(chosen(args.gpus))} if args.gpus else {}):
        os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # leaked: no agent of torchrun started this process
        late = args.gpus and not fork_is_safe()  # to choose GPUs in this process
        if count == args.nnodes == 1 and not late:
            with exported(place(), OMP_NUM_THREADS=threads(1)):
                return call(target, args)
        return spawn(args, target, count)


def launched() -> bool:
    """Whether this is a process of a run already: torchrun's, or a child of ours. A RANK that leaked from elsewhere,
    without a WORLD_SIZE that it fits, makes it none."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return rank.isdecimal() and size.isdecimal() and int(rank) < int(size)


@contextlib.contextmanager
def leaving():
    """A signal that stops a run ends this process at once while the block lasts, but for the training, which listens
    itself. There is nothing to save, and the exit code is that of a stop."""
    before = children.handle(functools.partial(_leave, os.getpid()))
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
        os.write(2, f"train.py: {children.OUTSIDE.format(signal.Signals(number).name)}\n".encode())
    os._exit(STOPPED)  # an exception might be lost in an import


def refused(error) -> int:
    """Tells what the user is to mend, in one line. Returns the exit code."""
    text = " ".join(str(error).split())
    print(f"train.py: {text}", file=sys.stderr, flush=True)
    requeue.refuse(text)
    return USAGE


def call(target: str, args) -> int:
    """The exit code of the function named "module:function"."""
    module, _, function = target.partition(":")
    with exported({}, **variables.of_run(args)), no_exit():
        return getattr(importlib.import_module(module), function)(args)


def processes(args) -> int:
    """How many processes this machine runs: one a GPU, or -cpu's. Touches no device, so that a fork stays safe."""
    import torch

    if args.cpu:
        if args.cpu > MOST_A_CORE * cores():
            raise UsageError(f"-cpu {args.cpu}: this machine has {cores()} cores for its processes: "
                             f"at most {MOST_A_CORE * cores()}")  # fmt: skip
        return args.cpu
    if args.gpus:
        return len(chosen(args.gpus))
    # NVIDIA's and AMD's are counted by the driver's library; torch.accelerator would initialise the device here.
    return torch.cuda.device_count() or max(1, torch.accelerator.device_count())


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


def visible() -> str:
    """The variable that names the GPUs which torch is to see. ROCm knows NVIDIA's, too, but goes by its own first."""
    import torch

    own = torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ
    return "HIP_VISIBLE_DEVICES" if own else "CUDA_VISIBLE_DEVICES"


def place() -> dict[str, str]:
    """torchrun's variables for the only process of a run."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return {name: str(value) for name, value in ranks.items()} | {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}


def threads(count: int) -> str:
    """A fair share of the cores, for OMP_NUM_THREADS."""
    return str(max(1, cores() // count))


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Runs `count` processes of the run and waits for them, as torchrun's agent would: the store is here, or on node
    0, on a port that nobody can take meanwhile. The first failure is told, and ends the others.

    Where it is safe the children are forked, torch imported already; else they are spawned and import it themselves.
    """
    context = multiprocessing.get_context("fork" if fork_is_safe() else "spawn")
    if context.get_start_method() == "fork":
        importlib.import_module("torch._dynamo")  # a second, which each child would wait for
    others = nodes.meet(args, count) if args.nnodes > 1 else nodes.alone(count)
    if not args.batch_per_gpu and args.batch_size < others.size:  # before the first one starts
        raise UsageError(f"-batch_size {args.batch_size} has not a sample for each of {others.size} processes: "
                         f"try {others.size}")  # fmt: skip
    alive, parent = context.Pipe(duplex=False)  # ends when this process does: nobody else holds `parent`
    ours = [one for one in (others.listener, parent, *(link.wire for link in others.links)) if one]
    work = children.Work(functools.partial(call, target, args), others.first, args.grace_s, alive,
                         inherited=ours if context.get_start_method() == "fork" else [])  # fmt: skip
    network = {"GLOO_SOCKET_IFNAME": others.interface} if others.interface else {}
    started = []
    with children.passing_on(started) as passed:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until there is somebody to pass them to
        with exported(shared(others, count), OMP_NUM_THREADS=threads(count), **network):
            started.extend(children.start(context, local_rank, work) for local_rank in range(count))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _store = store_on(others.listener, others.store[0], others.size) if others.listener else None
        code = children.watch(started, others, passed)
        others.leave()
        return code


def shared(others: nodes.Others, count: int) -> dict[str, str]:
    """torchrun's variables, as far as all processes of this machine share them."""
    address, port = others.store[:2]
    place = {"WORLD_SIZE": others.size, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": address, "MASTER_PORT": port}
    return variables.torchrun(others.run, **place)


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
