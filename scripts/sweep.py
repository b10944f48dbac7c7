"""Many runs over values of train.py's flags: python scripts/sweep.py -lr_start 1e-3,3e-3 -arch mlp,convnet [-jobs 2].

Values with commas make a grid (of -optimizer_arg where KEY= follows; -class_weights takes them itself). With -trials
50, Optuna chooses from such values and from ranges, log:1e-4:1e-2 or lin:0:0.5; a range with whole ends gives whole
numbers. Only flags that change the result can vary, without -data, -weights, -best, -stop_after and -batch_per_gpu;
all others are passed to train.py. A flag of one -arch, -dataset or -trainer goes to the trials that have it. Each
trial is a run, named after its flags: out/sweep_lr_start_1e-3_arch_mlp. -model gives another name than sweep.

A line for each trial says how it ended; then come a table, best first, with mean and deviation over the seeds, and
two pictures: the score against each flag, out/sweep.png, and the curves, out/sweep_curves.png. After Ctrl-C, kill -9
or a failure, type the same command again: trials that are finished or pruned stay as they are, the others continue
from their checkpoints.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from lib import config
from lib.config import flags, plugins
from lib.config.args import last_value, read_cfg
from lib.config.args import new_parser as new_train_parser
from lib.config.parser import NEGATIVE, Parser
from lib.config.plugins import BUILDERS
from lib.config.types import DIGITS, whole
from lib.launch import environment
from lib.utils import files, signals
from lib.utils.checkpoint import atomic, resume, run_folder
from lib.utils.errors import EXIT_CODES, STOPPED, USAGE, UsageError, load_optional, printable, run_program
from scripts import reading, status
from scripts import sweep_results as results

POLL_S, PRUNE_S, QUEUE_S = 0.2, 1.0, 5.0  # seconds between checks of the processes, the metrics, Slurm's queue
ENOUGH = 3  # finished trials that are needed before one is pruned
QUEUE = ["squeue", "--me", "-h", "-o", "%j|%Z"]  # shows a user's jobs
ONE_RUN = "reset eval debug check_data check_resume slurm_dry allow_change".split()  # flags that make no sense here
CANNOT_VARY = ("data", "weights", "best", "stop_after", "batch_per_gpu")  # change the result, and cannot vary


def main(argv: list[str] | None = None) -> int:
    try:
        plan, options = parse(sys.argv[1:] if argv is None else argv)
        return show(plan, options) if options.show else sweep(plan, options)
    except (UsageError, OSError) as error:
        print(printable(f"sweep.py: {' '.join(str(error).split())}"), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:  # before the first trial
        return STOPPED


def sweep(plan: "Plan", options: argparse.Namespace) -> int:
    """Run all trials and print the results. Returns the exit code."""
    if plan.args.slurm and not shutil.which(QUEUE[0]):
        raise UsageError("-slurm: there is no Slurm on this machine: start on a login node, or without -slurm")
    if plan.args.slurm:
        queue()
    out, varied = Path(plan.args.out), " ".join(f"-{name}" for name in plan.spaces)
    out.mkdir(parents=True, exist_ok=True)
    study = Study(out / f"{plan.name}.db", plan) if options.trials else None
    print(f"{plan.name}: {plan.count} trials over {varied}, {len(plan.slots)} at once", flush=True)
    runner = Runner(plan, options.prune, study)
    runner.run(study.trials() if study else iter(plan.examples))

    print(f"\n{results.table(runner.ended, [*plan.spaces])}")
    if runner.stopping:
        print(f"stopped: the same command continues{'; the jobs go on by themselves' if plan.args.slurm else ''}")
        return STOPPED
    if not options.only:
        results.draw(runner.ended, plan)
    states = {trial.state for trial in runner.ended}
    return EXIT_CODES[next((state for state in ("failed", "stopped") if state in states), "finished")]


def show(plan: "Plan", options: argparse.Namespace) -> int:
    """Print the table and draw the pictures of what is there; start nothing. Returns the exit code."""
    file = Path(plan.args.out) / f"{plan.name}.db"
    if options.trials and not file.exists():
        raise UsageError(f"-show: there is no {file}")
    trials = Study(file, plan).known_trials() if options.trials else plan.examples
    for trial in trials:
        trial.state = trial.settled() or (status.row(trial.folder)["state"] if trial.outcome else "not started")
    print(results.table(trials, [*plan.spaces]))
    results.draw(trials, plan)
    return 0


def parse(argv: list[str]) -> tuple["Plan", argparse.Namespace]:
    """Return the plan and the sweep's own flags. Raises UsageError."""
    pairs, parser = group_by_flag(argv), new_parser()
    own = {option.lstrip("-") for option in parser._option_string_actions}
    options = parser.parse_args([part for name, values in pairs if name in own for part in (f"-{name}", *values)])
    return Plan([pair for pair in pairs if pair[0] not in own], options), options


