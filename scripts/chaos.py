"""Kills runs at random instants and resumes them: each must end with the bits of an uninterrupted run.

    python scripts/chaos.py -kills 1000 -ranks 2            the same bits at every step, also of repeated steps
    python scripts/chaos.py -kills 500 -ranks 1,2,3,4       the same, each start on another number of processes
    python scripts/chaos.py -kills 500 -ranks 2,3 -lost     only one process of several is killed: no step is lost
    python scripts/chaos.py -switch='-workers 0,-workers 1'  further flags of train.py, drawn for each start

Each start is forked from this process, which has imported torch. However often a run is killed, its ranks together
must have trained on the samples of every epoch once each, in order. Ctrl-C and SIGTERM end it and print the table.
"""

import argparse
import contextlib
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lib import config
from lib.config import plugins as plugin_files
from lib.launch import local
from lib.utils import preemption
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED
from scripts import check_resume, ledger

KILL, TERM = signal.SIGKILL, signal.SIGTERM
SIGNALS = {  # target and signal: relative frequency
    ("all", KILL): 4,
    ("a rank", KILL): 2,
    ("the parent", KILL): 2,
    ("all", TERM): 1,
    ("a rank", TERM): 1,
    ("the parent", TERM): 2,
}
RUN = (
    "-dataset chaos -arch chaos -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 4 -save_every 4steps"
    " -log_every 10 -lr_start 1e-2 -clip_grad 1 -deterministic"
)
HANG_S = 300.0  # seconds after which a signalled start must have ended


@dataclass
class Tally:
    """What was done, and the differences that were found."""

    kills: Counter = field(default_factory=Counter)  # by target and signal
    runs: int = 0
    starts: int = 0
    early: int = 0  # kills before the first micro-batch of a start
    late: int = 0  # kills after the run was done, or of one of its idle loader processes
    switches: int = 0  # starts with other flags than the one before
    seconds: float = 0.0
    differing: int = 0  # runs that ended with other bits, or repeated a step with another result
    missed: int = 0  # samples
    repeated: int = 0
    left: int = 0  # temporary files that remained after a run's end
    survived: int = 0  # kills of one process of several, in its training
    lost: int = 0  # steps that were not saved by those left
    first: ledger.Difference | None = None
    story: list[str] = field(default_factory=list)  # the starts of the first run that was wrong

    def lines(self) -> list[str]:
        """Return the lines of the table."""
        rows = {
            "kills": self.total,
            "  too early, too late": f"{self.early} before their start's first sample, {self.late} when it was done",
            **{f"  {signal.Signals(number).name} to {who}": n for (who, number), n in sorted(self.kills.items())},
            "runs, starts, switches": f"{self.runs}, {self.starts}, {self.switches}",
            "kills a minute": f"{60 * self.total / max(self.seconds, 1):.0f}",
            "runs that differ": self.differing,
            "first difference": self.first or "none",
            "samples missed, repeated": f"{self.missed}, {self.repeated}",
            "temporary files left": self.left,
            "one process lost, steps lost": f"{self.survived}, {self.lost}",
        }
        return [f"{name:30} {value}" for name, value in rows.items()] + self.story

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    @property
    def faults(self) -> int:
        return self.differing + self.missed + self.repeated + self.left + self.lost


class Way(NamedTuple):
    """One way to start the run: its flags."""

    flags: str  # in addition to RUN
    args: object
    name: str  # of its uninterrupted run
    span: float = 0.0  # seconds of its uninterrupted run
    begin: float = 0.0  # seconds until its first step is done


def storm(
    out: Path, tally: Tally, kills: int, sizes: list[int], switch=("",), seed: int = 0, base: str = RUN, lost=False
):
    """Kill runs this many times, and count in `tally`.

    Each start has one of these numbers of processes, and one of these further flags.
    """
    draw = random.Random(seed)
    with plugins(), short_waits():
        flags = [f"-cpu {size} {more}" for size in sorted(set(sizes)) for more in switch]
        args = [config.parse_args([*f"{base} {more}".split(), "-out", str(out)]) for more in flags]
        ways = [Way(flags[n], args[n], f"way_{n}") for n in range(len(flags))]
        ways = [with_times(way) for way in ways]
        started_at = time.monotonic()
        try:
            while tally.total < kills:
                story = run_with_kills(ways, draw, tally, kills, {("a rank", KILL): 1} if lost else SIGNALS)
                compare_with_truth(ways[0], story, tally)
        finally:
            tally.seconds = time.monotonic() - started_at


