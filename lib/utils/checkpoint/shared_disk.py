"""Whether all nodes of a run share the disk of its folder. Where they do not, each node has the whole run."""

import contextlib
import dataclasses
import secrets
import time
from pathlib import Path

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import UsageError

PATIENCE_S = 2.0  # a network disk may show a host the files of another a little later


def detect(folder: Path, world: World) -> World:
    """Return the World that knows whether all ranks see rank 0's folder, which is made. All ranks call this.

    Raises UsageError if rank 0 cannot write there.
    """
    if world.local_size == world.size:
        return world
    mark = folder / distributed.broadcast_json(f"{secrets.token_hex(8)}.partial", world)

    def leave_mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)

    def all_see_it() -> bool:
        return not distributed.all_reduce_max([not mark.exists()], world)[0]

    try:
        distributed.run_on_main(leave_mark, world)
        shared = all_see_it()
        if not shared:
            time.sleep(PATIENCE_S)
            shared = all_see_it()
    except OSError as error:
        raise UsageError(f"-out: {folder} cannot be written ({error})") from None
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
    return dataclasses.replace(world, shares_disk=shared)
