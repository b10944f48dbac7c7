"""Who this process is, and how the processes of a run talk. Reads torchrun's variables, whoever wrote them."""

import contextlib
import dataclasses
import datetime
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lib.utils.errors import UsageError

CPU = torch.device("cpu")
FAILURES = (UsageError, OSError, RuntimeError, ValueError)  # that `attempt` shares
LEAST_MINUTES = 30.0  # that a collective waits: at the start data is fetched, a model compiled, a checkpoint read
_left_groups = []  # process groups that this process left: `join`


@dataclasses.dataclass(frozen=True)
class World:
    """The place of this process among those of the run."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = CPU
    launch: str = ""  # the lowest `launch_id` of all ranks
    shares_disk: bool = True  # whether all nodes see the same folder of the run

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: rank 0, or the first of each node if they share no disk."""
        return self.is_main if self.shares_disk else self.local_rank == 0

    def on_writers(self, action: Callable[[], Any]) -> list:
        """Return what `action()` returned (JSON, None is left out) on each writer, on all ranks. See `attempt`."""
        return [one for one in gather_results(action if self.is_writer else None, self) if one is not None]


@contextlib.contextmanager
def join(args: Namespace) -> Iterator[World]:
    """Join the run's process group for the block, and yield this process's World.

    A single process needs no group: every collective below is then the identity. Raises UsageError if the device that
    the flags name is not there, or a flag's value differs between the processes.
    """
    world = place()
    world = dataclasses.replace(world, device=pick_device(args, world.local_rank))
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index)
    if world.size > 1:
        if "MASTER_ADDR" not in os.environ:
            raise UsageError(f"WORLD_SIZE is {world.size}, without MASTER_ADDR: unset it if no launcher set it")
        own = dist.get_default_backend_for_device(world.device)
        backend = own if own == "gloo" else f"cpu:gloo,{world.device.type}:{own}"
        timeout = datetime.timedelta(minutes=max(LEAST_MINUTES, 2 * args.hang_minutes))  # the watchdog comes first
        dist.init_process_group(backend, timeout=timeout)
    yield check_same_flags(args, world)
    if world.size > 1:  # a rank that fails does not come here: it waits for nobody
        all_reduce_max([0.0], world)  # srun ends what is left some time after the first task's end
        # Gloo's C++ parts end with the process. Destroying them keeps Python's lock, which their threads may need.
        _left_groups.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


def place() -> World:
    """Return this process's place, as the environment says."""
    rank, local_rank = (int(os.environ.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))
    size, local_size = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return World(rank=rank, local_rank=local_rank, size=size, local_size=local_size)


def rendezvous() -> str:
    """Describe whom this process waits for at its start, where, and why."""
    given = " ".join(f"{name}={os.environ.get(name)}" for name in "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split())
    return f"waiting for the other processes of the run, as torchrun or the environment says: {given}"


def pick_device(args: Namespace, local_rank: int) -> torch.device:
    """Return this rank's accelerator, or the CPU. Raises UsageError if one was promised, as by -gpus, and fails."""
    if args.cpu:
        return CPU
    accelerator = torch.accelerator.current_accelerator()
    chosen = f"-gpus {args.gpus}: " if args.gpus else ""
    if not torch.accelerator.is_available() or accelerator is None:
        if chosen or torch.cuda.device_count() or os.environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
            place = f"{chosen}torch {torch.__version__} cannot use the GPUs of {socket.gethostname()}"
            raise UsageError(f"{place}: see nvidia-smi or rocm-smi; -cpu N trains on the CPU")
        return CPU
    count = torch.accelerator.device_count()
    if (chosen or has_agent()) and local_rank >= count:  # where all see the same ones; a task of Slurm sees its own
        raise UsageError(f"{chosen}local rank {local_rank} has no device: {count} are visible; start fewer processes")
    return torch.device(accelerator.type, local_rank % count)


def check_same_flags(args: Namespace, world: World) -> World:
    """Return the World with the lowest `launch_id`. Raises UsageError on all ranks if one has another flag."""
    flags = {name: str(value) for name, value in sorted(vars(args).items()) if name not in args.flag_rules.per_node}
    launches, every_flags = zip(*gather((launch_id(), flags), world), strict=True)
    for rank, theirs in enumerate(every_flags):
        for name, value in every_flags[0].items():
            if theirs.get(name) != value:
                values = f"-{name} is {theirs.get(name)} on rank {rank} and {value} on rank 0"
                raise UsageError(f"{values}: give all processes the same")
    return dataclasses.replace(world, launch=min(launches))


def launch_id() -> str:
    """Return an id of this launch: restarts and requeues keep it, a new command gets a new one.

    A fixed --rdzv_id of torchrun may be in many commands, so its agent belongs to the id; but not where agents come
    and go, or a job is requeued. Agents on several nodes have different ids, so World.launch is the lowest one.
    """
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    keeps_id = given != "none" and (not has_agent() or is_elastic() or given == job_id())
    return given if keeps_id else f"{given}-{socket.gethostname()}-{os.getppid()}"


def has_agent() -> bool:
    """Return whether a torchrun agent started this process."""
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ


def is_elastic() -> bool:
    """Return whether scripts/elastic.sh started this process: torchrun's nodes may then come and go."""
    return has_agent() and "PET_NNODES" in os.environ


def max_world_size(world: World) -> int:
    """Return how many processes the run may grow to, where scripts/elastic.sh started it; else how many there are."""
    return max(world.size, world.local_size * int(os.environ["PET_NNODES"].rpartition(":")[2]) if is_elastic() else 1)


def job_id() -> str | None:
    """Return the id of the Slurm job this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def user_threads() -> int | None:
    """Return the user's OMP_NUM_THREADS. torchrun sets 1 for several processes where the user set nothing."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    of_torchrun = given == "1" and has_agent() and os.environ.get("LOCAL_WORLD_SIZE") != "1"
    return int(given) if given.isdigit() and not of_torchrun else None


def current_world() -> World:
    """Return this process's rank among all; alone where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def all_reduce_max(values: list[float], world: World) -> list[float]:
    """Return each number's largest value over all ranks. Takes a tenth of the time of `gather`."""
    if world.size == 1:
        return values
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def gather(value: Any, world: World) -> list:
    """Return every rank's value, by rank, on all ranks. It is pickled."""
    if world.size == 1:
        return [value]
    values = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any, world: World, root: int = 0) -> Any:
    """Return the value of one rank, on all ranks. See `gather`."""
    values = [value]
    if world.size > 1:
        dist.broadcast_object_list(values, root)
    return values[0]


def broadcast_tensor(tensor: torch.Tensor, root: int) -> None:
    """Give a tensor of any type, which is not sharded, the values that it has on one rank."""
    values = tensor.detach().contiguous()
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), root)
        tensor.detach().copy_(values)


def attempt(action: Callable[[], Any] | None, world: World) -> Any:
    """Return what `action()` gave here (None: no action). Raises on all ranks what the lowest met, of FAILURES."""
    value = failure = mine = None
    try:
        value = action() if action else None
    except FAILURES as error:
        kind = next(kind for kind in FAILURES if isinstance(error, kind))
        failure, mine = error, (kind, str(error))
    for rank, theirs in enumerate(gather(mine, world)):
        if theirs and rank == world.rank and failure:
            raise failure
        if theirs:
            kind, text = theirs
            raise kind(text if kind is UsageError else f"rank {rank}: {text}")
    return value


def gather_results(action: Callable[[], Any] | None, world: World) -> list:
    """Return what `action()` gave on each rank, by rank, on all ranks. See `attempt`."""
    return gather(attempt(action, world), world)
