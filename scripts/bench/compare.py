"""Whole runs of train.py, as a user types them, next to scripts that train the same network to the same loss.

    uv pip install --group bench
    python scripts/bench/compare.py [CASE ...] [-peers plain,limit,lightning] [-procs 1 2] [-rounds 3]
    python scripts/bench/compare.py -smoke      # two steps of each: it only shows that all of them run

A round starts every run once, in a random order. Each run is a whole process, from the start of Python to its end,
with all that it does by default. The time of one step is the difference between a long and a short run, divided by
the steps between: it holds its share of evaluations, logs and checkpoints, and no start. CPU time is user and system
time of all processes of the run. Figures are medians and ranges over the rounds; a ratio is the median of each
round's ratio to the plain script. Runs that took another number of steps, or reached another loss, are not compared.

The scripts are in peers/; each can be started alone, and takes flags of train.py's names. Composer needs an older
torch: give the Python of its own environment with -composer.
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path("scripts", "bench", "peers")
BATON, STOCK, PLAIN, LIMIT = "Baton", "stock", "plain", "limit"
SCRIPTS = {
    BATON: Path("train.py"),
    STOCK: Path("train.py"),  # with -deterministic no: DDP sums the gradients
    PLAIN: PEERS / "plain.py",
    LIMIT: PEERS / "limit.py",
    "fabric": PEERS / "with_fabric.py",
    "lightning": PEERS / "with_lightning.py",
    "accelerate": PEERS / "with_accelerate.py",
    "composer": PEERS / "with_composer.py",
}
PACKAGES = {"fabric": "lightning", "lightning": "lightning", "accelerate": "accelerate"}
BY_TORCHRUN = (PLAIN, LIMIT, "accelerate")  # contenders whose two processes torchrun starts
STOPPED = 75  # how train.py ends at -limit_steps


@dataclass(frozen=True)
class Case:
    """What is timed."""

    title: str
    flags: str = ""  # of train.py, and of every script
    short: str | None = None  # more flags, of a run with fewer units
    long: str = ""  # more flags, of the run that is timed as a whole
    unit: str = "step"
    units: int | None = None  # between the short and the long run; None: their steps
    before: str | None = None  # more flags, of a run that comes first and is not timed; the others continue it
    tolerance: float = 0.05  # of the training loss, relative to the plain script's
    limit: bool = True  # whether the limit can do it


NOISE = "-dataset fake -arch mlp -channels 1"
MLP = f"{NOISE} -fake_samples 48000 -image_size 8 -num_classes 10 -mlp_width 64 -mlp_depth 1 -batch_size 32"
RESNET = "-dataset fake -fake_samples 80 -image_size 64 -num_classes 10 -batch_size 8 -lr_start 1e-5"
GPT = "-dataset tokens -tokens_samples 400 -batch_size 8"
LARGE = f"{NOISE} -fake_samples 1920 -image_size 32 -num_classes 1024 -mlp_width 2048 -batch_size 8 -epochs 1"
CASES = {
    "digits": Case("the default run: 30 epochs of 20 steps", short="-epochs 10"),
    "mlp": Case("MLP 64-64-10, batch 32", MLP, "-epochs 1", "-epochs 3"),
    "resnet": Case("ResNet-18 at 64x64, batch 8", RESNET, "-epochs 1", "-epochs 3"),
    "gpt": Case("GPT of 0.8 million parameters, batch 8 x 128", GPT, "-epochs 1", "-epochs 3"),
    "start": Case("start, first step, save, end", long="-limit_steps 1", limit=False),
    "resume": Case("the same, resumed after 16 steps", before="-limit_steps 16", long="-limit_steps 17", limit=False),
    "save": Case(
        "240 steps of an MLP with a state of 101 MB, saved every 10",
        LARGE,
        short="",
        long="-save_every 10steps",
        unit="save",
        units=23,  # both save after the last step; the limit never saves
    ),
}


@dataclass(frozen=True)
class Run:
    """One run: its times, and what it reached."""

    seconds: float
    cpu: float  # seconds, of all its processes
    step: int
    figures: dict[str, float]  # train_loss; val_loss, val_accuracy, samples_per_s, memory_gb where it has them


@dataclass(frozen=True)
class Options:
    """How runs are started."""

    procs: int = 1  # on the CPU; 0: one on the GPU
    threads: int | None = None  # OMP_NUM_THREADS; None: nobody sets it
    pythons: dict[str, str] = field(default_factory=dict)  # of contenders that have an environment of their own


class Unequal(Exception):
    """Runs that did not do the same work."""


def main(argv: list[str] | None = None):
    args = parse(argv)
    if args.smoke:
        smoke({CASES[name].flags for name in args.cases})
        return
    names = installed([BATON, *args.peers], args.composer)
    print(describe_machine(names, argv))
    with adopting_orphans(), keep_a_core_busy(args.busy):
        for name in args.cases:
            for procs in args.procs:
                options = Options(procs, args.threads, {"composer": args.composer} if args.composer else {})
                case = CASES[name]
                contenders = [one for one in names if case.limit or one != LIMIT]
                print(table(case, options, measure(case, contenders, args.rounds, options)), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all, if none is given")
    parser.add_argument("-peers", default="plain,limit", help=f"of {', '.join(list(SCRIPTS)[1:])} (plain,limit)")
    parser.add_argument("-procs", type=int, nargs="+", default=[1, 2], help="numbers of processes (1 2)")
    parser.add_argument("-rounds", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("-threads", type=int, help="OMP_NUM_THREADS of every run (what each chooses)")
    parser.add_argument("-smoke", action="store_true", help="two steps of train.py and of the plain script, untimed")
    parser.add_argument("-busy", action="store_true", help="keep one core busy with other work")
    parser.add_argument("-composer", metavar="PYTHON", help="the Python of an environment with Composer")
    args = parser.parse_args(argv)
    args.cases, args.peers = args.cases or list(CASES), args.peers.split(",")
    unknown = [name for name in args.cases if name not in CASES] + [p for p in args.peers if p not in SCRIPTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return args


def installed(names: list[str], composer: str | None) -> list[str]:
    """Return the contenders that can run here, always with the plain script; print those that cannot."""
    names = list(dict.fromkeys([BATON, PLAIN, *names]))
    absent = [name for name in names if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name])]
    absent += ["composer"] if "composer" in names and not composer else []
    if absent:
        print(f"Not installed, so left out: {', '.join(absent)}.\n")
    return [name for name in names if name not in absent]


def describe_machine(names: list[str], argv: list[str] | None) -> str:
    """Return the machine and the versions, in Markdown."""
    command = shlex.join(["python", "scripts/bench/compare.py", *(sys.argv[1:] if argv is None else argv)])
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    processor = models[0].partition(":")[2].strip() if models else platform.processor()
    packages = ["torch", *dict.fromkeys(PACKAGES[name] for name in names if name in PACKAGES)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return (
        f"`{command}` on {datetime.date.today()}, {os.cpu_count()} cores of {processor}, "
        f"Python {platform.python_version()}, {versions}, commit {git.stdout.strip()}.\n"
    )


@contextlib.contextmanager
def adopting_orphans():
    """Be the parent of processes whose own parent ends: Lightning does not wait for its second process."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)  # Linux
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        prctl(36, 0, 0, 0, 0)


