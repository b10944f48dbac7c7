"""Who this process is, and how the processes of a run talk. Reads torchrun's variables, whoever wrote them."""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import socket

import torch
import torch.distributed as dist

from lib.utils.errors import UsageError

CPU = torch.device("cpu")
PARENT = os.getppid()
ROOM = 1000  # bytes of JSON that ranks exchange in one go
FAILURES = (UsageError, OSError, RuntimeError, ValueError)  # what `together` passes on; of several the first
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of `fingerprint`, by the bytes of a number
LEFT = []  # the process groups that were left
START_MINUTES = 30.0  # until a run's first step is done: data may be fetched, a model compiled, a checkpoint read


@dataclasses.dataclass(frozen=True)
class World:
    """The place of this process among those of the run."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = CPU
    launch: str = ""  # rank 0's `launch_id`

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def joined(args):
    """The World of this process, inside the run's process group; the group is left when the block ends.

    A single process needs no group: every collective below is then the identity. Raises UsageError if the device
    that was asked for is not there, or if a flag's value differs between the processes.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if "OMP_NUM_THREADS" in os.environ:  # another number of threads gives other bits: never left to chance
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = World(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=local_rank,
        size=size,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=pick_device(args, local_rank),
    )
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index)
    if size == 1:
        yield agreed(args, world)
        return
    backend = "gloo" if world.device.type == "cpu" else f"cpu:gloo,{_backend(world.device)}"
    level = dist.get_debug_level()
    if backend == "gloo":
        # Wrapped, as in detailed debugging, DDP would take it for a bare one and crash (torch 2.15).
        dist.set_debug_level(min(level, dist.DebugLevel.INFO, key=int))
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=max(START_MINUTES, args.hang_minutes)))
    dist.set_debug_level(level)
    try:
        world = agreed(args, world)
        _check_devices(world)
        yield world
    except BaseException:
        if world.device.type == "cpu":  # NCCL's farewell waits for the others, who may wait for this rank
            _leave()
        raise
    _leave()


def agreed(args, world: World) -> World:
    """The World with rank 0's `launch_id`, once all ranks have the same flags.

    torchrun starts each node with words of its own, and what differs would train replicas in different ways. Raises
    UsageError, on all ranks, that names the flag and both values.
    """
    flags = {name: str(value) for name, value in sorted(vars(args).items()) if name not in args.flag_rules.per_node}
    (launch, first), *others = gather_json([launch_id(), flags], world)
    for rank, (_, theirs) in enumerate(others, 1):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise UsageError(f"-{name} is {theirs.get(name)} on rank {rank} and {first.get(name)} on rank 0: "
                                 "give all processes the same")  # fmt: skip
    return dataclasses.replace(world, launch=launch)


def _leave():
    """Leaves all process groups. Their C++ parts stay until this process ends: gloo's are taken down with Python's
    lock held, and may wait for ever for a thread of theirs that needs it (torch 2.11)."""
    LEFT.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def pick_device(args, local_rank: int) -> torch.device:
    """The accelerator of this local rank, or the CPU where there is none or it was asked for. Raises UsageError where
    one was promised (by -gpus, the driver or Slurm) and does not start."""
    if args.cpu:
        return CPU
    if not torch.accelerator.is_available():
        if args.gpus or torch.cuda.device_count() or int(os.environ.get("SLURM_GPUS_ON_NODE") or 0):
            raise UsageError(
                f"torch {torch.__version__} cannot use the GPUs of {socket.gethostname()}: nvidia-smi or rocm-smi "
                f"tells more; -cpu N trains on the CPU"
            )
        return CPU
    count = torch.accelerator.device_count()
    there = int(os.environ.get("SLURM_GPUS_ON_NODE") or count)  # of the job; a task may see only its own part of them
    alone = count == 1
    if has_agent():  # all processes of an agent see the same ones
        there, alone = count, False
    if not alone and local_rank >= max(count, there):
        raise UsageError(
            f"local rank {local_rank} has no device: {count} are visible; start fewer processes, or -cpu N"
        )
    return torch.device(torch.accelerator.current_accelerator().type, local_rank % count)


def _check_devices(world: World):
    """Raises UsageError where several ranks have one GPU, which NCCL cannot use."""
    name = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else None
    names = gather_json(name, world)
    same = [str(rank) for rank in range(world.size) if name and names[rank] == name]
    if len(same) > 1:
        raise UsageError(f"ranks {' and '.join(same)} have one GPU, {name}: start one process for each GPU, as with "
                         "srun --gpus-per-task=1, or -cpu N")  # fmt: skip


def _backend(device):
    return f"{device.type}:{dist.get_default_backend_for_device(device)}"