def new_parser() -> Parser:
    """Return the parser of the sweep's own flags."""
    usage, end = "%(prog)s -flag value,value ... [-flag value ...]", "all other flags: python train.py -h"
    parser = Parser(prog="sweep.py", usage=usage, description=__doc__, epilog=end)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-h", "-help", action="help", help="show this help")
    parser.add_argument("-trials", type=whole(1), metavar="N", help="N trials that Optuna chooses (the whole grid)")
    parser.add_argument("-jobs", type=whole(1), metavar="N", help="trials at once (1; under -slurm the whole grid)")
    parser.add_argument("-gpus_per_trial", type=whole(1), metavar="N", help="share -gpus out, N to a trial (all)")
    rule = "from epoch N on (1), stop trials that are below the median of the finished ones at the same epoch"
    parser.add_argument("-prune", type=whole(1), nargs="?", const=1, metavar="N", help=rule)
    parser.add_argument("-only", type=whole(1), metavar="N", help="run the N-th trial alone: a task of a Slurm array")
    parser.add_argument("-show", action="store_true", help="table and pictures of what is there; start nothing")
    return parser


def group_by_flag(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with its values, in their order."""
    pairs = []
    for argument in arguments:
        if argument.startswith("-") and not NEGATIVE.match(argument):
            name, equals, value = argument.partition("=")
            pairs.append((name.lstrip("-"), [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(argument)
        else:
            raise UsageError(f"{argument!r} belongs to no flag")
    return pairs


@dataclass
class Space:
    """The values that a flag may have, as they are typed; with a scale, "log" or "lin", the two ends of a range."""

    values: list[str]
    scale: str = ""

    def suggest(self, trial, name: str) -> str:
        """Return Optuna's value for its trial; numbers have 4 digits."""
        if not self.scale:
            return trial.suggest_categorical(name, self.values)
        if all(re.fullmatch(DIGITS, value) for value in self.values):
            return str(trial.suggest_int(name, *map(int, self.values), log=self.scale == "log"))
        return f"{trial.suggest_float(name, *map(float, self.values), log=self.scale == 'log'):.4g}"


def space_of(name: str, text: str) -> Space | None:
    """Return the values over which a flag varies, None if its text is one value."""
    if found := re.fullmatch(r"(log|lin):([^:,]+):([^:,]+)", text):
        with contextlib.suppress(ValueError):
            if (0 if found[1] == "log" else -math.inf) < float(found[2]) < float(found[3]) < math.inf:
                return Space([found[2], found[3]], scale=found[1])
        raise UsageError(f"-{name} {text}: two rising numbers are wanted, as log:1e-4:1e-2 (above 0) or lin:0:0.5")
    if name == "class_weights":  # its commas are its own
        return None
    values = list(dict.fromkeys(re.split(r",(?=\w+=)" if name == "optimizer_arg" else ",", text)))
    if "" in values:
        raise UsageError(f"-{name} {text}: a value is missing next to a comma")
    return Space(values) if len(values) > 1 else None


@dataclass(eq=False)
class Trial:
    """A run of train.py with values of its own."""

    args: config.Args
    arguments: list[str]  # the arguments of train.py
    values: dict[str, str]  # of the flags that vary, as they are typed
    number: int | None = None  # in Optuna's study
    slot: list[str] | None = None  # the flags for its GPUs; None: it waits for a slot
    process: BaseProcess | None = None  # under Slurm the process that submits the job
    code: int | None = None  # its exit code
    started: float = 0.0
    state: str = ""  # finished, pruned, stopped or failed; "" before its end

    @property
    def folder(self) -> Path:
        return run_folder.path_of(self.args)

    @property
    def outcome(self) -> dict:
        return run_folder.read_json(self.folder / "outcome.json")

    @property
    def best(self) -> dict:
        best = self.outcome.get("best")
        return best if isinstance(best, dict) else {}

    def settled(self) -> str:
        """Return "finished" or "pruned" if nothing is left to do. The file STOP prunes a trial."""
        state, reason = self.outcome.get("state"), str(self.outcome.get("reason"))
        return "pruned" if state == "stopped" and "file STOP" in reason else "finished" if state == "finished" else ""

    def why(self) -> str:
        """Return why it failed: the reason in outcome.json, or the last line that it printed."""
        if self.outcome.get("state") == "failed":
            return str(self.outcome.get("reason")).partition("\n")[0]
        printed = reading.tail(self.folder / "output.log").strip()
        return printed.rpartition("\n")[2] or f"exit code {self.code}"


class Plan:
    """The flags that vary, those that do not, and the slots of the trials that run at once."""

    def __init__(self, pairs: list[tuple[str, list[str]]], options):
        self.spaces, self.fixed, self.name = {}, [], "sweep"
        self._sort(pairs)
        if not self.spaces:
            example = "a range, as -lr_start log:1e-4:1e-2"
            if not options.trials:
                example = "several values, as -lr_start 1e-3,3e-3"
            wrong = f"nothing varies: give a flag that changes the result {example}"
            raise UsageError(f"{wrong}; {', '.join(f'-{name}' for name in CANNOT_VARY)} cannot vary")
        ranges = [name for name, space in self.spaces.items() if space.scale]
        if ranges and not options.trials:
            raise UsageError(f"-{ranges[0]} is a range: add -trials N, how many trials Optuna chooses")
        self.plugins = self._plugins()
        self.flags = set().union(*map(flags_of, itertools.product(*self.plugins.values())))
        self.examples = [self.trial(values) for values in self._examples(bool(options.trials))]
        self.args = args = self.examples[0].args
        for name in [name for name, _ in self.fixed if name in self.spaces]:
            if not any(isinstance(getattr(one.args, name, ""), list) for one in self.examples):  # no repeatable one
                raise UsageError(f"-{name} is there twice: give all its values in one list")
        if number := options.only:
            if options.trials or options.show or args.slurm or number > len(self.examples):
                wrong = f"-only {number}: this grid has {len(self.examples)} trials"
                raise UsageError(f"{wrong}; -trials, -show and -slurm are for all of them")
            self.examples = [self.examples[number - 1]]
        self.count = options.trials or len(self.examples)
        jobs = options.jobs or (self.count if args.slurm and not options.trials else 1)
        self.slots = [[] for _ in range(min(jobs, self.count))]
        if size := options.gpus_per_trial:
            gpus = args.gpus.split(",") if args.gpus else []
            if options.jobs or len(gpus) < size:
                raise UsageError(f"-gpus_per_trial {size} needs -gpus LIST of as many, and no -jobs")
            starts = range(0, len(gpus) - size + 1, size)
            self.slots = [["-gpus", ",".join(gpus[start : start + size])] for start in starts]

    def _sort(self, pairs: list[tuple[str, list[str]]]):
        """Find the flags that vary, and the name."""
        for name, values in pairs:
            value = values[0] if len(values) == 1 else ""
            is_path = re.search(r"[={]", value) or Path(value).exists()  # A=0.3,B=0.7 and {train,val}-{00..99}.tar
            if name in CANNOT_VARY and "," in value and not is_path:
                raise UsageError(f"-{name} {value}: -{name} cannot vary: give one value")
            space = space_of(name, value) if value and name not in flags.rules().free else None
            if space and name in self.spaces:
                raise UsageError(f"-{name} is there twice with several values: give them in one list")
            if space:
                self.spaces[name] = space
            else:
                self.fixed.append((name, values))
            self.name = value if name == "model" and value else self.name

    def _examples(self, chosen: bool) -> list[dict[str, str]]:
        """Return the values of all trials. If Optuna chooses: enough for each choice and each end of a range."""
        lists = {name: space.values for name, space in self.spaces.items()}
        if not chosen:
            grid = [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
        else:
            first = {name: values[0] for name, values in lists.items()}
            starts = [
                {**first, **dict(zip(self.plugins, values))} for values in itertools.product(*self.plugins.values())
            ]
            grid = [{**one, name: value} for one in starts for name, values in lists.items() for value in values]
        return [dict(pairs) for pairs in dict.fromkeys(tuple(self.known(values).items()) for values in grid)]

    def _plugins(self) -> dict[str, list[str]]:
        """Return the names that -dataset, -arch and -trainer may have."""
        argv = [part for name, values in self.fixed for part in (f"-{name}", *values)]
        file, default = last_value("cfg", argv), new_train_parser().get_default
        entries = read_cfg(file) if file else {}
        one = {kind: last_value(kind, argv) or ",".join(entries.get(kind, [])) or default(kind) for kind in BUILDERS}
        return {kind: self.spaces[kind].values if kind in self.spaces else [name] for kind, name in one.items()}

    def has(self, name: str, values: dict[str, str]) -> bool:
        """Whether a trial of these values has this flag. A flag that no trial has is left to train.py to refuse."""
        chosen = tuple(values.get(kind, names[0]) for kind, names in self.plugins.items())
        return name in flags_of(chosen) or name not in self.flags

    def known(self, values: dict[str, str]) -> dict[str, str]:
        """Return the values of the flags that a trial of these values has, in the order in which they were typed."""
        return {name: values[name] for name in self.spaces if name in values and self.has(name, values)}

    def trial(self, values: dict[str, str], number: int | None = None) -> Trial:
        """Return the trial of these values. Raises UsageError if train.py would refuse them."""
        values = self.known(values)
        model = "_".join([self.name, *(f"{name}_{value}" for name, value in values.items())])
        if re.search(r"[^A-Za-z0-9._-]", model) or len(model) > 100:
            digest = hashlib.sha256(model.encode()).hexdigest()[:10]
            model = f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)[:89]}_{digest}"
        fixed = [part for name, typed in self.fixed if self.has(name, values) for part in (f"-{name}", *typed)]
        arguments = [*fixed, *(f"-{name}={value}" for name, value in values.items()), "-model", model]
        args = config.parse_args(arguments)
        if wrong := next((flag for flag in ONE_RUN if getattr(args, flag)), ""):
            raise UsageError(f"-{wrong} is for a single run of train.py; another -model NAME starts a new sweep")
        check_earlier(run_folder.path_of(args), args)
        return Trial(args, arguments, values, number)


