"""-check_resume: is a run the same to the bit when it is killed and resumed, and on other numbers of processes?

The chosen configuration runs a few steps without a kill. Then it is killed with kill -9 at random moments and
resumed, and the same on other numbers of processes. If bits differ, more runs search for the cause. All runs are in a
folder below -out, which is removed at the end.
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
from typing import TYPE_CHECKING

import torch

from lib import launch
from lib.config import plugins
from lib.launch import local
from lib.utils import seeding
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE, UsageError
from scripts import ledger

if TYPE_CHECKING:
    from lib.config import Args

STEPS, KILLS, SIZES = 20, 3, (1, 2, 3, 4)
LINE = "{:44} {:12} {:34} {}"

# The likely cause of a difference: a flag, its value without which the difference vanishes, and the text.
DATA = [("workers", 0, "data that depend on the worker process that draws them: not with -workers 0")]
RESULTS = [
    ("compile", None, "-compile, whose code depends on the sizes that it meets first: not without it"),
    ("deterministic", True, "kernels that are chosen by time or add in any order: not with -deterministic"),
]
AGAIN = "randomness or time in the {}, not from torch, NumPy or random: it differs without a kill, too"
RESUMED = "a state of the {} that no checkpoint holds, as a counter or a generator of its own"
SPLIT = "a {} that depends on the number of processes or the rank"
SUMS = "sums over processes that the trainer makes itself, as by torch.distributed.all_reduce"


@dataclasses.dataclass
class Row:
    """One row of the table: what is done, and the run with which it must agree."""

    title: str
    run: str  # the name of the run
    sizes: list[int]  # processes of each start: all but the last are killed
    truth: str = "uninterrupted"
    flags: dict = dataclasses.field(default_factory=dict)  # that differ from the chosen ones


class Broken(RuntimeError):
    """A run that was not killed has failed."""


def check(args: "Args") -> int:
    """Run all rows and print the table. Returns the exit code: 0 if all runs agree, 1 if not.

    Raises UsageError if the runs cannot be started from here, or the flags cannot be run.
    """
    if launch.is_launched() or args.slurm:
        raise UsageError("-check_resume starts its processes itself: run it without torchrun, srun and -slurm")
    if args.eval or args.debug:
        raise UsageError(
            f"-{'eval' if args.eval else 'debug'} gives nothing to resume: leave it out of -check_resume"
        )
    if args.limit_steps == 1:
        raise UsageError("-limit_steps 1: -check_resume needs 2 steps or more, to kill the run in between")
    torch.set_num_threads(1)  # with more, a forked process would wait for them forever
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".check_", dir=args.out)
    except OSError as error:
        raise UsageError(f"-out {args.out}: cannot be written ({error.strerror})") from None
    # SIGTERM ends the runs and removes their folder.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with temporary as folder:
            return Check(args, Path(folder)).rows()
    except Broken as error:
        print(f"train.py: -check_resume: {error}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


class Check:
    """The runs of one check, in its folder."""

    def __init__(self, args: "Args", folder: Path):
        self.steps, self.folder, self.draw = args.limit_steps or STEPS, folder, random.Random()
        self.size = local.count_processes(args)
        self.cpu = bool(args.cpu) or not (torch.cuda.device_count() or torch.accelerator.is_available())
        self.every = max(1, self.steps // 7)  # steps between saves
        self.args = change_flags(
            args,
            out=str(folder),
            limit_steps=self.steps,
            save_every=f"{self.every}steps",
            reset=False,
            tb=False,
            track="none",
            mirror=None,
            check_resume=False,
            max_hours=None,
            allow_change=[*args.allow_change, "data"],  # samples that differ are what it looks for
            deterministic=args.deterministic if self.cpu else True,  # without, two equal runs on a GPU would differ
            # Else DDP's first step after each start would sum three shares or more in other buckets.
            find_unused=args.find_unused or (args.deterministic is False and self.size > 2),
        )
        self.seconds, self.batch = 0.0, None  # seconds of the first run; samples of a step

    def rows(self) -> int:
        """Run and print all rows, and the cause of the first that differs."""
        print(f"-check_resume: up to {self.steps} steps of {self.args.model}, in {self.folder} (removed at the end)")
        print("the first run, without a kill, shows how long the others take", flush=True)
        started = time.monotonic()
        self.complete(Row("", "uninterrupted", [self.size]))
        self.seconds = time.monotonic() - started
        outcome = run_folder.read_json(self.folder / "uninterrupted" / "outcome.json")
        self.steps = outcome["step"]  # fewer, where the run ends before
        if self.steps < 2:
            raise Broken("the run ends after its first step, and there is nothing to resume")
        facts = ledger.read(self.ledger("uninterrupted"))[0].facts
        self.batch, self.every = facts["batch"], max(1, self.steps // 7)
        more = {"save_every": f"{self.every}steps", "threads": facts["threads"]}
        self.args = change_flags(self.args, **more)  # other numbers of processes would have others
        rows = self.planned(facts)
        print(f"{len(rows)} more runs: {self.duration(rows)}")
        header = LINE.format("what was done", "processes", "largest difference", "first step, from 0, that differs")
        print(header, flush=True)
        failed = [(row, first) for row in rows if (first := self.row(row))]
        print(f"not as promised: it looks like {self.cause(*failed[0])}" if failed else "all as promised")
        return FAILED if failed else FINISHED

    def duration(self, rows: list[Row]) -> str:
        """Return the estimated time of the rows, by that of the first run: fewer processes take longer."""
        seconds = sum(self.seconds * max(1, self.size / size) for row in rows for size in row.sizes)
        return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"

    def planned(self, facts: dict) -> list[Row]:
        """Return the rows: killed; then on as many other numbers of processes as micro-batches and devices allow."""
        kills = min(KILLS, self.steps - 1)
        killed = Row(f"killed {kills} times and resumed", "killed", [self.size] * (kills + 1))
        if facts["engine"] == "stock":
            print("other numbers of processes are not compared: without -deterministic they agree to rounding only")
            return [killed]
        batch, micro = facts["batch"], facts["micro"]
        cut = micro if micro < batch else math.ceil(batch / 4)
        most = min(math.ceil(batch / cut), max(SIZES) if self.cpu else self.size)
        half_shards = self.args.parallel == "fsdp" and (self.args.bf16 or self.args.fp16)  # one process has none
        others = [size for size in SIZES if size <= most and size != self.size and (size > 1 or not half_shards)]
        if not others:
            return [killed]
        truth = {"truth": "uninterrupted" if cut == micro else "cut", "flags": {"micro_batch": cut}}
        whole = Row(f"with -micro_batch {cut}", "cut", [self.size], **truth)
        alone = [Row("on another number of processes", f"on_{size}", [size], **truth) for size in others]
        turns = [*others, self.size, *others][: kills + 1]
        moved = Row("killed and resumed on others", "moved", turns, **truth)
        return [killed, *([whole] if cut != micro else []), *alone, moved]

    def row(self, row: Row) -> ledger.Difference | None:
        """Run and print one row. Returns where it first differs from its truth, or None."""
        self.complete(row)
        distance = ledger.distance(*(self.folder / name / "checkpoints" for name in (row.truth, row.run)))
        first = ledger.first_difference(*(ledger.read(self.ledger(name)) for name in (row.truth, row.run)))
        if distance.names and not first:
            first = ledger.Difference(self.steps - 1, None, f"another {distance.names[0]} in its checkpoint")
        far = f"{distance.share:.1e} of the largest weight" if distance.names else "the same bits"
        sizes = ", ".join(str(size) for size in dict.fromkeys(row.sizes))
        far = "" if row.run == row.truth else far
        print(LINE.format(row.title, sizes, far, f"! {first}" if first else "").rstrip(), flush=True)
        return first

    def cause(self, row: Row, first: ledger.Difference) -> str:
        """Return the likely cause of a difference, by runs that differ from the row in one thing."""
        starts = [start for name in (row.truth, row.run) for start in ledger.read(self.ledger(name))]
        if len(threads := {start.facts["threads"] for start in starts}) > 1:
            return f"another number of threads: {' and '.join(map(str, sorted(threads)))}"
        text = RESUMED if len(row.sizes) > 1 else SPLIT if first.step == 0 else SUMS
        again = dataclasses.replace(row, title="without a kill, again", run="again", sizes=[self.size])
        if other := self.row(again):
            text, row, first = AGAIN, again, other
        data = first.why in (ledger.SAMPLES, ledger.DRAWN)
        for flag, value, cause in DATA if data else RESULTS:
            if getattr(self.args, flag) != value and self.helps(row, flag, value):
                return cause
        return text.format("dataset" if data else "model, loss or trainer")

    def helps(self, row: Row, flag: str, value: object) -> bool:
        """Whether a row agrees with its truth if both have this value of a flag."""
        flags = {**row.flags, flag: value}
        truth = Row(f"{flag} = {value}", f"truth_{flag}", [self.size], f"truth_{flag}", flags)
        other = dataclasses.replace(row, title=f"  {row.title}", run=f"row_{flag}", truth=truth.run, flags=flags)
        try:
            return not self.row(truth) and not self.row(other)
        except (Broken, UsageError):  # the model cannot run with this value
            return False

    def complete(self, row: Row) -> None:
        """Run to the end, with the kills of the row. Raises Broken or UsageError if the run fails by itself."""
        first = min(2 * self.every + 1, self.steps - len(row.sizes) + 1)  # there is a checkpoint by then
        moments = sorted(self.draw.sample(range(first, self.steps), len(row.sizes) - 1))
        for size, moment in zip(row.sizes, [*moments, None], strict=True):
            args, book = self.args_for(size, row), self.ledger(row.run)
            ledger.pause(book, moment)  # otherwise a fast run would end before it is killed
            with Start(args, "scripts.check_resume:run_with_ledger", self.folder / f"{row.run}.log") as start:
                if moment is not None and start.reaches(moment, book):
                    time.sleep(self.draw.uniform(0, self.seconds / self.steps))
                    start.kill()
                    start.wait()
                    continue
                code = start.wait()
                if code not in (FINISHED, STOPPED):
                    raise (UsageError if code == USAGE else Broken)(start.last_lines())

    def args_for(self, size: int, row: Row) -> "Args":
        """The args of a row's run on this number of processes."""
        args = change_flags(self.args, model=row.run, **row.flags)
        if size == self.size:
            return args
        args = change_flags(args, batch_size=self.batch, batch_per_gpu=None)
        names = args.gpus.split(",") if args.gpus else [str(number) for number in range(self.size)]
        return change_flags(args, cpu=size) if self.cpu else change_flags(args, gpus=",".join(names[:size]))

    def ledger(self, run: str) -> Path:
        return self.folder / "ledgers" / run


