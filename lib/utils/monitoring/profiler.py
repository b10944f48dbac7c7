"""torch's profiler over some steps of a run, for -profile."""

import logging
from pathlib import Path

import torch

from lib.utils.distributed import World

log = logging.getLogger(__name__)
WAIT, WARM_UP = 3, 2  # steps that are not recorded: the first of a run are unlike the others


class Off:
    """Record nothing."""

    def step(self):
        """End an optimizer step."""

    def close(self):
        """End the recording."""


class Profile(Off):
    """Record `count` steps of this rank, after a few: rank_N.trace.json.gz, for ui.perfetto.dev, and a table."""

    def __init__(self, folder: Path, world: World, count: int):
        self.folder, self.rank, self.on_gpu = Path(folder), world.rank, world.device.type == "cuda"
        self.profiler = torch.profiler.profile(  # by default of the CPU and, where there is one, the GPU
            schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=count, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self.profiler.start()

    def step(self):
        self.profiler.step()

    def close(self):
        """End the recording; what it has until now is written."""
        self.profiler.stop()

    def _write(self, profiler):
        name = f"rank_{self.rank}"
        sort_by = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
            table = profiler.key_averages().table(sort_by=sort_by, row_limit=30)
            (self.folder / f"{name}.txt").write_text(table)
        except (OSError, RuntimeError) as error:
            log.warning("-profile: cannot be written (%s); training continues", error)
            return
        if self.rank == 0:
            log.info("-profile: %s", self.folder)