@functools.cache
def flags_of(plugins_chosen: tuple[str, ...]) -> set[str]:
    """Return the names of all flags of train.py with this dataset, arch and trainer."""
    parser = new_train_parser()
    for kind, name in zip(BUILDERS, plugins_chosen):
        parser.add_plugin_flags(plugins.load_flags(kind, name), kind)
    return {option.lstrip("-") for option in parser._option_string_actions}


def check_earlier(run: Path, args: config.Args):
    """Raise UsageError if a trial's folder holds a run with other flags."""
    if not (run / "config.yaml").exists():
        return
    saved = vars(config.parse_args(["-cfg", str(run / "config.yaml")], describe=False))
    may_differ = flags.rules().free - {"data", "weights"}  # nothing else says it of a finished run
    may_differ |= {name for name in resume.SETTLED if getattr(args, name) is None}
    may_differ |= {"batch_size"} if args.batch_per_gpu else set()
    may_differ |= {"epochs"} if args.steps else set()  # which are not in the file then
    for flag, value in vars(args).items():
        if flag not in may_differ and saved.get(flag) != value:
            was, now = (
                f"without -{flag}" if one is None else f"with -{flag} {one}" for one in (saved.get(flag), value)
            )
            raise UsageError(f"{run} was trained {was} and not {now}: another -model NAME starts a new sweep")


