"""-check_resume: is a run the same to the bit when it is killed and goes on, and on other numbers of processes?

The chosen configuration runs a few steps undisturbed; then again, killed with kill -9 at random moments and gone on
with each time; then on other numbers of processes. All of it in a folder of its own below -out, removed at the end.
"""

import contextlib
import dataclasses
import importlib
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib import launch
from lib.launch import local
from lib.utils.data.plan import divisor
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE, UsageError
from scripts import ledger

STEPS, KILLS, SIZES = 20, 3, (1, 2, 3, 4)
LINE = "{:44} {:12} {:34} {}"


@dataclasses.dataclass
class Row:
    """One row of the table: what is done, and with what it must agree."""

    title: str
    run: str  # its name
    sizes: list[int]  # processes of each start: all but the last are killed
    truth: str = "undisturbed"
    micro: int | None = None  # samples of a micro-batch, where it is not what was asked


class Broken(RuntimeError):
    """A run failed that nobody had disturbed."""


def check(args) -> int:
    """Runs and prints the table. Returns the exit code: 0 if all runs agree, 1 if not.

    Raises UsageError where the runs cannot be started from here, or what was asked cannot be run.
    """
    if launch.launched() or args.slurm or args.nnodes > 1:
        raise UsageError(
            "-check_resume starts its processes itself: run it without torchrun, srun, -slurm and -nnodes"
        )
    if args.limit_steps == 1:
        raise UsageError("-limit_steps 1: -check_resume needs 2 steps or more, to kill the run in between")
    torch.set_num_threads(1)  # a process that is forked while this one has more would wait for them forever
    try:
        with folder_in(Path(args.out)) as folder, ending_well():
            return Check(args, folder).rows()
    except Broken as error:
        print(f"train.py: -check_resume: {error}", file=sys.stderr, flush=True)
        return FAILED