def with_times(way: Way) -> Way:
    """Return the way with its times, from a run without a kill."""
    started_at = time.monotonic()
    with start_run(way, way.name) as start:
        start.reaches(1, book(way, way.name))
        begin = time.monotonic() - started_at
        code = start.wait()
    if code:
        raise check_resume.Broken(start.last_lines())
    return way._replace(span=time.monotonic() - started_at, begin=begin)


def run_with_kills(ways, draw, tally, most, signals) -> list[str]:
    """Run one run to its end, with as many kills as happen on the way. Returns what was done to each start.

    Every other signal is sent at any instant of a start, the rest after its first step.
    """
    code, before, story = None, None, []
    while code != FINISHED:
        way = draw.choice([way for way in ways if way is not before] or ways)
        with start_run(way, "run") as start:
            within = draw.uniform(0, way.span)
            if tally.total % 2 and start.reaches(1, book(way, "run")):
                within = draw.uniform(0, way.span - way.begin)
            start.process.join(within if tally.total < most else None)
            sent = send_random_signal(start, draw, signals) if start.process.is_alive() else None
            code = start.wait(HANG_S)
        done = ledger.progress(book(way, "run"), start.pid)
        fate = f"{sent[1].name} to {sent[0]}" if sent else "left alone"
        story.append(f"{way.flags}: {fate}, {done} steps of its own done, exit code {code}")
        is_whole = way.args.parallel == "ddp" and way.args.deterministic  # else only rank 0 has all of the state
        if sent == ("a rank", KILL) and code != FINISHED and way.args.cpu > 1 and is_whole:
            count_lost(way, start.pid, tally)
        tally.starts += 1
        tally.switches += before not in (None, way)
        tally.kills.update([sent] if sent else [])
        tally.early += bool(sent) and done is None
        tally.late += bool(sent) and code == FINISHED
        before = way
        if code != FINISHED and not sent:
            raise check_resume.Broken("\n".join([*story, start.last_lines()]))
    tally.runs += 1
    return story


def count_lost(way: Way, session: int, tally: Tally):
    """Count the steps that one of those left had done, and that no checkpoint has."""
    done = sorted(ledger.progress(book(way, "run"), session, rank) or 0 for rank in range(way.args.cpu))
    saved = run_folder.list_checkpoints(Path(way.args.out) / "run" / "checkpoints")
    tally.survived += done[-2] > 0
    tally.lost += max(0, done[-2] - max((int(one.name.rpartition("_")[2]) for one in saved), default=0))


def send_random_signal(start, draw, signals) -> tuple:
    """Send a random signal to a random target. Returns both."""
    who, number = draw.choices(list(signals), signals.values())[0]
    whom = {"all": None, "the parent": start.pid, "a rank": draw.choice(start.others() or [start.pid])}[who]
    start.kill(number, whom)
    return who, number


def compare_with_truth(truth: Way, story: list[str], tally: Tally):
    """Compare a run with the truth, and remove it if it is the same."""
    out, bad = Path(truth.args.out), tally.faults
    starts = ledger.read(book(truth, "run"))
    distance = ledger.distance(*(out / name / "checkpoints" for name in (truth.name, "run")))
    first = ledger.first_difference(ledger.read(book(truth, truth.name)), starts)
    tally.first = tally.first or first
    tally.differing += bool(first or distance.names)
    if truth.args.dataset == "chaos" and not truth.args.balance:  # else an epoch need not have each sample once
        count(starts, truth.args, tally)
    tally.left += sum(file.suffix == ".partial" for file in (out / "run").rglob("*"))
    if tally.faults > bad:
        tally.story = tally.story or story
    for folder in (out / "run", book(truth, "run")):
        if tally.faults > bad:
            folder.rename(folder.with_name(f"bad_{tally.runs}"))
        else:
            shutil.rmtree(folder)