class Study:
    """Optuna's study in an SQLite file: the values that it has chosen so far, and their results."""

    def __init__(self, file: Path, plan: Plan):
        try:
            import optuna
        except ModuleNotFoundError:
            raise UsageError("-trials needs Optuna: uv pip install --group sweep") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.plan = optuna, plan
        if not file.exists():  # renamed when complete: without an index a table allows two studies of this name
            atomic.sweep(file.parent, f"{file.name}.")
            with atomic.new_version(file) as new:
                self.open(new)
        self.study = self.open(file)

    def open(self, file: Path):
        """Return Optuna's study in the file, a new one if there is none."""
        url = f"sqlite:///{file.absolute()}"
        return self.optuna.create_study(storage=url, study_name="sweep", direction="maximize", load_if_exists=True)

    def trials(self) -> Iterator[Trial]:
        """Yield the trials that were chosen before, then new ones up to the plan's count."""
        yield from self.known_trials()
        while len(self.study.trials) < self.plan.count:
            yield self.choose(self.study.ask())

    def known_trials(self) -> list[Trial]:
        """Return the trials that were chosen before."""
        for one in self.study.trials:
            needed = {name for name in self.plan.spaces if self.plan.has(name, one.params)}
            lost, new = {*one.params} - {*self.plan.spaces}, needed - {*one.params}
            if lost or (new and one.state.is_finished()):  # an open one may have chosen nothing yet
                over = " ".join(f"-{name}" for name in sorted(one.params))
                raise UsageError(f"the sweep of this name was over {over}: another -model NAME starts a new one")
        return [self.choose(self.optuna.trial.Trial(self.study, one._trial_id)) for one in self.study.trials]

    def choose(self, one) -> Trial:
        """Return Optuna's trial as ours. Its values follow from -seed, its number and the results so far."""
        values = {}
        for name, space in sorted(self.plan.spaces.items(), key=lambda pair: pair[0] not in BUILDERS):
            if not self.plan.has(name, values):  # the plugins are chosen first
                continue
            seed = crc32(f"{self.plan.args.seed} {one.number} {name}".encode())
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
            try:
                values[name] = space.suggest(one, name)
            except ValueError as error:  # the choices have changed
                raise UsageError(f"-{name}: {error}: another -model NAME starts a new sweep") from None
        return self.plan.trial(values, one.number)

    def tell(self, trial: Trial):
        """Record the result of a trial. A stopped or failed one stays open for the next start."""
        states, score = self.optuna.trial.TrialState, trial.best.get("score")
        if trial.state in ("finished", "pruned"):
            state = states.PRUNED if trial.state == "pruned" else states.FAIL if score is None else states.COMPLETE
            self.study.tell(trial.number, score if state is states.COMPLETE else None, state, skip_if_finished=True)


