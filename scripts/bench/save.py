"""What a save costs: how long it stops the loop, how long until it is on disk; ours, torch's ways and the peers'.

    uv sync --group bench; python scripts/bench/save.py [-large] [-rounds 9] [-threads 2] [-folder DIR] [-json FILE]

Every way saves the same state of about 100 MB (-large: 1 GB too): weights and AdamW's two moments. `stall`: time in
the call, and waiting before the optimizer may step, with one forward and backward pass between the two. `beside`:
that pass over one without a save. `total`: from the call until it is on disk, the loop at rest; where a way does not
fsync (torch.save alone, Lightning, Accelerate), until it is written. Medians, with quartiles, of rounds in which all
ways take turns. A bare loop and most templates save by torch.save; a peer that is not installed is left out.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import compare
import torch
import torch.distributed as dist
from ways import WAYS, Run, Save


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
    """The medians and quartiles of each way."""
    run = Run(size)
    ways = {name: WAYS[name](run, folder / str(number)) for number, name in enumerate(compare.installed(WAYS))}
    for way in ways.values():
        way.file.parent.mkdir(exist_ok=True)
    found = {name: [] for name in ways}
    for number in range(rounds + 2):  # in the first two buffers are made
        for name, way in ways.items():
            figures = once(way, run)
            if number > 1:
                found[name].append(figures)
    return {name: summary(figures) for name, figures in found.items()}


def summary(figures: list[dict]) -> dict:
    """The median of each kind of figure, and its quartiles."""
    kinds = {kind: [one[kind] for one in figures] for kind in figures[0]}
    medians = {kind: statistics.median(values) for kind, values in kinds.items()}
    return {**medians, "quartiles": {kind: compare.quartiles(values) for kind, values in kinds.items()}}


def show(size: int, rows: dict[str, dict]):
    """Prints one table."""
    synced = rows["torch.save, fsync, rename"]["total"]
    heads = f"{'stall ms':>9} {'quartiles':>15} {'beside':>7} {'total ms':>9} {'quartiles':>15}"
    print(f"{f'{size // 1_000_000} MB':29} {heads} {'of torch.save + fsync':>22}")
    for name, row in rows.items():
        stall, total = between(row["quartiles"]["stall"]), between(row["quartiles"]["total"])
        print(f"{name:29} {1e3 * row['stall']:9.1f} {stall:>15} {row['beside']:7.2f} "
              f"{1e3 * row['total']:9.0f} {total:>15} {row['total'] / synced:22.2f}", flush=True)  # fmt: skip


def between(seconds: list[float]) -> str:
    return " to ".join(f"{1e3 * one:.1f}" for one in seconds)


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
        show(size, rows)
    dist.destroy_process_group()
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