@contextlib.contextmanager
def keep_a_core_busy(wanted: bool):
    """Run a loop next to everything that is measured."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if spinning:
            spinning.kill()
            spinning.wait()


def smoke(cases: set[str]):
    """Run two steps of each case."""
    for flags in sorted(cases):
        with tempfile.TemporaryDirectory() as folder:
            command = f"{flags} -limit_steps 2"
            runs = {name: run(name, command, Path(folder, name), Options(threads=1)) for name in (BATON, PLAIN)}
        check_equal(runs, tolerance=0.0)
        print(f"as many steps: {command}", flush=True)


def measure(case: Case, names: list[str], rounds: int, options: Options) -> dict[tuple[str, str], list[Run]]:
    """Return the runs by (contender, "long" or "short"), one for each round. Raises Unequal."""
    kinds = {"long": case.long} | ({} if case.short is None else {"short": case.short})
    runs = {(name, kind): [] for name in names for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        started, out = Path(folder, "begun"), Path(folder, "out")
        for name in names if case.before else ():
            run(name, f"{case.flags} {case.before}", started / name, options)
        for _ in range(rounds):
            for name, kind in random.sample(list(runs), len(runs)):
                if case.before:
                    shutil.copytree(started / name, out)
                runs[name, kind].append(run(name, f"{case.flags} {kinds[kind]}", out, options))
                shutil.rmtree(out)
            for kind in kinds:
                check_equal({name: runs[name, kind][-1] for name in names}, case.tolerance)
    return runs


def run(name: str, flags: str, out: Path, options: Options) -> Run:
    """Run one contender to its end."""
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
    out.mkdir(parents=True, exist_ok=True)
    device = ["-cpu", str(options.procs)] if options.procs else ["-gpus", "0"]
    command = [*launcher(name, options), str(SCRIPTS[name]), *flags.split(), *device, "-out", str(out)]
    command += ["-deterministic", "no"] if name == STOCK else []
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        pipes = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
        try:
            process.returncode, cpu = wait_for_all(process.pid)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.perf_counter() - began
        if process.returncode not in (0, STOPPED):
            output.seek(0)
            last = output.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{last}")
    step, figures = read_train_py(out) if name in (BATON, STOCK) else read_script(out)
    return Run(seconds, cpu, step, figures)


def wait_for_all(leader: int) -> tuple[int, float]:
    """Wait for a process and all of its group that outlive it; return its exit code and the CPU seconds of all."""
    code, cpu = 0, 0.0
    while True:
        try:
            pid, status, usage = os.wait4(-leader, 0)
        except ChildProcessError:
            return code, cpu
        cpu += usage.ru_utime + usage.ru_stime
        if pid == leader:
            code = os.waitstatus_to_exitcode(status)


def launcher(name: str, options: Options) -> list[str]:
    """Return the part of the command before the script's name."""
    python = options.pythons.get(name, sys.executable)
    if options.procs > 1 and name in BY_TORCHRUN:
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.procs)]
    if options.procs > 1 and name == "composer":
        return [python, "-m", "composer.cli.launcher", "-n", str(options.procs)]
    return [python]


