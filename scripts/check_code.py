"""Compares the project's files that a process has imported with those of the others, and of the run's last start."""

import contextlib
import json
import logging
import sys
import zlib
from pathlib import Path
from typing import Any

from lib.config import ROOT
from lib.core.replicas import OURS
from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
FILE = "code.json"  # in a run's folder
CHANGED = "%s (%d in all) has changed since the last start of this run: its figures may be of both versions"


def check(trainer: Any) -> None:
    """Warn of files that have changed since the run's last start. All ranks call this.

    Raises UsageError if a rank has another file than rank 0, as after a `git pull` on one machine.
    """
    mine = checksums()
    first, *others = distributed.gather(mine, trainer.world)
    for rank, theirs in enumerate(others, 1):
        if odd := changed(first, theirs):
            fault = f"{odd[0]} ({len(odd)} in all) of rank {rank} is not that of rank 0"
            raise UsageError(f"{fault}: give all machines the same code")
    if trainer.world.is_main and not trainer.args.debug:
        if odd := changed(run_folder.read_json(trainer.folder / FILE), mine):
            log.warning(CHANGED, odd[0], len(odd))
        with contextlib.suppress(OSError):  # the first save says what is wrong
            if not trainer.args.eval:
                atomic.write_file(trainer.folder / FILE, json.dumps(mine))


def checksums() -> dict[str, int]:
    """Return the checksum of each file of the project that this process has imported and a fork may change."""
    paths = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    files = [path for path in paths if OURS.match(path) and Path(path).is_file()]
    return {str(Path(path).relative_to(ROOT)): zlib.crc32(Path(path).read_bytes()) for path in sorted(files)}


def changed(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Return the files that both have, and not alike."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
