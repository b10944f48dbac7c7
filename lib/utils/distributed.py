"""Who this process is, and how the processes of a run talk. Reads torchrun's variables, whoever wrote them."""

import contextlib
import dataclasses
import datetime
import json
import operator
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lib.utils.errors import PARENT, UsageError

CPU = torch.device("cpu")
FAILURES = (UsageError, OSError, RuntimeError, ValueError)  # that `attempt` shares
ROW_BYTES = 504  # in the first message, enough for most values; a longer one needs a second message
TAG = 1_000_003  # of the messages between two ranks below; plugins may send their own
LEAST_MINUTES = 30.0  # that a collective waits: at the start data is fetched, a model compiled, a checkpoint read
_left_groups = []  # process groups that this process left


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
        """Whether this is rank 0."""
        return self.rank == 0


@contextlib.contextmanager
def join(args: Namespace) -> Iterator[World]:
    """Join the run's process group for the block, and yield this process's World.

    A single process needs no group: every collective below is then the identity.

    Raises:
        UsageError: the device that the flags name is not there, or a flag's value differs between the processes.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world = World(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=local_rank,
        size=int(os.environ.get("WORLD_SIZE", 1)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=pick_device(args, local_rank),
    )
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index)
    if world.size > 1:
        own = dist.get_default_backend_for_device(world.device)
        backend = own if own == "gloo" else f"cpu:gloo,{world.device.type}:{own}"
        timeout = datetime.timedelta(minutes=max(LEAST_MINUTES, 2 * args.hang_minutes))  # the watchdog comes first
        dist.init_process_group(backend, timeout=timeout)
    yield check_same_flags(args, world)
    if world.size > 1:  # a rank that fails does not come here: it waits for nobody
        _leave()


def pick_device(args: Namespace, local_rank: int) -> torch.device:
    """Return the accelerator of this local rank, or the CPU if there is none or -cpu asks for it.

    Raises UsageError if one was promised (by -gpus, the driver or Slurm) and does not start.
    """
    if args.cpu:
        return CPU
    accelerator = torch.accelerator.current_accelerator()
    if not torch.accelerator.is_available() or accelerator is None:
        if args.gpus or torch.cuda.device_count() or int(os.environ.get("SLURM_GPUS_ON_NODE") or 0):
            place = f"torch {torch.__version__} cannot use the GPUs of {socket.gethostname()}"
            raise UsageError(f"{place}: see nvidia-smi or rocm-smi; -cpu N trains on the CPU")
        return CPU
    count = torch.accelerator.device_count()
    if has_agent() and local_rank >= count:  # all its processes see the same ones; a task of Slurm sees its own
        wanted = "start fewer processes, or -cpu N"
        raise UsageError(f"local rank {local_rank} has no device: {count} are visible; {wanted}")
    return torch.device(accelerator.type, local_rank % count)


def check_same_flags(args: Namespace, world: World) -> World:
    """Return the World with rank 0's `launch_id`, once all ranks have the same flags.

    torchrun starts each node with arguments of its own. Where they differ, each node would train in its own way.
    Raises UsageError on all ranks, with the flag and both values.
    """
    flags = {name: str(value) for name, value in sorted(vars(args).items()) if name not in args.flag_rules.per_node}
    launch, first = broadcast_json([launch_id(), flags], world)

    def compare() -> None:
        for name in {**first, **flags}:
            if first.get(name) != flags.get(name):
                values = f"-{name} is {flags.get(name)} on rank {world.rank} and {first.get(name)} on rank 0"
                raise UsageError(f"{values}: give all processes the same")

    attempt(compare, world)
    return dataclasses.replace(world, launch=launch)


def _leave() -> None:
    """Leave all process groups, but keep their C++ parts until this process ends.

    Destroying gloo's keeps Python's lock, and may wait forever for one of its threads that needs it (torch 2.11).
    """
    _left_groups.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def launch_id() -> str:
    """Return an id of this launch: restarts and requeues keep it, a new command gets a new one.

    Only launchers set it: in an allocation, one Slurm job runs many commands. Torchrun's agents on several nodes may
    have different ones, so World.launch is rank 0's.
    """
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return given if given != "none" else f"{socket.gethostname()}-{os.getppid()}"


def has_agent() -> bool:
    """Return whether a torchrun agent started this process."""
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ


def is_orphan() -> bool:
    """Return whether the torchrun agent that started this process is gone: nobody would restart it, or end it."""
    return has_agent() and os.getppid() != PARENT


def is_elastic() -> bool:
    """Return whether scripts/elastic.sh started this process: torchrun's nodes may then come and go."""
    return has_agent() and "PET_NNODES" in os.environ