class Check:
    """The runs of one check, and what they left in its folder."""

    def __init__(self, args, folder: Path):
        self.steps, self.folder, self.draw = args.limit_steps or STEPS, folder, random.Random()
        self.size = local.processes(args)
        self.cpu = bool(args.cpu) or not (torch.cuda.device_count() or torch.accelerator.is_available())
        self.every = max(1, self.steps // 7)  # steps between saves
        self.args = changed(
            args, out=str(folder), limit_steps=self.steps, save_every=f"{self.every}steps",
            reset=False, tb=False, check_resume=False, max_hours=None,
            deterministic=args.deterministic or not self.cpu,  # nor would a GPU's bits be the same
        )  # fmt: skip
        self.step_s, self.batch = 0.0, None  # of the undisturbed run: seconds a step, at most; samples a step

    def rows(self) -> int:
        """Runs and prints them all."""
        print(f"-check_resume: {self.steps} steps of {self.args.model}, in {self.folder} (removed at the end)")
        print(LINE.format("what was done", "processes", "largest difference", "first step, from 0, that differs"))
        began = time.monotonic()
        self.row(Row("undisturbed", "undisturbed", [self.size]))
        self.step_s = (time.monotonic() - began) / self.steps
        facts = ledger.read(self.ledger("undisturbed"))[0].facts
        self.batch = facts["batch"]
        self.args = changed(self.args, threads=facts["threads"])  # on other processes it would choose others
        good = [self.row(row) for row in self.planned(facts)]
        print("all as promised" if all(good) else "not as promised, see ! above")
        return FINISHED if all(good) else FAILED

    def planned(self, facts: dict) -> list[Row]:
        """What is compared: killed and resumed; then on other numbers of processes, as far as there are micro-batches
        and devices for them."""
        kills = min(KILLS, self.steps - 1)
        killed = Row(f"killed {kills} times, gone on with each time", "killed", [self.size] * (kills + 1))
        batch, micro = facts["batch"], facts["micro"]
        cut = micro if micro < batch else divisor(batch, math.ceil(batch / 4))
        most = min(batch // cut, max(SIZES) if self.cpu else self.size)
        half_shards = self.args.parallel == "fsdp" and (self.args.bf16 or self.args.fp16)  # one process has none
        others = [size for size in SIZES if size <= most and size != self.size and (size > 1 or not half_shards)]
        if not others or self.args.reduction == "allreduce" or self.args.sync_bn:
            return [killed]
        truth = {"truth": "undisturbed" if cut == micro else "cut", "micro": cut}
        whole = Row(f"undisturbed, with -micro_batch {cut}", "cut", [self.size], **truth)
        alone = [Row("undisturbed", f"on_{size}", [size], **truth) for size in others]
        turns = [*others, self.size, *others][: kills + 1]
        moved = Row("killed, gone on with on others", "moved", turns, **truth)
        return [killed, *([whole] if cut != micro else []), *alone, moved]

    def row(self, row: Row) -> bool:
        """Runs and prints one. True if it agrees with its truth."""
        self.through(row)
        most, share, same = ledger.distance(*(self.folder / name / "checkpoints" for name in (row.truth, row.run)))
        truth, run = (ledger.read(self.ledger(name)) for name in (row.truth, row.run))
        first = ledger.first_difference(truth, run)
        good = first is None and same
        far = "the same bits" if same else f"{most:.1e} ({share:.1e} of the largest)"
        self.tell(row, "" if row.run == row.truth else far, f"{'' if good else '! '}{first or ''}")
        return good

    def tell(self, row: Row, far: str, first: str):
        sizes = ", ".join(str(size) for size in dict.fromkeys(row.sizes))
        print(LINE.format(row.title, sizes, far, first).rstrip(), flush=True)

    def through(self, row: Row):
        """Takes a run to its end, killed where the row says so. Raises Broken or UsageError if it fails by itself."""
        first = min(2 * self.every + 1, self.steps - len(row.sizes) + 1)  # by then there is a checkpoint
        moments = sorted(self.draw.sample(range(first, self.steps), len(row.sizes) - 1))
        for size, moment in zip(row.sizes, [*moments, None], strict=True):
            args, book = self.on(size, row), self.ledger(row.run)
            ledger.hold(book, moment)  # a quick run would else be over before it is killed
            with Start(args, "scripts.check_resume:recorded", self.folder / f"{row.run}.log") as start:
                if moment is not None and start.reaches(moment, book):
                    time.sleep(self.draw.uniform(0, self.step_s))
                    start.kill()
                    start.ends()
                    continue
                code = start.ends()
                if code not in (FINISHED, STOPPED):
                    raise (UsageError if code == USAGE else Broken)(start.last_words())

    def on(self, size: int, row: Row):
        """The args of a row's run on this number of processes."""
        args = changed(self.args, model=row.run, **({"micro_batch": row.micro} if row.micro else {}))
        if size == self.size:
            return args
        args = changed(args, batch_size=self.batch, batch_per_gpu=None)
        names = args.gpus.split(",") if args.gpus else [str(number) for number in range(self.size)]
        return changed(args, cpu=size) if self.cpu else changed(args, gpus=",".join(names[:size]))

    def ledger(self, run: str) -> Path:
        return self.folder / "ledgers" / run


def recorded(args) -> int:
    """One process of a run that keeps a ledger in -out/ledgers/NAME."""
    module = importlib.import_module(f"lib.trainer.{args.trainer}")
    module.Trainer = ledger.keeping(module.Trainer, Path(args.out) / "ledgers" / args.model)
    return local.call("train:run", args)


def changed(args, **others):
    """A copy of args in which these flags differ."""
    copy = type(args)()
    vars(copy).update({**vars(args), **others})
    return copy


class Start:
    """A start of a run in a session of its own, as if at another terminal. None of it outlives the block."""

    def __init__(self, args, target: str, log: Path):
        context = multiprocessing.get_context("fork" if local.fork_is_safe() else "spawn")
        self.process, self.log = context.Process(target=_alone, args=(args, target, str(log))), log
        log.touch()
        self.process.start()
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.ends()

    def reaches(self, step: int, book: Path) -> bool:
        """Waits until so many steps are done, by its ledger. False if it ended before."""
        while self.process.is_alive():
            if (ledger.progress(book, self.pid) or 0) >= step:
                return True
            time.sleep(0.005)
        return False

    def others(self) -> list[int]:
        """The living processes of its session other than the first: launch's children and theirs. Linux only."""
        there = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
        return [pid for pid in there if pid != self.pid and self.lives(pid)]

    def lives(self, pid: int) -> bool:
        """Whether this is a living process of its session."""
        try:
            state, _, _, session, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        threads = int(more[13])  # a zombie with more than one is still writing, and holds its locks
        return int(session) == self.pid and (state not in "ZX" or threads > 1)

    def kill(self, number: int = signal.SIGKILL, pid: int | None = None):
        """Sends a signal to one of its processes, or to all at once."""
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
            elif self.process.is_alive() and os.getpgid(self.pid) != self.pid:  # it has not its session yet
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)

    def ends(self) -> int:
        """Waits until none of its processes is left. Returns its exit code, negative after a signal."""
        self.process.join()
        while left := self.others():
            while any(self.lives(pid) for pid in left):
                time.sleep(0.002)
        return self.process.exitcode

    def last_words(self) -> str:
        """What it said at last."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-20:]
        lines = lines[-1:] if self.process.exitcode == USAGE else lines
        return "\n".join(lines).removeprefix("train.py: ")


def _alone(args, target, log):
    """What the process of a Start does."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(words, 1)
    os.dup2(words, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        code = launch.launch(args, target)
    except UsageError as error:
        code = local.refused(error)
    sys.exit(code)


@contextlib.contextmanager
def folder_in(out: Path):
    """A folder in `out` for the time of the block, and nothing left behind."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".check_", dir=out)
    except OSError as error:
        raise UsageError(f"-out {out}: cannot be written ({error.strerror})") from None
    try:
        with made as folder:
            yield Path(folder)
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def ending_well():
    """A SIGTERM in the block is an exception: what it started is ended, what it wrote removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
