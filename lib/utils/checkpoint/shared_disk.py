"""Which ranks see the same folder, and what one of them does there for all: nodes may share a disk or not."""

import logging
import math
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from lib.utils import distributed
from lib.utils.checkpoint import stored
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
PATIENCE_S = 2.0  # a network disk may show a host the files of another a little later
RETRY_S = (0.2, 1.0, 3.0)  # the waits before a read that failed is tried again


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
    def leads(self) -> bool:
        """Whether this rank acts for its disk."""
        return self.world.rank == self.ranks[0]

    @property
    def share(self) -> World:
        """This rank's place among those of its disk, for dividing work."""
        return World(rank=self.ranks.index(self.world.rank), size=len(self.ranks))

    def do(self, action) -> list:
        """What `action()` returned (JSON) on the first rank of each disk; what one raises, all raise.

        Raises as `distributed.together` does.
        """
        answers = distributed.together(action if self.leads else None, self.world)
        return [answers[ranks[0]] for ranks in self.groups]


def one(world: World) -> Disk:
    """All ranks share the folder."""
    return Disk(world, [list(range(world.size))])


def look(folder: Path, world: World) -> Disk:
    """Finds out, by all ranks together, which of them share the folder; it is made where it is missing.

    The first process of each node leaves a mark, and all look whose marks they see. Raises UsageError where one
    cannot write there.
    """
    if world.local_size == world.size:
        return one(world)
    mark = folder / f"rank_{world.rank}.{secrets.token_hex(4)}.partial"
    try:
        names = _leave(mark, world)
        seen = _seen(folder, names, world)
    finally:
        mark.unlink(missing_ok=True)
    firsts = [ranks[0] if ranks else rank for rank, ranks in enumerate(seen)]
    return Disk(world, [[rank for rank in range(world.size) if firsts[rank] == first] for first in sorted({*firsts})])


def _leave(mark, world):
    """The names of all marks, by rank."""

    def leave():
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return mark.name

    try:
        names = distributed.together(leave if world.local_rank == 0 else None, world)
    except OSError as error:
        raise UsageError(f"-out: {mark.parent} cannot be written ({error})") from None
    return {rank: name for rank, name in enumerate(names) if name}


def _seen(folder, names, world):
    """Whose marks each rank sees. Nobody takes its own away before all have looked."""
    for wait in (0.0, PATIENCE_S):
        time.sleep(wait)
        seen = distributed.gather_json([rank for rank, name in names.items() if (folder / name).exists()], world)
        if all(len(ranks) == len(names) for ranks in seen):
            break
    return seen


def retry(read):
    """Returns `read()`, which is tried again for some seconds where the disk does not answer (EIO, ESTALE, EMFILE).
    Raises OSError."""
    for wait in RETRY_S:
        try:
            return read()
        except OSError as error:
            if error.errno in stored.MISSING:
                raise
            log.warning("%s: tried again in %g s", error, wait)
            time.sleep(wait)
    return read()


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, whether it is there yet or not. Raises OSError."""
    return shutil.disk_usage(_place(folder)).free


def free_files(folder: Path) -> float:
    """How many files more the disk of a folder can hold: its free inodes. Raises OSError."""
    facts = os.statvfs(_place(folder))
    return facts.f_favail if facts.f_files else math.inf  # some file systems have as many as there is room for


def _place(folder):
    """The folder, or what is there of its parents."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def free_there(folder: Path) -> str:
    """Both in words, also where they cannot be known."""
    try:
        return f"{free_bytes(folder):,} bytes free{'' if free_files(folder) else ', no inodes free'}"
    except OSError as error:
        return f"free bytes unknown: {error.strerror}"
