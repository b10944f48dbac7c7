"""What a run costs with W ranks, measured on one machine as far as possible. docs/scaling.md has the models for more.

    python scripts/bench/scale.py [plan exchange meet checkpoint start] [-ranks 1 1024 4096 16384] [-tensors N]

plan: a rank's next micro-batch and its keys, in a World of W ranks without processes. exchange: votes, sums and lists
among real processes. meet: how gloo connects W ranks, each a thread. checkpoint: a past of W small files, published,
read, verified and removed by the functions of a run. start: file operations of a run of one step, by strace. Times
are CPU time, the minimum of several calls: other work on the machine disturbs it little. One column says "wall".
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lib.utils import distributed, seeding  # noqa: E402
from lib.utils.checkpoint import atomic, manager, resume, run_folder, shards, state  # noqa: E402
from lib.utils.data.loader import Loader  # noqa: E402
from lib.utils.data.plan import Plan  # noqa: E402
from lib.utils.distributed import World  # noqa: E402
from lib.utils.monitoring import metrics  # noqa: E402

MOST_PROCESSES, MOST_THREADS = 16, 256  # what two cores and 24 GB hold without trouble
REPEAT = 20
LOOKS = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat2", "readlink")


def main(argv: list[str] | None = None):
    """Print a table for each part that is named."""
    args = parse(argv)
    torch.set_num_threads(1)
    command = " ".join(["python scripts/bench/scale.py", *(sys.argv[1:] if argv is None else argv)])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"`{command}` on {os.cpu_count()} cores, {versions}, {datetime.date.today()}")
    for part in args.parts or PARTS:
        rows = PARTS[part](args)
        if not rows:
            print(f"\n{part}: for none of these -ranks, {args.ranks}", flush=True)
            continue
        print(f"\n{part}\n\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
        for row in rows:
            print(f"| {' | '.join(shown(value) for value in row.values())} |", flush=True)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("-ranks", type=int, nargs="+", default=[2, 4, 16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("-tensors", type=int, default=1500, help="of a sharded model and its optimizer")
    parser.add_argument("-folder", default=tempfile.gettempdir(), help="the disk of the checkpoints")
    args = parser.parse_args(argv)
    for part in {*args.parts} - {*PARTS}:
        parser.error(f"{part} is none of {', '.join(PARTS)}")
    return args


def shown(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def cpu_ms(call, times: int = REPEAT) -> float:
    """Return the CPU time of a call in this process, with all its threads: the least of so many."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        call()
        taken.append(1e3 * (time.process_time() - began))
    return min(taken)


def in_processes(call, size: int, *given) -> list:
    """Return what `call(rank, size, *given)` returns in `size` forked processes, which end without a clean-up."""
    fork, queue = multiprocessing.get_context("fork"), multiprocessing.SimpleQueue()

    def run(rank):
        queue.put(call(rank, size, *given))
        os._exit(0)  # otherwise it would wait for gloo's threads

    children = [fork.Process(target=run, args=(rank,)) for rank in range(size)]
    for child in children:
        child.start()
    found = [queue.get() for _ in children]
    for child in children:
        child.join()
    return found


def plan(args) -> list[dict]:
    """Measure what the last of W ranks computes to know its next micro-batch of 4 samples, and to seed it."""
    rows = []
    for size in args.ranks:
        row: dict = {"ranks": size}
        samples, last = 10**7, World(rank=size - 1, size=size)
        loader = Loader(range(samples), Plan(samples, 4 * size, 4), last, seed=0, shuffle=True, workers=0)
        batches = loader.micro_batches(0)
        row["epoch's first of 10^7 samples, ms"] = cpu_ms(lambda batches=batches: next(batches), 1)
        row["next, us"] = 1e3 * cpu_ms(lambda batches=batches: next(batches))
        row["seeds, us"] = 1e3 * cpu_ms(lambda size=size: seeding.seed(seeding.PASS, 0, 5, size))
        rows.append(row)
    return rows


