"""How many threads a pass needs on the CPU: its work, and the time of a training step with 1, 2, ... threads.

    python scripts/bench/threads.py [-seconds X]

lib/utils/runtime.py's WORK comes from this table. Run it on a machine that does nothing else.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib import config
from lib.config import plugins
from lib.launch import environment

os.environ.update({**environment.OPENMP_SPIN, **os.environ})  # as train.py does, before torch is imported

import torch

from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.utils import runtime, seeding
from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World

CASES = (
    *(f"-arch mlp -mlp_width {width}" for width in (32, 128, 256, 512, 1024, 2048)),
    *(f"-batch_size {batch}" for batch in (8, 64, 256)),
    *(f"-dataset fake -arch resnet -image_size 32 -batch_size {batch}" for batch in (1, 4, 16)),
    *(f"-dataset tokens -arch gpt -batch_size {batch}" for batch in (1, 4, 16)),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-seconds", type=float, default=4.0, help="time to measure each case")
    seconds, cores = parser.parse_args().seconds, len(os.sched_getaffinity(0))
    counts = sorted({2**power for power in range(10) if 2**power <= cores} | {cores})
    print(f"| flags | forward, GFLOP | {' | '.join(f'{count} threads, ms' for count in counts)} | chosen |")
    print("| --- " * (len(counts) + 3) + "|")
    for flags in CASES:
        step, work = prepare(flags)
        milliseconds = " | ".join(f"{1000 * time:.2f}" for time in measure(step, counts, seconds))
        chosen = runtime.threads_for(work, cores)
        print(f"| `{flags}` | {work / 1e9:.3f} | {milliseconds} | {chosen} |", flush=True)


def prepare(flags: str):
    """Return a function that takes a training step with these flags, and the work of its forward pass."""
    args, world = config.parse_args([*flags.split(), "-cpu", "1"]), World()
    seeding.seed_building(args.seed)
    data = loader.splits(plugins.load("dataset", args.dataset).get_dataset(args), args.dataset)["train"]
    plan = Plan(len(data), args.batch_size, args.batch_size)
    batch = loader.first_batch(data, plan, world, args)
    model, criterion = plugins.load("arch", args.arch).get_model(args), losses.get_loss(args)
    optimizer = optimizers.get_optimizer(model, args)
    inputs, targets = batch

    def step():
        criterion(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, runtime.count_flops(model, batch)


def measure(step, counts: list[int], seconds: float) -> list[float]:
    """Return the median seconds of a step with each number of threads, which take turns of a tenth of a second."""
    times = {count: [] for count in counts}
    until = time.monotonic() + seconds
    while time.monotonic() < until or not times[counts[-1]]:
        for count in counts:
            torch.set_num_threads(count)
            step()  # starts the threads
            turn_ends = time.monotonic() + 0.1
            while time.monotonic() < turn_ends or not times[count]:
                start = time.perf_counter()
                step()
                times[count].append(time.perf_counter() - start)
    return [statistics.median(times[count]) for count in counts]


if __name__ == "__main__":
    main()