def run_with_ledger(args: "Args") -> int:
    """Run one process of a run that keeps a ledger in -out/ledgers/NAME."""
    module = importlib.import_module(f"lib.trainer.{args.trainer}")
    module.Trainer = ledger.recording_trainer(module.Trainer, Path(args.out) / "ledgers" / args.model)
    return local.call_target("train:train", args)


def change_flags(args: "Args", **others: object) -> "Args":
    """Return a copy of args with other values of these flags."""
    copy = type(args)()
    vars(copy).update({**vars(args), **others})
    return copy


class Start:
    """A start of a run in a session of its own, as if at another terminal. All its processes end with the block."""

    def __init__(self, args: "Args", target: str, log: Path):
        context = multiprocessing.get_context("fork" if local.fork_is_safe() else "spawn")
        self.process, self.log = context.Process(target=_run_in_session, args=(args, target, str(log))), log
        log.touch()
        self.process.start()
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.wait()

    def reaches(self, step: int, book: Path) -> bool:
        """Wait until this many steps are done, by its ledger. Returns False if it ended before."""
        while self.process.is_alive():
            if (ledger.progress(book, self.pid) or 0) >= step:
                return True
            time.sleep(0.005)
        return False

    def others(self) -> list[int]:
        """The living processes of its session other than the first: launch's children and theirs. Linux only."""
        pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
        return [pid for pid in pids if pid != self.pid and self.lives(pid)]

    def lives(self, pid: int) -> bool:
        """Whether this is a living process of its session."""
        try:
            state, _, _, session, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        threads = int(more[13])  # a zombie with more than one thread is still writing, and has its locks
        return int(session) == self.pid and (state not in "ZX" or threads > 1)

    def kill(self, number: int = signal.SIGKILL, pid: int | None = None) -> None:
        """Send a signal to one of its processes, or to all at once."""
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
            elif self.process.is_alive() and os.getpgid(self.pid) != self.pid:  # it has no session of its own yet
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)

    def wait(self, within: float | None = None) -> int:
        """Wait until none of its processes is left. Returns its exit code, negative after a signal.

        Raises Broken if its first process still runs after `within` seconds, or others so long after that one's end.
        """
        self.process.join(within)
        until = time.monotonic() + (within or math.inf)
        if self.process.exitcode is None:
            raise Broken(f"process {self.pid} still runs after {within:.0f} s:\n{self.last_lines()}")
        while left := self.others():
            while any(self.lives(pid) for pid in left):
                if time.monotonic() > until:
                    raise Broken(f"processes {left} still run {within:.0f} s after their first:\n{self.last_lines()}")
                time.sleep(0.002)
        return self.process.exitcode

    def last_lines(self) -> str:
        """Return the end of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-20:]
        lines = lines[-1:] if self.process.exitcode == USAGE else lines
        return "\n".join(lines).removeprefix("train.py: ")


def _import_again(args: "Args") -> None:
    """Execute the file of -dataset again, if it can be: what it draws without a seed is another in each command."""
    module = sys.modules.get(f"lib.dataset.{args.dataset}")
    if getattr(module, "__file__", None):
        seeding.seed(seeding.IMPORT, [*plugins.BUILDERS].index("dataset"))
        with contextlib.suppress(Exception):  # it may register something, which is there by now
            importlib.reload(module)


def _run_in_session(args: "Args", target: str, log: str) -> None:
    """The target of a Start's process."""
    os.setsid()
    os.environ.pop("TORCHELASTIC_MAX_RESTARTS", None)  # this start has no torchrun agent, even if -check_resume has
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        _import_again(args)
        code = local.start(args, target)
    except UsageError as error:
        code = local.report_usage_error(error)
    sys.exit(code)