class Runner:
    """Keeps as many trials running as there are slots, until all are over or a signal stops the sweep."""

    def __init__(self, plan: Plan, prune_from: int | None, study: Study | None):
        self.count, self.slots, self.slurm, self.varied = plan.count, plan.slots, plan.args.slurm, [*plan.spaces]
        self.prune_from, self.study = prune_from, study
        self.active: list[Trial] = []
        self.ended: list[Trial] = []
        self.metric, self.curves = {}, []  # of the finished trials: the metric of "best", and the scores by epoch
        self.stopping = False  # a signal was received
        self.is_mixed = False  # scores are of several metrics
        self.queue: set[tuple[str, str]] | None = set()  # names and folders of Slurm's jobs; None: it did not answer
        # On Linux trials are forked from a process that has imported torch once.
        self.context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.context.set_forkserver_preload(["train", "lib.trainer.trainer", "torch._dynamo"])
        environment.export(plan.args)  # torch reads these when it is imported
        self.sweep_ended, self.alive = self.context.Pipe(duplex=False)  # closed by the end of this process

    def run(self, trials: Iterator[Trial]):
        """Run the trials. A signal stops them, with their states saved, but not Slurm's jobs."""
        with signals.use_handler(self.stop):
            self.fill(trials)
            while self.active:
                time.sleep(QUEUE_S if self.slurm else PRUNE_S if self.prune_from else POLL_S)
                for trial in self.active:
                    trial.code = trial.process.exitcode if trial.process else None
                self.look_at_queue()  # after the codes: it has every submitted job
                for trial in [*self.active]:
                    self.advance(trial)
                self.fill(trials)

    def look_at_queue(self):
        """Read Slurm's queue. Where it does not answer, say so once, and wait."""
        try:
            self.queue = queue() if self.slurm else None
        except UsageError as error:  # Slurm may be away for a while
            if self.queue is not None:
                print(f"sweep.py: {error}: waiting for it", file=sys.stderr, flush=True)
            self.queue = None

    def stop(self, number, frame):
        self.stopping = True

    def fill(self, trials: Iterator[Trial]):
        """Give the free slots to the next trials that are not settled."""
        while self.slots and not self.stopping and (trial := next(trials, None)):
            if state := trial.settled():
                self.end(trial, state)
            else:
                trial.slot = self.slots.pop(0)
                self.active.append(trial)

    def advance(self, trial: Trial):
        """Do the next thing for a trial: record its end, stop it, start it, or prune it."""
        if trial.code is not None and not (self.slurm and trial.code == 0 and self.busy(trial)):
            self.end(trial, self.result(trial))
        elif self.stopping:
            if trial.process is None or (self.slurm and trial.code == 0):
                self.active.remove(trial)
            elif not self.slurm:
                trial.process.terminate()
        elif trial.process is None and not self.busy(trial):
            if state := trial.settled():  # by a job, or by a process of a killed sweep that was still saving
                self.end(trial, state)
            else:
                self.start(trial)
        elif self.prune_from and self.is_poor(trial):
            files.open_regular(trial.folder / "STOP", "a").close()

    def busy(self, trial: Trial) -> bool:
        """Whether the trial's run is running, even if an earlier sweep or a trial of the same name started it."""
        if any(one.process and one.folder == trial.folder for one in self.active if one is not trial):
            return True
        if not self.slurm:
            return bool(reading.is_locked(trial.folder))
        jobs = str(load_optional("lib.launch.slurm", "-slurm").job_folder(trial.args))
        mine = [job for job, folder in self.queue or () if job == trial.args.model and folder.startswith(jobs)]
        return self.queue is None or bool(mine)

    def start(self, trial: Trial):
        """Start the process of a trial."""
        trial.folder.mkdir(parents=True, exist_ok=True)
        arguments, log, trial.started = [*trial.arguments, *trial.slot], trial.folder / "output.log", time.monotonic()
        trial.process = self.context.Process(target=run_trial, args=(arguments, log, self.sweep_ended))
        trial.process.start()

    def result(self, trial: Trial) -> str:
        """Return how a trial ended, after its process, and its job if there is one, are gone."""
        job_stopped = self.slurm and trial.outcome.get("state") == "stopped"
        return trial.settled() or ("stopped" if self.stopping or job_stopped or trial.code == STOPPED else "failed")

    def is_poor(self, trial: Trial) -> bool:
        """Whether its best value so far is below the median of the finished trials' at the same epoch."""
        mine = curve(trial.folder, self.metric) if len(self.curves) >= ENOUGH else {}
        epoch = max(mine, default=0)
        reached = [values[epoch] for values in self.curves if epoch in values]
        return epoch >= self.prune_from and len(reached) >= ENOUGH and mine[epoch] < statistics.median(reached)

    def end(self, trial: Trial, state: str):
        """Record how a trial ended, and print a line about it."""
        trial.state = state
        self.ended.append(trial)
        if trial.slot is not None:
            self.active.remove(trial)
            self.slots.insert(0, trial.slot)
        if state == "finished" and trial.best:
            self.metric = trial.best
            self.curves.append(curve(trial.folder, trial.best))
        if self.study:
            self.study.tell(trial)
        about = f"{trial.best['metric']} {status.short(trial.best['value'])}" if trial.best else ""
        about = f"{trial.why()} ({trial.folder / 'output.log'})" if state == "failed" else about
        seconds = f"in {status.span(time.monotonic() - trial.started)}" if trial.started else "before"
        line = f"[{len(self.ended)}/{self.count}] {trial.args.model}: {state} {seconds}  {about}".rstrip()
        print(status.one_line(line), flush=True)
        unscored = [one for one in self.ended if one.state == "finished" and not one.best]
        if (self.study or self.prune_from) and unscored == [trial]:
            print("no validation scores: Optuna draws at random, and -prune stops nothing", flush=True)
        is_first = trial.best and sum(bool(one.best) for one in self.ended) == 1
        scored = {one.best["metric"] for one in self.ended if one.best}
        if len(scored) > 1 and trial.best and not self.is_mixed:
            self.is_mixed = True
            print(f"trials go by {' and by '.join(sorted(scored))}: give -best NAME", flush=True)
        if is_first and (note := results.loss_note([trial], self.varied)):
            print(note, flush=True)


