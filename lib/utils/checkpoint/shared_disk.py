"""Which ranks see the same folder, so that one of them acts for all: nodes may share a disk or not."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import UsageError

PATIENCE_S = 2.0  # a network disk may show a host the files of another a little later


@dataclass(frozen=True)
class Disk:
    """A folder of the run as this rank sees it. Of the ranks that see the same one the first acts for all."""

    world: World
    groups: list[list[int]]  # the ranks of each disk, ascending

    @property
    def ranks(self) -> list[int]:
        """The ranks that share this rank's disk."""
        return next(group for group in self.groups if self.world.rank in group)

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its disk."""
        return self.world.rank == self.ranks[0]

    @property
    def share(self) -> World:
        """This rank's place among those of its disk, for dividing work."""
        return World(rank=self.ranks.index(self.world.rank), size=len(self.ranks))

    def do(self, action: Callable) -> list:
        """Return what `action()` returned (JSON) on the first rank of each disk.

        Raises:
            Exception: what one rank raises, all raise, as in `distributed.gather_results`.
        """
        if len(self.groups) == 1:
            return [distributed.run_on_main(action, self.world)]
        answers = distributed.gather_results(action if self.is_first else None, self.world)
        return [answers[ranks[0]] for ranks in self.groups]


def single_disk(world: World) -> Disk:
    """Return the Disk of ranks that all share the folder."""
    return Disk(world, [list(range(world.size))])


def find_disks(folder: Path, world: World) -> Disk:
    """Find out, all ranks together, which of them share the folder; it is made where it is missing.

    The first process of each node leaves a mark. Usually all see rank 0's, and share its disk. Else each process
    looks for the marks of all nodes: one question to the disk for each node. Raises UsageError if a process cannot
    write there.
    """
    if world.local_size == world.size:
        return single_disk(world)
    mark = folder / f"rank_{world.rank}.{secrets.token_hex(4)}.partial"

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
        return mark.name

    try:
        name = distributed.attempt(leave if world.local_rank == 0 else None, world)
        first = folder / distributed.broadcast(name, world)
        for wait_s in (0.0, PATIENCE_S):
            time.sleep(wait_s)
            if not distributed.all_reduce_max([not first.exists()], world)[0]:
                return single_disk(world)
        marks = distributed.gather(name, world)
        seen = [rank for rank, name in enumerate(marks) if name and (folder / name).exists()]
        firsts = distributed.gather(min(seen, default=world.rank), world)  # then all have looked
    except OSError as error:
        raise UsageError(f"-out: {folder} cannot be written ({error})") from None
    finally:
        mark.unlink(missing_ok=True)
    return Disk(world, [[rank for rank in range(world.size) if firsts[rank] == first] for first in sorted({*firsts})])
