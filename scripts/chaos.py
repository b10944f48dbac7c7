"""Kills runs at random instants and lets them go on: each must end as the run that nothing disturbed.

    python scripts/chaos.py -kills 1000 -ranks 2            the same bits at every step, redone ones too
    python scripts/chaos.py -kills 500 -ranks 1,2,3,4       likewise, each start on another number of processes
    python scripts/chaos.py -switch='-workers 0,-workers 1'  further flags of train.py, drawn so too

Each start is forked from this one warm process. What every rank trained on must be, once each and in order, the
samples of every epoch's order, however often the run was killed. Ctrl-C and SIGTERM end it, with the table so far.
"""

import argparse
import contextlib
import gc
import importlib
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
from lib.launch import environment, local
from lib.utils import preemption
from lib.utils.errors import FINISHED
from scripts import check_resume, ledger

KILL, TERM = signal.SIGKILL, signal.SIGTERM
STRIKES = {  # what is struck -> how often
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
HANG_S = 300.0  # a start that was struck has ended by then


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: Counter = field(default_factory=Counter)  # by strike
    runs: int = 0
    starts: int = 0
    early: int = 0  # kills before the first micro-batch of a start
    late: int = 0  # kills that came when the run was done, or met one of its loader processes that was idle
    switches: int = 0  # starts in another way than the one before
    seconds: float = 0.0
    differing: int = 0  # runs that did not end as they should, or did a step again in another way
    missed: int = 0  # samples
    repeated: int = 0
    left: int = 0  # temporary files after a run's end
    first: ledger.Difference | None = None
    story: list[str] = field(default_factory=list)  # the starts of the first run that was not as it should be

    def lines(self) -> list[str]:
        """The table."""
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
        }
        return [f"{name:30} {value}" for name, value in rows.items()] + self.story

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    @property
    def faults(self) -> int:
        return self.differing + self.missed + self.repeated + self.left


class Way(NamedTuple):
    """One way to start the run."""

    flags: str  # in addition to RUN
    args: object
    name: str  # of its undisturbed run
    span: float = 0.0  # seconds that it takes undisturbed
    begin: float = 0.0  # of these until its first step is done


def storm(out: Path, tally: Tally, kills: int, sizes: list[int], switch=("",), seed: int = 0, words: str = RUN):
    """Kill runs so many times, and count in `tally`.

    Each start has one of these numbers of processes, and one of these further flags.
    """
    draw = random.Random(seed)
    with plugins(), haste():
        flags = [f"-cpu {size} {more}" for size in sorted(set(sizes)) for more in switch]
        args = [config.parse_args([*f"{words} {more}".split(), "-out", str(out)]) for more in flags]
        ways = [Way(flags[n], args[n], f"way_{n}") for n in range(len(flags))]
        ways = [undisturbed(way) for way in ways]
        began = time.monotonic()
        try:
            while tally.total < kills:
                story = disturbed(ways, draw, tally, kills)
                judge(ways[0], story, tally)
        finally:
            tally.seconds = time.monotonic() - began


def undisturbed(way: Way) -> Way:
    """The way with its times, from a run without a kill."""
    began = time.monotonic()
    with started(way, way.name) as start:
        start.reaches(1, book(way, way.name))
        begin = time.monotonic() - began
        code = start.ends()
    if code:
        raise check_resume.Broken(start.last_lines())
    return way._replace(span=time.monotonic() - began, begin=begin)


def disturbed(ways, draw, tally, most) -> list[str]:
    """Takes one run to its end, with as many kills as it meets on the way. Returns what was done to each start.

    Every other strike comes at any instant of a start, the rest after its first step.
    """
    code, before, story = None, None, []
    while code != FINISHED:
        way = draw.choice([way for way in ways if way is not before] or ways)
        with started(way, "run") as start:
            within = draw.uniform(0, way.span)
            if tally.total % 2 and start.reaches(1, book(way, "run")):
                within = draw.uniform(0, way.span - way.begin)
            start.process.join(within if tally.total < most else None)
            struck = strike(start, draw) if start.process.is_alive() else None
            code = start.ends(HANG_S)
        done = ledger.progress(book(way, "run"), start.pid)
        fate = f"{struck[1].name} to {struck[0]}" if struck else "left alone"
        story.append(f"{way.flags}: {fate}, {done} steps of its own done, exit code {code}")
        tally.starts += 1
        tally.switches += before not in (None, way)
        tally.kills.update([struck] if struck else [])
        tally.early += bool(struck) and done is None
        tally.late += bool(struck) and code == FINISHED
        before = way
        if code != FINISHED and not struck:
            raise check_resume.Broken("\n".join([*story, start.last_lines()]))
    tally.runs += 1
    return story


def strike(start, draw) -> tuple:
    """Strikes one way or another. Returns which."""
    who, number = draw.choices(list(STRIKES), STRIKES.values())[0]
    whom = {"all": None, "the parent": start.pid, "a rank": draw.choice(start.others() or [start.pid])}[who]
    start.kill(number, whom)
    return who, number


