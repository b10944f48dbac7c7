"""What a save costs: how long it stops the loop, and how long until it is on disk; ours beside torch's own ways.

    python scripts/bench/save.py [-large] [-rounds 9] [-threads 2] [-folder DIR] [-json FILE]

Every way saves the same state of about 100 MB (-large: 1 GB too): weights and AdamW's two moments. `stall`: time in
the call, and waiting before the optimizer may step, with one forward and backward pass between the two. `beside`:
that pass over one without a save. `total`: from the call until it is on disk, the loop at rest. Medians of rounds in
which all ways take turns.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lib.utils.checkpoint import Checkpoints
from lib.utils.distributed import World
from lib.utils.state import all_tensors, prepare

BATCH = 512
LAYERS = 24


class Run:
    """A model of square layers whose weights and AdamW moments take `size` bytes, and its tensors by name."""

    def __init__(self, size: int):
        width = int((size / 3 / 4 / LAYERS) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        prepare(self.optimizer)
        self.inputs = torch.randn(BATCH, width)
        self.tensors = all_tensors(self.model, self.optimizer)

    def passes(self) -> float:
        """Seconds of a forward and backward pass."""
        began = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        return time.perf_counter() - began


class Save:
    """torch.save, as most people do it."""

    def __init__(self, run: Run, folder: Path):
        self.run, self.file, self.checkpoint = run, folder / "checkpoint.pt", folder / "checkpoint"

    def begin(self):
        torch.save(self.run.tensors, self.file)

    def staged(self):
        """Waits until the weights may change."""

    def finish(self):
        """Waits until it is on disk, or where the way leaves that to chance, written."""

    def clear(self):
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint, ignore_errors=True)


class SaveSynced(Save):
    """torch.save into a new file, fsync, rename."""

    def begin(self):
        partial = self.file.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(self.run.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.file)
        folder = os.open(self.file.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


class Dcp(Save):
    """dcp.save."""

    def begin(self):
        dcp.save(self.run.tensors, checkpoint_id=self.checkpoint)


class DcpAsync(Save):
    """dcp.async_save."""

    def begin(self):
        self.future = dcp.async_save(self.run.tensors, checkpoint_id=self.checkpoint)

    def finish(self):
        self.future.result()


class DcpStaged(Save):
    """dcp.async_save with its staging in a thread, and its buffers kept."""

    def __init__(self, run, folder):
        super().__init__(run, folder)
        self.stager = DefaultStager(StagingOptions(False, False, True, False))

    def begin(self):
        self.answer = dcp.async_save(self.run.tensors, checkpoint_id=self.checkpoint, async_stager=self.stager)

    def staged(self):
        self.answer.staging_completion.result()

    def finish(self):
        self.answer.upload_completion.result()


class Ours(Save):
    """Baton: lib/utils/checkpoint.py."""

    def __init__(self, run, folder):
        super().__init__(run, folder)
        self.checkpoints, self.step = Checkpoints(self.checkpoint, World(), keep_last=1), 0
        self.checkpoints.open()

    def begin(self):
        tensors = all_tensors(self.run.model, self.run.optimizer)  # as the trainer does
        self.step += 1
        self.checkpoints.save(tensors, {"state": {"step": self.step}}, step=self.step, early=set())

    def staged(self):
        self.checkpoints.staged()

    def finish(self):
        concurrent.futures.wait([self.checkpoints.job])
        self.checkpoints.finish()

    def clear(self):
        """Its own retention has removed the one before."""


WAYS = {
    "torch.save": Save,
    "torch.save, fsync, rename": SaveSynced,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, staged aside": DcpStaged,
    "ours": Ours,
}


def once(way: Save, run: Run) -> dict:
    """One save with the loop going on, one with it at rest. Seconds."""
    alone = run.passes()
    began = time.perf_counter()
    way.begin()
    stall = time.perf_counter() - began
    beside = run.passes()
    began = time.perf_counter()
    way.staged()
    stall += time.perf_counter() - began
    way.finish()
    way.clear()
    os.sync()
    began = time.perf_counter()
    way.begin()
    way.finish()
    total = time.perf_counter() - began
    way.clear()
    os.sync()
    return {"stall": stall, "beside": beside / alone, "total": total}


def measure(size: int, rounds: int, folder: Path) -> dict:
    """The medians of each way."""
    run = Run(size)
    ways = {name: way(run, folder / str(number)) for number, (name, way) in enumerate(WAYS.items())}
    for way in ways.values():
        way.file.parent.mkdir(exist_ok=True)
    found = {name: [] for name in ways}
    for number in range(rounds + 2):  # in the first two buffers are made
        for name, way in ways.items():
            figures = once(way, run)
            if number > 1:
                found[name].append(figures)
    return {
        name: {kind: statistics.median(one[kind] for one in each) for kind in ("stall", "beside", "total")}
        for name, each in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-large", action="store_true", help="1 GB too")
    parser.add_argument("-rounds", type=int, default=9, help="saves of each")
    parser.add_argument("-threads", type=int, default=2, help="of the model's arithmetic")
    parser.add_argument("-folder", default=".", help="where to write: on the disk that is to be measured")
    parser.add_argument("-json", help="write the figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # dcp.async_save wants one
    found = {}
    for size in (100_000_000, 1_000_000_000)[: 2 if asked.large else 1]:
        with tempfile.TemporaryDirectory(prefix=".bench_", dir=asked.folder) as folder:
            found[f"{size // 1_000_000} MB"] = rows = measure(size, asked.rounds, Path(folder))
        synced = rows["torch.save, fsync, rename"]["total"]
        print(
            f"{size // 1_000_000:>5} MB {'stall ms':>32} {'beside':>8} {'total ms':>9} {'of torch.save + fsync':>22}"
        )
        for name, row in rows.items():
            print(f"{name:30} {1e3 * row['stall']:10.1f} {row['beside']:8.2f} {1e3 * row['total']:9.0f} "
                  f"{row['total'] / synced:22.2f}", flush=True)  # fmt: skip
    dist.destroy_process_group()
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
