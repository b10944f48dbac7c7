"""Time to the first step of a run, and of one that goes on in the middle of an epoch: Baton and its peers.

    uv sync --group bench; python scripts/bench/starts.py [-rounds 7] [-procs 1 2] [-only NAME ...] [-json FILE]

Whole processes, started in turn, from the start to the line that tells of the step; medians over the rounds, and of
each round's ratio to the bare script. Each peer is a script of scripts/bench/children, with the imports that its user
would write; Baton is train.py. Two processes: mp.spawn for bare and template, Lightning starts its own, torchrun for
Accelerate (whose `accelerate launch` starts one on the CPU, or wants MPI), -cpu 2 for Baton.

To resume: from step 16 of an epoch of 32. Baton goes on with the very next samples; Accelerate skips as many batches
as were done, of another order; Lightning's Trainer counts on, with the first batches again; bare, template and Fabric
load and begin the epoch again. A peer that is not installed is left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = Path("scripts", "bench", "children")
FLAGS = "-dataset random -random_samples 2048 -batch_size 64 -epochs 1 -log_every 1"  # as children/task.py
SCRIPTS = {
    "Baton": ["train.py", *FLAGS.split()],
    compare.BASE: [str(CHILDREN / "bare.py")],
    "Lightning Fabric": [str(CHILDREN / "by_fabric.py")],
    "Lightning Trainer": [str(CHILDREN / "by_lightning.py")],
    "Accelerate": [str(CHILDREN / "by_accelerate.py")],
    "source template": [str(CHILDREN / "template.py")],
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
MIDDLE = 16
STOPPED = 75  # how train.py ends at -limit_steps


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-rounds", type=int, default=7, help="starts of each")
    parser.add_argument("-procs", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("-only", nargs="+", choices=list(SCRIPTS), help="these, and the bare script")
    parser.add_argument("-json", type=Path, help="write the figures to this file")
    asked = parser.parse_args(argv)
    wanted = [name for name in SCRIPTS if not asked.only or name in (*asked.only, compare.BASE)]
    names = compare.installed(wanted)
    found = {"absent": sorted(set(wanted) - set(names))}
    for procs in asked.procs:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measured(names, procs, asked.rounds, Path(folder))
        for kind, values in seconds.items():
            title = f"time to {kind}, {procs} process(es)"
            found[title] = compare.show(title, values, unit="s", scale=1, digits=2)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def measured(names: list[str], procs: int, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first step and to resume, by name."""
    for name in names:  # this also brings the packages into the disk's cache
        started(name, procs, folder / name, last=MIDDLE, first=1)
    seconds = {kind: {name: [] for name in names} for kind in ("the first step", "resume")}
    for turn in range(rounds):
        for name in compare.in_turn(names, turn):
            new, copy = folder / "new", folder / "copy"
            seconds["the first step"][name].append(started(name, procs, new, last=1, first=1))
            shutil.copytree(folder / name, copy)
            seconds["resume"][name].append(started(name, procs, copy, last=MIDDLE + 1, first=MIDDLE + 1))
            shutil.rmtree(new)
            shutil.rmtree(copy)
    return seconds


def started(name: str, procs: int, out: Path, *, last: int, first: int) -> float:
    """Seconds from the start of a run that ends after step `last` to its line that tells of a step, which has to be
    `first`; the run is then waited for."""
    out.mkdir(exist_ok=True)
    torchrun = [*TORCHRUN, str(procs)] if name == "Accelerate" and procs > 1 else []
    words = [*torchrun, *SCRIPTS[name], "-cpu", str(procs), "-out", str(out), "-limit_steps", str(last)]
    threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // procs))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    began, told, seconds = time.perf_counter(), [], None
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env={**os.environ, **threads}, **pipes) as run:
        for line in run.stdout:
            told.append(line)
            if seconds is None and f"step {first}/" in line:
                seconds = time.perf_counter() - began
    if run.returncode not in (0, STOPPED) or seconds is None:
        said = "".join(told[-30:])
        raise RuntimeError(f"{' '.join(words)} ended with {run.returncode}, step {first} wanted; it said:\n{said}")
    return seconds


if __name__ == "__main__":
    main()