def judge(truth: Way, story: list[str], tally: Tally):
    """Compares what a run left with the truth, and removes it if it is as it should be."""
    out, bad = Path(truth.args.out), tally.faults
    starts = ledger.read(book(truth, "run"))
    distance = ledger.distance(*(out / name / "checkpoints" for name in (truth.name, "run")))
    first = ledger.first_difference(ledger.read(book(truth, truth.name)), starts)
    tally.first = tally.first or first
    tally.differing += bool(first or distance.names)
    count(starts, truth.args, tally)
    tally.left += sum(file.suffix in (".partial", ".removed") for file in (out / "run").rglob("*"))
    if tally.faults > bad:
        tally.story = tally.story or story
    for folder in (out / "run", book(truth, "run")):
        if tally.faults > bad:
            folder.rename(folder.with_name(f"bad_{tally.runs}"))
        else:
            shutil.rmtree(folder)


def count(starts, args, tally):
    """Count each epoch's samples that led to the end of a run; their order is compared with the true run's."""
    trained: dict[int, list[int]] = {}
    for (epoch, _), indices in ledger.trained_on(starts).items():
        trained.setdefault(epoch, []).extend(indices)
    for epoch in range(args.epochs):
        samples = trained.get(epoch, [])
        tally.missed += SAMPLES - len(set(samples))
        tally.repeated += len(samples) - len(set(samples))


def started(way: Way, name: str) -> check_resume.Start:
    args, log = check_resume.changed(way.args, model=name), Path(way.args.out) / f"{name}.log"
    return check_resume.Start(args, "scripts.check_resume:recorded", log)


def book(way: Way, name: str) -> Path:
    return Path(way.args.out) / "ledgers" / name


@contextlib.contextmanager
def haste() -> Iterator[None]:
    """Give every process one thread, and make waits short, for the time of the block.

    Votes come after milliseconds, and the other ranks of a failed run are ended at once.
    """
    before = preemption.ASK_EVERY_S, local.SHUTDOWN_S
    preemption.ASK_EVERY_S, local.SHUTDOWN_S = 0.01, 0.3
    torch.set_num_threads(1)
    gc.freeze()  # or the collector of every child would touch, and so copy, all that it inherits
    try:
        with environment.override({"OMP_NUM_THREADS": "1"}):
            yield
    finally:
        gc.unfreeze()
        preemption.ASK_EVERY_S, local.SHUTDOWN_S = before


SAMPLES = 200


class Noisy(Dataset):
    """Samples of 4 classes, each drawn with new noise from all three generators."""

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
    """BatchNorm and dropout, and nothing with an edge that would make rounding grow."""
    return nn.Sequential(
        nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48), nn.Tanh(), nn.Dropout(0.3), nn.Linear(48, args.num_classes)
    )


@contextlib.contextmanager
def plugins() -> Iterator[None]:
    """lib.arch.chaos and lib.dataset.chaos, in memory, for the time of the block. Imports what a run would."""
    for heavy in ("torch._dynamo", "torch.utils.tensorboard.summary", "lib.trainer.trainer"):
        importlib.import_module(heavy)  # takes seconds, in which most kills would come too early
    there, made = (
        plugin_files.names,
        {"arch": ("get_model", smooth_net), "dataset": ("get_dataset", lambda args: Noisy())},
    )
    for kind, (name, builder) in made.items():
        sys.modules[f"lib.{kind}.chaos"] = module = types.ModuleType(f"lib.{kind}.chaos")
        setattr(module, name, builder)
    plugin_files.names = lambda kind: [*there(kind), "chaos"] if kind in made else there(kind)
    try:
        yield
    finally:
        plugin_files.names = there
        for kind in made:
            del sys.modules[f"lib.{kind}.chaos"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-kills", type=int, default=200, help="kills, over as many runs as it takes")
    parser.add_argument("-ranks", default="2", help="processes of a start: a number, or several to draw from")
    parser.add_argument("-switch", default="", help="further flags of a start, drawn from several: '-a 1,-a 2'")
    parser.add_argument("-seed", type=int, default=0, help="of the instants")
    parser.add_argument("-flags", default="", help="further flags of train.py, as '-workers 1'")
    options = parser.parse_args()
    sizes, switch = [int(size) for size in options.ranks.split(",")], options.switch.split(",")
    folder, tally = Path(tempfile.mkdtemp(prefix="chaos_")), Tally()
    for number in (signal.SIGINT, TERM):  # in the background too
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        storm(folder, tally, options.kills, sizes, switch, options.seed, f"{RUN} {options.flags}")
    print(f"scripts/chaos.py {' '.join(sys.argv[1:])}")
    print("\n".join(tally.lines()))
    if tally.faults:
        print(f"what differs lies in {folder}, named bad_N")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