def count(starts, args, tally):
    """Count each epoch's samples that led to the end of a run; the ledgers' comparison checks their order."""
    trained: dict[int, list[int]] = {}
    for (epoch, _), indices in ledger.trained_on(starts).items():
        trained.setdefault(epoch, []).extend(indices)
    for epoch in range(args.epochs):
        samples = trained.get(epoch, [])
        tally.missed += SAMPLES - len(set(samples))
        tally.repeated += len(samples) - len(set(samples))


def start_run(way: Way, name: str) -> check_resume.Start:
    args, log = check_resume.change_flags(way.args, model=name), Path(way.args.out) / f"{name}.log"
    return check_resume.Start(args, "scripts.check_resume:run_with_ledger", log)


def book(way: Way, name: str) -> Path:
    return Path(way.args.out) / "ledgers" / name


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """Give every process one thread and make waits short during the block.

    Votes come every few milliseconds, and the other ranks of a failed run are ended at once.
    """
    before = preemption.ASK_EVERY_S, local.SHUTDOWN_S
    preemption.ASK_EVERY_S, local.SHUTDOWN_S = 0.01, 0.3
    torch.set_num_threads(1)
    gc.freeze()  # otherwise the collector of every child would touch, and so copy, all that it inherits
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        gc.unfreeze()
        preemption.ASK_EVERY_S, local.SHUTDOWN_S = before


SAMPLES = 200


class Noisy(Dataset):
    """Samples of 4 classes with new noise from all three random generators."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.labels = torch.randint(4, (SAMPLES,), generator=generator)
        self.points = torch.randn(SAMPLES, 32, generator=generator) + self.labels[:, None]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        point = self.points[index] + 0.1 * torch.randn(32)
        point[0] += random.random()
        point[1] += np.random.rand()
        return point, self.labels[index]


def smooth_net(args) -> nn.Module:
    """A network with BatchNorm and dropout that is smooth, so that rounding errors do not grow."""
    return nn.Sequential(
        nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48), nn.Tanh(), nn.Dropout(0.3), nn.Linear(48, args.num_classes)
    )


@contextlib.contextmanager
def plugins() -> Iterator[None]:
    """Define lib.arch.chaos and lib.dataset.chaos in memory during the block, and import what a run imports."""
    for heavy in ("torch._dynamo", "torch.utils.tensorboard.summary", "lib.trainer.trainer"):
        importlib.import_module(heavy)  # takes seconds, during which most kills would come too early
    names_before, made = (
        plugin_files.names,
        {"arch": ("get_model", smooth_net), "dataset": ("get_dataset", lambda args: Noisy())},
    )
    for kind, (name, builder) in made.items():
        sys.modules[f"lib.{kind}.chaos"] = module = types.ModuleType(f"lib.{kind}.chaos")
        setattr(module, name, builder)
    plugin_files.names = lambda kind: [*names_before(kind), "chaos"] if kind in made else names_before(kind)
    try:
        yield
    finally:
        plugin_files.names = names_before
        for kind in made:
            del sys.modules[f"lib.{kind}.chaos"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-kills", type=int, default=200, help="kills, over as many runs as it takes")
    parser.add_argument("-ranks", default="2", help="processes of a start: a number, or several to draw from")
    parser.add_argument("-switch", default="", help="further flags of a start, drawn from several: '-a 1,-a 2'")
    parser.add_argument("-seed", type=int, default=0, help="of the instants")
    parser.add_argument("-flags", default="", help="further flags of train.py, as '-workers 1'")
    parser.add_argument("-lost", action="store_true", help="kill one process of several only")
    options = parser.parse_args()
    sizes, switch = [int(size) for size in options.ranks.split(",")], options.switch.split(",")
    folder, tally = Path(tempfile.mkdtemp(prefix="chaos_")), Tally()
    for number in (signal.SIGINT, TERM):  # also if it runs in the background
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        storm(folder, tally, options.kills, sizes, switch, options.seed, f"{RUN} {options.flags}", options.lost)
    print(f"scripts/chaos.py {' '.join(sys.argv[1:])}")
    print("\n".join(tally.lines()))
    if tally.faults:
        print(f"what differs lies in {folder}, named bad_N")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