def run_trial(arguments: list[str], log: Path, sweep_ended: connection.Connection):
    """Run train.py with these arguments as the process of a trial. It saves and stops if the sweep ends."""
    os.setsid()  # Ctrl-C at the terminal reaches only the sweep, which passes it on
    with files.open_regular(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["train.py", *arguments]
    threading.Thread(target=end_with_sweep, args=[sweep_ended], daemon=True).start()
    run_program(train.main)


def end_with_sweep(sweep_ended: connection.Connection):
    """Stop this process by SIGTERM when the sweep has ended."""
    connection.wait([sweep_ended])
    os.kill(os.getpid(), signal.SIGTERM)


def queue() -> set[tuple[str, str]]:
    """Return the names and folders of this user's jobs in Slurm's queue. Raises UsageError if it does not answer."""
    answer = subprocess.run(QUEUE, capture_output=True, text=True)
    if answer.returncode:
        raise UsageError(f"-slurm: squeue does not answer: {' '.join(answer.stderr.split())}")
    return {(name, folder) for name, _, folder in (line.partition("|") for line in answer.stdout.splitlines())}


def curve(run: Path, metric: dict) -> dict[int, float]:
    """Return the best score of a run up to each epoch; higher is better. `metric`: `best` of a run's outcome.json."""
    written = reading.lines(run)
    names = re.compile(rf"(val[^/]*/)?{re.escape(metric['metric'])}")  # without a set it is of the first one's
    name = next((one for line in written for one in line if names.fullmatch(one)), "")
    sign = math.copysign(1, metric["score"]) * math.copysign(1, metric["value"])  # 0.0 and -0.0 are equal
    lines = [line for line in written if line.get(name) is not None]
    best = itertools.accumulate((sign * line[name] for line in lines), max)
    return dict(zip((line["epoch"] for line in lines), best))


if __name__ == "__main__":
    sys.exit(main())