def read_script(out: Path) -> tuple[int, dict[str, float]]:
    """Return the last step of one of the scripts, and its figures."""
    result = json.loads((out / "result.json").read_text())
    return result.pop("step"), result


def read_train_py(out: Path) -> tuple[int, dict[str, float]]:
    """Return the last step of the only run in a folder of train.py's, and the figures it logged last."""
    (outcome,) = out.glob("*/outcome.json")
    metrics = outcome.with_name("metrics.jsonl")
    logged = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        logged |= json.loads(line)
    names = {
        "train_loss": "train/loss_mean",
        "val_loss": "val/loss",
        "val_accuracy": "val/accuracy",
        "samples_per_s": "perf/samples_per_s",
        "memory_gb": "perf/memory_gb",
    }
    figures = {name: logged[tag] for name, tag in names.items() if tag in logged}
    return json.loads(outcome.read_text())["step"], figures


def check_equal(runs: dict[str, Run], tolerance: float):
    """Raise Unequal unless all took as many steps and, but for the limit, reached the plain script's loss."""
    plain = runs[PLAIN]
    for name, other in runs.items():
        if other.step != plain.step:
            raise Unequal(f"no comparison: {name} took {other.step} steps and {PLAIN} {plain.step}")
        if name == LIMIT or not {"train_loss"} <= plain.figures.keys() & other.figures.keys():
            continue
        wanted, loss = plain.figures["train_loss"], other.figures["train_loss"]
        if not abs(loss - wanted) <= tolerance * wanted:
            raise Unequal(f"no comparison: {name} reached a training loss of {loss:.4f} and {PLAIN} {wanted:.4f}")


def table(case: Case, options: Options, runs: dict[tuple[str, str], list[Run]]) -> str:
    """Return the medians, with the smallest and largest value where they are given, as Markdown."""
    seconds = {name: [one.seconds for one in found] for (name, kind), found in runs.items() if kind == "long"}
    of_unit = {
        name: per_unit(case, found, runs[name, "short"]) for name, found in longs(runs) if case.short is not None
    }
    head = ["", "whole run, s", "of plain", "CPU time, s"]
    head += [f"one {case.unit}, ms", "of plain"] if of_unit else []
    head += ["training loss", "val accuracy"]
    copies = any("copy_ms" in one.figures for found in runs.values() for one in found)
    head += ["one copy of the state, ms"] if copies else []
    processes = "1 process" if options.procs == 1 else f"{options.procs} processes"
    threads = f", OMP_NUM_THREADS={options.threads}" if options.threads else ""
    command = " ".join(f"python train.py {case.flags} {case.long} -cpu {options.procs}".split())
    lines = [f"{case.title}, {processes}{threads}: `{command}`", "", row(head), row(["---"] * len(head))]
    for name, found in longs(runs):
        cells = [name, spread(seconds[name], 2), ratio(seconds[name], seconds[PLAIN])]
        cells.append(f"{statistics.median(one.cpu for one in found):.2f}")
        if of_unit:
            cells += [spread([1000 * value for value in of_unit[name]], 2), ratio(of_unit[name], of_unit[PLAIN])]
        for figure in ["train_loss", "val_accuracy", *(["copy_ms"] if copies else [])]:
            values = [one.figures[figure] for one in found if figure in one.figures]
            cells.append(f"{statistics.median(values):.3f}" if values else "")
        lines.append(row(cells))
    return "\n".join([*lines, ""])


def longs(runs: dict[tuple[str, str], list[Run]]) -> list[tuple[str, list[Run]]]:
    return [(name, found) for (name, kind), found in runs.items() if kind == "long"]


def per_unit(case: Case, long: list[Run], short: list[Run]) -> list[float]:
    """Return the seconds of one unit (a step, a save), one for each round."""
    return [
        (one.seconds - other.seconds) / (case.units or one.step - other.step)
        for one, other in zip(long, short, strict=True)
    ]


def spread(values: list[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def ratio(values: list[float], plain: list[float]) -> str:
    return f"{statistics.median(one / base for one, base in zip(values, plain, strict=True)):.2f}"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
