"""Time to the first index, time to resume at 90 % of an epoch, and peak memory, of samplers over n samples.

    python scripts/bench/samplers.py [-n 1e5 1e7 1e8] [-rounds 3] [-memory GB] [-seconds S] [-json FILE]

Ours next to torch's DistributedSampler (which resumes by skipping), torchdata's StatefulDataLoader and the way of
cycling_utils (the epoch as a list, sliced). Each figure is the median over fresh processes of one thread; memory is
what the largest resident set grew by after everything was imported and tried out on a small set. What would take more
than -memory or -seconds, by the rates in WAYS, is not tried.
"""

import argparse
import importlib.util
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BATCH = 1000  # samples of a StatefulDataLoader's batch

# The process that starts the others imports nothing large: on Linux they would inherit its largest resident set.


def ours(n, done, _state):
    from lib.utils.compat.samplers import InterruptableDistributedSampler

    sampler = InterruptableDistributedSampler(range(n), num_replicas=1, rank=0)
    sampler.load_state_dict({"epoch": 0, "progress": done})
    return next(iter(sampler))


def torchs(n, done, _state):
    from torch.utils.data import DistributedSampler

    return next(itertools.islice(DistributedSampler(range(n), num_replicas=1, rank=0), done, None))


def sliced(n, done, _state):
    import torch

    indices = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return next(iter(indices[0:n:1][done:]))


def torchdatas(n, _done, state):
    loader = stateful(n)
    if state:
        loader.load_state_dict(state)
    return next(iter(loader))


def stateful(n):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(n), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def state_at(n, done):
    """The state of a StatefulDataLoader that has given out `done` samples."""
    loader = stateful(n)
    for _ in zip(range(done // BATCH), loader, strict=False):
        pass
    return loader.state_dict()


WAYS = {  # what runs, and by what rates it is judged: bytes and seconds a sample
    "ours": (ours, (8, 0.1e-6)),
    "torch DistributedSampler": (torchs, (56, 0.25e-6)),
    "cycling_utils' way": (sliced, (64, 0.25e-6)),
    "torchdata StatefulDataLoader": (torchdatas, (90, 0.8e-6)),
}


def main(argv: list[str] | None = None):
    """Prints the table, and with -json writes it into a file."""
    args, rows = parse(argv), []
    if args.child:
        child(*json.loads(args.child))
        return
    print(f"{'n':>8}  {'':30}{'first index':>24}{'resume at 90 %':>24}")
    for n, way in itertools.product(args.n, WAYS):
        rows.append({"n": n, "way": way, **row(args, n, way)})
        print(f"{n:8.0e}  {way:30}{shown(rows[-1], 'first')}{shown(rows[-1], 'resume')}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=lambda text: int(float(text)), nargs="+", default=[10**5, 10**7, 10**8])
    parser.add_argument("-rounds", type=int, default=3, help="fresh processes for each figure")
    parser.add_argument("-memory", type=float, default=8.0, help="the most that is tried (GB)")
    parser.add_argument("-seconds", type=float, default=60.0, help="the longest that is tried (s)")
    parser.add_argument("-json", metavar="FILE", help="write the table there too")
    parser.add_argument("-child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def row(args, n, way):
    """{"first": (seconds, MB), "resume": (seconds, MB)}, or the reason why there are none."""
    _, rates = WAYS[way]
    if n * rates[0] > args.memory * 1e9 or n * rates[1] > args.seconds:
        return {"reason": "does not fit"}
    if way.startswith("torchdata") and importlib.util.find_spec("torchdata") is None:
        return {"reason": "not installed: uv sync --group bench"}
    with tempfile.TemporaryDirectory() as folder:
        return {
            phase: measured(args, n, way, done, folder) for phase, done in (("first", 0), ("resume", n // 10 * 9))
        }


def measured(args, n, way, done, folder):
    state = Path(folder) / "state.pt" if done and way.startswith("torchdata") else None
    if state:
        start(n, way, done, str(state), "save")
    runs = [json.loads(start(n, way, done, str(state or ""), "load")) for _ in range(args.rounds)]
    return [statistics.median(values) for values in zip(*runs, strict=True)]


def start(*case):
    command = [sys.executable, __file__, "-child", json.dumps(case)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def child(n, way, done, state, what):
    """One case in this process: prints [seconds, MB], or saves the state to resume from."""
    sys.path.insert(0, str(ROOT))
    import torch

    if what == "save":
        torch.save(state_at(n, done), state)
        return
    torch.set_num_threads(1)
    run = WAYS[way][0]
    saved = torch.load(state, weights_only=True) if state else None
    run(10 * BATCH, 0, None)
    before, began = largest(), time.perf_counter()
    run(n, done, saved)
    print(json.dumps([time.perf_counter() - began, (largest() - before) / 1e6]))


def largest():
    """The largest resident set of this process so far, bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def shown(row, phase):
    """A cell of the table."""
    if "reason" in row:
        return f"{row['reason'] if phase == 'first' else '':>24}"
    seconds, megabytes = row[phase]
    return f"{seconds:12.4f} s {megabytes:6.0f} MB"


if __name__ == "__main__":
    main()