def set_patience(seconds: float):
    """From now on a collective, of all ranks or of some (FSDP's), fails when the others do not come within so many
    seconds."""
    c10d = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    for group in list(c10d._world.pg_map):
        set_timeout(datetime.timedelta(seconds=seconds), group)


def store_of_own(seconds: float):
    """The rendezvous store, over a connection of its own that answers within so many seconds or raises
    RuntimeError."""
    store = dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(datetime.timedelta(seconds=max(1.0, seconds)))
    return store


def launch_id() -> str:
    """What all starts of one launch share: restarts and requeues keep it, a new command gets a new one.

    Only launchers name it: in an allocation, one Slurm job runs many commands. Another node may have another one, as
    torchrun's agents share none unless they are given an id: World.launch is rank 0's.
    """
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return given if given != "none" else f"{socket.gethostname()}-{os.getppid()}"


def has_agent() -> bool:
    """Whether a torchrun agent started this process."""
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ


def orphaned() -> bool:
    """Whether the torchrun agent that started this process is gone: nobody would restart it, or end it."""
    return has_agent() and os.getppid() != PARENT


def elastic() -> bool:
    """Whether torchrun's nodes come and go, or are made anew when they go: started by scripts/elastic.sh, as in a
    pod."""
    return has_agent() and "PET_NNODES" in os.environ


def ngrok_password() -> str | None:
    """What the tunnel of -ngrok asks for."""
    return os.environ.get("NGROK_PASSWORD")


def job_id() -> str | None:
    """The id of the Slurm job this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def cores_each(world: World) -> int:
    """This machine's cores for each of its processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world.local_size)


def sum_(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The tensor summed over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def max_(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The tensor's largest values over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def world_in(group=None) -> World:
    """This process's place in a process group (default: all), whoever made it; alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(group), size=dist.get_world_size(group))


def gather_json(value, world: World, group=None) -> list:
    """Every rank's value, by rank, on all ranks; of a `group`, with its own `world_in`. JSON in byte tensors: no
    pickle crosses the wire. One exchange, and another for what is longer than ROOM."""
    if world.size == 1:
        return [value]
    text = json.dumps(value).encode()
    rows = _exchanged(b"%12d" % len(text) + text[:ROOM].ljust(ROOM), world.size, group)
    longest = max(int(row[:12]) for row in rows)
    rows = [row[12:] for row in rows] if longest <= ROOM else _exchanged(text.ljust(longest), world.size, group)
    return [json.loads(row) for row in rows]


def differing(tensors: dict[str, torch.Tensor], world: World) -> list[str]:
    """The names of those tensors, each on every rank, that do not have the same bytes on all ranks. Waits for the
    device."""
    if world.size == 1 or not tensors:
        return []
    mine = torch.stack([fingerprint(one).to(world.device) for one in tensors.values()])  # read in one go
    first, *others = gather_json(mine.tolist(), world)
    return [name for place, name in enumerate(tensors) if any(other[place] != first[place] for other in others)]


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number (0-d, 64 bits) that tensors with other bytes, or the same ones in another order, do not share but by
    a chance of 1 in 2**32 at most: the words have 32 bits, so that no change of them is lost in 64."""
    words = tensor.detach().contiguous().reshape(-1).view(WORDS[tensor.element_size()])
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in words.split(len(weights)):
        total = total * 1_000_003 + (part.long() * weights[: len(part)]).sum()
    return total


@functools.cache
def _weights(device):
    return torch.randint(1 << 62, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(device)


def _exchanged(data, size, group):
    device = CPU if "cpu:" in dist.get_backend_config(group) else torch.accelerator.current_accelerator()
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine, group=group)
    return [bytes(row.cpu().numpy()) for row in rows]


def together(action, world: World) -> list:
    """What `action()` returned (JSON) on each rank that has one, None for the others, by rank, on all ranks. What one
    raises, all raise: none waits in vain.

    Raises UsageError, OSError, RuntimeError or ValueError: that rank what it met itself, the others its words.
    """
    value = failure = fault = None
    try:
        value = action() if action else None
    except FAILURES as error:
        kind = next(number for number, kind in enumerate(FAILURES) if isinstance(error, kind))
        failure, fault = error, [kind, world.rank, str(error)]
    answers = gather_json([value, fault], world)
    if faults := [fault for _, fault in answers if fault]:
        kind, rank, text = min(faults)
        if rank == world.rank:
            raise failure
        raise UsageError(text) if kind == 0 else FAILURES[kind](f"rank {rank}: {text}")
    return [value for value, _ in answers]


def main_does(action, world: World):
    """What `action()` returns on rank 0 (JSON), on all ranks; what it raises there, all raise: see `together`."""
    return together(action if world.is_main else None, world)[0]
