"""Kills runs at random instants and lets them go on: each must end as the run that nothing disturbed.

    python scripts/chaos.py -kills 1000 -ranks 2            the same bits at every step, redone ones too
    python scripts/chaos.py -kills 500 -ranks 1,2,3,4       the number of processes drawn anew at each start

Each start is forked from this one warm process. What every rank trained on must be, once each and in order, the
samples of every epoch's order, however often the run was killed.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lib import check, children, config, launch
from lib.utils import ledger, permutation, preemption

KILL, TERM = signal.SIGKILL, signal.SIGTERM
STRIKES = {  # what is struck -> how often
    ("all", KILL): 4, ("a rank", KILL): 2, ("the parent", KILL): 2,
    ("all", TERM): 1, ("a rank", TERM): 1, ("the parent", TERM): 2,
}  # fmt: skip
RUN = (
    "-dataset chaos -arch chaos -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 4 -save_every 4steps"
    " -log_every 10 -lr_start 1e-2 -clip_grad 1"
)


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: Counter = field(default_factory=Counter)  # by strike
    runs: int = 0
    starts: int = 0
    early: int = 0  # kills before the first micro-batch of a start
    seconds: float = 0.0
    differing: int = 0  # runs that did not end as they should, or did a step again in another way
    share: float = 0.0  # largest difference of a weight, as a share of the largest of its tensor
    missed: int = 0  # samples
    repeated: int = 0
    disordered: int = 0  # epochs
    left: int = 0  # temporary files after a run's end
    first: ledger.Difference | None = None

    def lines(self, exact: bool) -> list[str]:
        """The table."""
        kills = sum(self.kills.values())
        rows = {
            "kills": f"{kills}, {self.early} of them before the first sample of their start",
            **{f"  {signal.Signals(number).name} to {who}": n for (who, number), n in sorted(self.kills.items())},
            "runs, starts": f"{self.runs}, {self.starts}",
            "kills a minute": f"{60 * kills / self.seconds:.0f}",
            f"runs that differ{'' if exact else ' beyond 1e-5'}": self.differing,
            "first difference": self.first or "none",
            "largest difference": "not a bit"
            if exact and not self.differing
            else f"{self.share:.1e} of the largest weight, in double precision",
            "samples missed, repeated": f"{self.missed}, {self.repeated}",
            "epochs in another order": self.disordered,
            "temporary files left": self.left,
        }
        return [f"{name:30} {value}" for name, value in rows.items()]

    @property
    def good(self) -> bool:
        return not (self.differing or self.missed or self.repeated or self.disordered or self.left)


def storm(out: Path, kills: int, sizes: list[int], seed: int = 0, words: str = RUN) -> Tally:
    """Kills runs so many times; each start has one of these numbers of processes."""
    draw, tally, exact = random.Random(seed), Tally(), len(set(sizes)) == 1
    with plugins(), haste():
        args = config.parse_args([*words.split(), "-out", str(out)])
        spans = {size: undisturbed(args, size, exact) for size in sorted(set(sizes))}
        truth = f"on_{min(sizes)}"
        began = time.monotonic()
        while sum(tally.kills.values()) < kills:
            disturbed(args, sizes, spans, draw, tally, kills)
            judge(args, truth, exact, tally)
        tally.seconds = time.monotonic() - began
    return tally


def undisturbed(args, size: int, exact: bool) -> float:
    """Runs without a kill. Returns the seconds it took."""
    began = time.monotonic()
    with started(args, f"on_{size}", size, exact) as start:
        code = start.ends()
    if code:
        raise check.Broken(start.last_words())
    return time.monotonic() - began


def disturbed(args, sizes, spans, draw, tally, most):
    """Takes one run to its end, with as many kills as it meets on the way."""
    code = None
    while code != launch.FINISHED:
        size = draw.choice(sizes)
        with started(args, "run", size, len(spans) == 1) as start:
            tally.starts += 1
            start.process.join(draw.uniform(0, spans[size]) if sum(tally.kills.values()) < most else None)
            struck = start.process.is_alive()
            if struck:
                tally.kills[strike(start, draw)] += 1
            code = start.ends()
            tally.early += struck and ledger.progress(ledgers(args, "run"), start.pid) is None
            if code != launch.FINISHED and not struck:
                raise check.Broken(start.last_words())
    tally.runs += 1


def strike(start, draw) -> tuple:
    """Strikes one way or another. Returns which."""
    who, number = draw.choices(list(STRIKES), STRIKES.values())[0]
    whom = {"all": None, "the parent": start.pid, "a rank": draw.choice(start.others() or [start.pid])}[who]
    start.kill(number, whom)
    return who, number


def judge(args, truth: str, exact: bool, tally: Tally):
    """Compares what a run left with the truth, and removes it."""
    folder, book = Path(args.out) / "run", ledgers(args, "run")
    starts = ledger.read(book)
    _, share, same = ledger.distance(*(Path(args.out) / name / "checkpoints" for name in (truth, "run")))
    first = ledger.first_difference(ledger.read(ledgers(args, truth)), starts, exact)
    tally.first = tally.first or first
    tally.share = max(tally.share, share)
    tally.differing += first is not None or not (same if exact else share <= check.CLOSE)
    count(starts, args, tally)
    tally.left += len(list(folder.rglob("*.partial")) + list(folder.rglob("*.removed")))
    shutil.rmtree(folder)
    shutil.rmtree(book)


def count(starts, args, tally):
    """The samples that led to the end of a run, against the order of each epoch."""
    trained: dict[int, list[int]] = {}
    for (epoch, _), indices in ledger.trained_on(starts).items():
        trained.setdefault(epoch, []).extend(indices)
    for epoch in range(args.epochs):
        got, wanted = trained.get(epoch, []), permutation.order(SAMPLES, args.seed, epoch)[:].tolist()
        tally.missed += len(set(wanted) - set(got))
        tally.repeated += len(got) - len(set(got))
        tally.disordered += got != wanted


def started(args, name: str, size: int, exact: bool) -> check.Start:
    """In single precision; in double where only rounding may differ, so that it cannot grow to more."""
    target = "lib.check:recorded" if exact else "lib.check:doubled"
    return check.Start(check.changed(args, model=name, cpu=size), target, Path(args.out) / f"{name}.log")


def ledgers(args, name: str) -> Path:
    return Path(args.out) / "ledgers" / name


@contextlib.contextmanager
def haste() -> Iterator[None]:
    """One thread for every process, and short waits, for the time of the block: votes after milliseconds, the other
    ranks of a failed run ended at once."""
    before = preemption.ASK_EVERY_S, children.SETTLE_S, children.END_S
    preemption.ASK_EVERY_S, children.SETTLE_S, children.END_S = 0.01, 0.05, 0.3
    torch.set_num_threads(1)
    gc.freeze()  # or the collector of every child would touch, and so copy, all that it inherits
    try:
        with launch.exported({"OMP_NUM_THREADS": "1"}):
            yield
    finally:
        gc.unfreeze()
        preemption.ASK_EVERY_S, children.SETTLE_S, children.END_S = before


SAMPLES = 200


class Noisy(Dataset):
    """Samples of 4 classes, each drawn anew with noise from all three generators."""

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
    importlib.import_module("torch.utils.tensorboard.summary")
    there, made = (
        config.plugins,
        {"arch": ("get_model", smooth_net), "dataset": ("get_dataset", lambda args: Noisy())},
    )
    for kind, (name, builder) in made.items():
        sys.modules[f"lib.{kind}.chaos"] = module = types.ModuleType(f"lib.{kind}.chaos")
        setattr(module, name, builder)
    config.plugins = lambda kind: [*there(kind), "chaos"] if kind in made else there(kind)
    try:
        yield
    finally:
        config.plugins = there
        for kind in made:
            del sys.modules[f"lib.{kind}.chaos"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-kills", type=int, default=200, help="kills, over as many runs as it takes")
    parser.add_argument("-ranks", default="2", help="processes of a start: a number, or several to draw from")
    parser.add_argument("-seed", type=int, default=0, help="of the instants")
    parser.add_argument("-flags", default="", help="further flags of train.py, as '-workers 1'")
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        tally = storm(Path(folder), asked.kills, sizes, asked.seed, f"{RUN} {asked.flags}")
    print(f"scripts/chaos.py {' '.join(sys.argv[1:])}")
    print("\n".join(tally.lines(len(set(sizes)) == 1)))
    return 0 if tally.good else 1


if __name__ == "__main__":
    sys.exit(main())
