"""torch's profiler over some steps of a run, for -profile."""

import logging
from pathlib import Path

import torch

from lib.utils.distributed import World

log = logging.getLogger(__name__)
WAIT, WARM_UP = 3, 2  # steps that are not recorded: the first of a run are unlike the others


def started(folder: Path, world: World, count: int) -> torch.profiler.profile:
    """Record `count` steps of this rank, after a few: rank_N.trace.json.gz, for ui.perfetto.dev, and a table."""

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank_{world.rank}.trace.json.gz"))
        slowest = f"self_{'device' if world.device.type == 'cuda' else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=slowest, row_limit=30)
        (folder / f"rank_{world.rank}.txt").write_text(table)
        if world.is_main:
            log.info("-profile: %s", folder)

    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=count, repeat=1)
    profiler = torch.profiler.profile(
        schedule=schedule, on_trace_ready=write, record_shapes=True, profile_memory=True
    )
    profiler.start()
    return profiler