def max_world_size(world: World) -> int:
    """Return how many processes the run may grow to, where scripts/elastic.sh started it; else how many there are."""
    most_nodes = int(os.environ["PET_NNODES"].rpartition(":")[2]) if is_elastic() else 1
    return max(world.size, most_nodes * world.local_size)


def job_id() -> str | None:
    """Return the id of the Slurm job this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def user_threads() -> int | None:
    """Return the user's OMP_NUM_THREADS. torchrun sets 1 for several processes where the user set nothing."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    of_torchrun = given == "1" and has_agent() and os.environ["LOCAL_WORLD_SIZE"] != "1"
    return int(given) if given.isdigit() and not of_torchrun else None


def current_world() -> World:
    """Return this process's rank among all; alone where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def all_reduce_max(values: list[float], world: World) -> list[float]:
    """Return each number's largest value over all ranks; NaN where one is NaN."""
    return reduce_json(values, lambda *two: torch.tensor(two, dtype=torch.float64).amax(0).tolist(), world)


def reduce_json(value: Any, merge: Callable[[Any, Any], Any], world: World) -> Any:
    """Combine every rank's value (JSON) pairwise by `merge(a, b)`, and return the result on all ranks.

    The values go up a binomial tree to rank 0, and a broadcast brings the result back: 2 log2(size) messages. gloo's
    all_reduce and all_gather pass theirs around a ring: docs/scaling.md.
    """
    distance = 1
    while distance < world.size and not world.rank & distance:
        if world.rank + distance < world.size:
            value = merge(value, json.loads(_message(dist.irecv, b"", world.rank + distance)))
        distance *= 2
    if world.rank and world.size > 1:
        _message(dist.isend, json.dumps(value).encode(), world.rank - distance)
    return broadcast_json(value, world)


def gather_json(value: Any, world: World) -> list:
    """Return every rank's value (JSON), by rank, on all ranks."""
    return reduce_json([value], operator.add, world)


def broadcast_json(value: Any, world: World, root: int = 0) -> Any:
    """Return the value (JSON) of one rank, on all ranks."""
    if world.size == 1:
        return value
    data = json.dumps(value).encode() if world.rank == root else b""
    return json.loads(_transfer(data, lambda row: dist.broadcast(row, root)))


def broadcast_tensor(tensor: torch.Tensor, root: int) -> None:
    """Give a tensor of any type, which is not sharded, the values that it has on one rank."""
    values = tensor.detach().contiguous()
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), root)
        tensor.detach().copy_(values)


def _message(move: Callable, data: bytes, other: int) -> bytes:
    """Send bytes to another rank, or return those that come from there."""
    return _transfer(data, lambda row: move(row, other, None, TAG).wait())


def _transfer(data: bytes, move: Callable[[torch.Tensor], Any]) -> bytes:
    """Return the bytes in a row that `move` sends or fills; a second row follows if that is too short."""
    room = ROW_BYTES
    while True:
        row = bytearray(len(data).to_bytes(8, "little") + data[:room].ljust(room))
        tensor = torch.frombuffer(row, dtype=torch.uint8).to(_device())
        move(tensor)
        row = bytes(tensor.cpu().numpy())
        length = int.from_bytes(row[:8], "little")
        if length <= room:
            return row[8 : 8 + length]
        room = length


def _device() -> torch.device:
    """The device of what the processes exchange."""
    return CPU if "cpu:" in dist.get_backend_config() else torch.accelerator.current_accelerator() or CPU


def attempt(action: Callable[[], Any] | None, world: World) -> Any:
    """Return what `action()` gave on this rank (None: no action). An exception on one rank is raised on all.

    Raises:
        UsageError, OSError, RuntimeError or ValueError: that of the lowest rank that met one.
    """
    value = failure = mine = None
    try:
        value = action() if action else None
    except FAILURES as error:
        failure, kind = error, [isinstance(error, kind) for kind in FAILURES].index(True)
        mine = [world.rank, kind, str(error)]
    first = reduce_json(mine, lambda ours, theirs: ours or theirs, world)
    if first is None:
        return value
    rank, kind, text = first
    if failure and rank == world.rank:
        raise failure
    raise FAILURES[kind](text if kind == 0 else f"rank {rank}: {text}")


def gather_results(action: Callable[[], Any] | None, world: World) -> list:
    """Return what `action()` gave (JSON) on each rank, by rank, on all ranks. See `attempt`."""
    return gather_json(attempt(action, world), world)


def run_on_main(action: Callable[[], Any], world: World) -> Any:
    """Return what `action()` gave (JSON) on rank 0, on all ranks. See `attempt`."""
    return broadcast_json(attempt(action if world.is_main else None, world), world)
