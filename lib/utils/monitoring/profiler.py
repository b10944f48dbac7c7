"""torch's profiler over some steps of a run, as -profile asks."""

import logging
from pathlib import Path

import torch

from lib.utils.distributed import World

log = logging.getLogger(__name__)
WAIT, WARM_UP = 3, 2  # steps that are not recorded: the first of a run are unlike the others


class Profile:
    """Records `count` steps of this rank, after a few, into folder/rank_N.trace.json.gz (for ui.perfetto.dev) and a
    table, rank_N.txt; on an NVIDIA GPU also each allocation, rank_N.memory.pickle (for pytorch.org/memory_viz). None:
    nothing."""

    def __init__(self, folder: Path, world: World, count: int | None):
        self.folder, self.world, self.profiler = Path(folder), world, None
        if count is None:
            return
        kinds = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        self.profiler = torch.profiler.profile(
            activities=[kinds["cpu"], *([kinds["cuda"]] if world.device.type == "cuda" else [])],
            schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=count, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self.profiler.start()
        self._allocations(max_entries=100_000)

    def step(self):
        """At the end of each optimizer step."""
        if self.profiler is not None:
            self.profiler.step()

    def close(self):
        """Ends it; what was recorded until now is written."""
        if self.profiler is not None:
            self.profiler.stop()
            self._allocations(enabled=None)
        self.profiler = None

    def _allocations(self, **words):
        if self.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(**words)

    def _write(self, profiler):
        name = f"rank_{self.world.rank}"
        on = "self_device_time_total" if self.world.device.type == "cuda" else "self_cpu_time_total"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
            table = profiler.key_averages().table(sort_by=on, row_limit=30)
            (self.folder / f"{name}.txt").write_text(table)
            if self.world.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
        except (OSError, RuntimeError) as error:
            log.warning("-profile: cannot be written (%s); training goes on", error)
            return
        finally:
            self._allocations(enabled=None)
        if self.world.is_main:
            log.info("-profile: %s", self.folder)