def exchange(args) -> list[dict]:
    """Measure exchanges among W processes: the CPU time of all of them together, which grows with the messages."""
    rows = []
    for size in (size for size in args.ranks if 1 < size <= MOST_PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            found = in_processes(_exchange, size, folder)
        rows.append({"ranks": size, **{name: sum(one[name] for one in found) for name in found[0]}})
    return rows


def _exchange(rank, size, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    world, sums = World(rank=rank, size=size), metrics.Sums()
    file = {f"shard_{rank:04}": [10**9, "0123456789abcdef"]}
    sums.update({f"figure {number}": 0.1 for number in range(5)})
    exchanges = {
        "a vote, ms": lambda: distributed.all_reduce_max([0.0, 0.0], world),
        "5 sums by name, ms": sums.pending,
        "a file of each to all, ms": lambda: distributed.gather(file, world),
    }
    found = {}
    for name, call in exchanges.items():
        dist.barrier()
        found[name] = cpu_ms(lambda call=call: [call() for _ in range(5)]) / 5
    dist.barrier()
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def meet(args) -> list[dict]:
    """Measure the time until gloo's groups of W ranks are connected, each rank a thread of one process."""
    sizes = [size for size in args.ranks if 1 < size <= MOST_THREADS]
    mesh = [in_processes(_meet, 1, size, False)[0] for size in sizes if size <= MOST_THREADS // 4]
    return mesh + [in_processes(_meet, 1, size, True)[0] for size in sizes]


def _meet(_rank, _size, ranks, lazy):
    keys, groups = dist.HashStore(), {}

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads = [dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)], 1
        groups[rank] = dist.ProcessGroupGloo(keys, rank, ranks, options)

    before, began = open_files(), time.process_time()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    address = max(len(keys.get(name)) for name in keys.list_keys())
    return {
        "ranks": ranks,
        "connected": "when they talk" if lazy else "each with each other",
        "CPU of all, ms": 1e3 * (time.process_time() - began),
        "open files of a rank": (open_files() - before) / ranks,
        "an address, bytes": address,
        "read by all, MB": address * ranks * ranks / 1e6,
    }


def checkpoint(args) -> list[dict]:
    """Measure a checkpoint of W files: what the first rank does to publish it, and each rank to find it."""
    rows = []
    for size in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append({"files": size, **_checkpoint(Path(folder), size, args.tensors)})
    return rows


def _checkpoint(folder, size, count):
    saver = manager.Checkpoints(folder / "checkpoints", World())
    saver.folder.mkdir()
    names = [f"optim.blocks.{number}.attention.qkv.weight.exp_avg" for number in range(count)]
    facts = {
        "state": dataclasses.asdict(resume.State()),
        "config": {"samples": 1, "batch_size": 1, "micro_batch": 1, "drop_last": False},
        "about": {},
        "tensors": {name: ["F32", [96 * size, 12288]] for name in names},
    }
    past, partial = saver.folder / "000001_step_1", saver.folder / "000001_step_1.partial"
    save = manager.Save(past, partial, facts, keep=False, best={}, job=concurrent.futures.Future())
    partial.mkdir()
    files = map(shards.FILE_NAME.format, range(size))
    answers = [{file: shards.write(partial / file, {"w": torch.zeros(8)})} for file in files]
    began = time.perf_counter()
    publish = cpu_ms(lambda: saver._publish(save, answers), 1)
    wall = time.perf_counter() - began
    return {
        "manifest, MB": (past / "manifest.json").stat().st_size / 1e6,
        "publish, ms": publish,
        "publish, wall ms": 1e3 * wall,
        "list, ms": cpu_ms(lambda: run_folder.list_checkpoints(saver.folder)),
        "read manifest, ms": cpu_ms(lambda: state.read_manifest(past), 5),
        "verify a rank's share, ms": cpu_ms(lambda: resume._fault_of(past, World(rank=size - 1, size=size), True), 5),
        "remove, ms": cpu_ms(lambda: atomic.remove_folder(past), 1),
    }


def start(args) -> list[dict]:
    """Count the file operations of a run of one step, on one process and on two, by strace."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            trace = Path(folder, f"trace_{processes}")
            arguments = f"train.py -cpu {processes} -limit_steps 1 -out {folder} -model p{processes}"
            command = f"strace -f -qq -s 256 -e trace=%file,read,pread64,getdents64 -o {trace}".split()
            done = subprocess.run(
                [*command, sys.executable, *arguments.split()], cwd=ROOT, capture_output=True, text=True
            )
            if done.returncode not in (0, 75):
                raise RuntimeError(f"python {arguments} ended with {done.returncode}: {done.stderr[-500:]}")
            rows.append({"processes": processes, **_operations(trace.read_text(errors="replace"))})
    return rows


def _operations(trace: str) -> dict:
    calls = collections.Counter(re.findall(r"^\d+ +(\w+)\(", trace, re.MULTILINE))
    opened = re.findall(r'^\d+ +open(?:at)?\([^"]*"([^"]+)".* = \d+', trace, re.MULTILINE)
    places = ("/proc", "/sys", "/dev", "/tmp")
    kept = {path for path in opened if not path.startswith(places)}
    size = sum(Path(path).stat().st_size for path in kept if Path(path).is_file())
    looked = sum(calls[name] for name in LOOKS)
    return {
        "all": sum(calls.values()),
        "stat and access": looked,
        "open": calls["openat"] + calls["open"],
        "that found nothing": trace.count("ENOENT"),
        "read": calls["read"] + calls["pread64"],
        "list": calls["getdents64"],
        "files": len(kept),
        "their MB": size / 1e6,
    }


PARTS = {part.__name__: part for part in (plan, exchange, meet, checkpoint, start)}

if __name__ == "__main__":
    main()
