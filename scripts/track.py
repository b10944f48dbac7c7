"""Sends a run's figures to Weights & Biases, MLflow or a TrainJob's status: python scripts/track.py wandb out/NAME.

train.py -track starts it next to a run, so that no step waits. It reads metrics.jsonl and sends what the tracker
lacks, also of earlier starts. Steps that are repeated after a resume are not sent again: their figures are the same
bits. Where the steps go back, as after a change of -batch_size, and in a copy of a run, another tracked run begins.
In a pod of Kubeflow's Trainer any tracker also sets the status of the TrainJob.
"""

import argparse
import contextlib
import datetime
import fcntl
import functools
import http.client
import json
import logging
import math
import os
import re
import select
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import flags
from lib.utils import files
from lib.utils.checkpoint import run_folder
from lib.utils.errors import STOP_SIGNALS
from lib.utils.monitoring import console
from scripts import reading
from scripts.reading import parse

log = logging.getLogger(__name__)
INTERVAL_S = 1.0  # seconds between reads of metrics.jsonl
CLOSE_S, STOP_S = 5.0, 0.5  # most that a run waits for this process at its end: a finished run, and any other
MOST = 1000  # metrics in a request to MLflow


class Tracker:
    """Follow the run's metrics.jsonl for a tracker, "wandb", "mlflow" or "kubeflow", until `close`."""

    def __init__(self, name: str, folder: Path):
        self.by_hand = f"scripts/track.py {name} {folder}"
        command = [sys.executable, __file__, name, str(folder), "-parent", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is the run's

    def close(self, finished: bool) -> None:
        """Say how the run ended, and wait a moment until the rest is sent."""
        try:
            self.process.communicate(b"finished" if finished else b"stopped", CLOSE_S if finished else STOP_S)
        except subprocess.TimeoutExpired:  # it then goes on in the background
            text = "-track:      still sending: process %d goes on; if it ends before, %s sends the rest"
            log.info(text, self.process.pid, self.by_hand)
        if (code := self.process.returncode or 0) < 0:
            log.warning("-track: signal %d ended its process: %s sends the rest", -code, self.by_hand)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tracker", choices=BY_NAME)
    parser.add_argument("run", type=Path, help="the run's folder, as out/NAME")
    parser.add_argument("-parent", type=int, help="process of the run that goes on: follow it")
    args = parser.parse_args()
    console.setup_logging(args.run if args.parent else None, rank=0)
    if args.parent:
        os.nice(10)
        for number in STOP_SIGNALS:  # Slurm sends them to all processes of a job
            signal.signal(number, signal.SIG_IGN)
    kinds = {args.tracker: BY_NAME[args.tracker], **({"kubeflow": Kubeflow} if Kubeflow.URL in os.environ else {})}
    try:
        return 0 if follow(args.run, kinds, args.parent) else 1
    except Exception as error:
        say_why(args.tracker, error, args.parent)
        return 1


def say_why(tracker: str, error: Exception, parent: int | None) -> None:
    """Log why nothing more is sent."""
    text = re.sub(r"//[^/\s]*@", "//", f"{error}")[:300]  # an address may contain a password
    more = "; training continues" if parent else ""
    log.warning("-track: nothing more is sent to %s (%s)%s", tracker, text, more)


def follow(folder: Path, kinds: dict[str, type], parent: int | None) -> bool:
    """Send new lines until stdin says how the run ended; without a process of the run, send the existing lines.

    A tracker that fails is left out from then on. Returns whether none has failed.
    """
    text, end = "", "" if parent else run_folder.read_json(folder / "outcome.json").get("state", "stopped")
    runs: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            say_why(name, error, parent)
            runs.pop(name, None)

    with files.open_regular(folder / "metrics.jsonl", "r+") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # an earlier start may still be sending
        for name, kind in kinds.items():
            if made := attempt(name, functools.partial(kind, folder)):
                runs[name] = made
        while runs:
            if not end and select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                end = os.read(0, 99).decode()
            if not end and os.getppid() != parent:
                os._exit(1)  # the run was killed: its next start sends the rest
            *lines, text = (text + file.read()).split("\n")  # the last line may be incomplete
            new = [line for line in map(parse, lines) if line]
            for name, run in [*runs.items()]:
                if last := attempt(name, functools.partial(hand_over, new, run)):
                    runs[name] = last
            if end:
                break
        for name, run in [*runs.items()]:
            attempt(name, functools.partial(run.close, end == "finished"))
    return {*runs} == {*kinds}


def hand_over(lines: list[dict[str, Any]], run: Any) -> Any:
    """Send the figures of lines that a tracked run lacks. Returns the run that gets those of the next lines.

    That is a new one where the steps go back.
    """
    new = []
    for line in lines:
        step, samples = line["step"], line.get("samples", 0)
        if samples <= run.after:
            continue
        if step < run.step:
            run.send(new)
            run.close(finished=False)
            log.info("-track:      the steps go back, as after a change of -batch_size: another tracked run begins")
            run, new = type(run)(run.folder, after=run.samples), []
        run.step, run.samples = step, samples
        if figures := run.new_figures(line):
            new.append((step, figures))
    run.send(new)
    return run


class Tracked:
    """A run at a tracker, and which lines it gets.

    A file in the run's folder keeps its id, the run's name, and `after`: only lines of more samples are its own.
    """

    def __init__(self, folder: Path, file: str, after: int | None):
        self.folder, self.name, self.file = folder, folder.resolve().name, folder / file
        self.known = json.loads(files.read_bytes(self.file)) if after is None and self.file.exists() else {}
        if (name := self.known.get("run", self.name)) != self.name:
            text = "-track:      %s is of run %s, and this is a copy: another tracked run begins"
            log.info(text, self.file, name)
            self.known = {}
        self.after: int = self.known.get("after", -1) if after is None else after
        self.step = self.samples = 0  # of the last line
        self.sent: dict[str, int] = {}  # the last step of each tag

    def allowed(self, tag: str) -> str:
        """Return the name that a tag has at this tracker."""
        return tag

    def new_figures(self, line: dict[str, Any]) -> dict[str, float]:
        """Return the figures of a line that were not sent, under the tracker's names."""
        named = {self.allowed(tag): value for tag, value in line.items() if "/" in tag}
        new = {name: value for name, value in named.items() if line["step"] > self.sent.get(name, -1)}
        return {name: math.nan if value is None else value for name, value in new.items()}

    def remember(self, **facts: Any) -> None:
        """Write the file."""
        partial = self.file.with_suffix(".new")  # the run removes files that end in .partial
        partial.unlink(missing_ok=True)
        with partial.open("x") as new:
            new.write(json.dumps({**facts, "run": self.name, "after": self.after}))
        partial.replace(self.file)


def flags_of(folder: Path) -> dict[str, Any]:
    """Return the flags by which runs are compared, and their values."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return {name: value for name, value in config.items() if name not in {*flags.rules().free, "about"}}


class Wandb(Tracked):
    """A run of Weights & Biases. wandb.json has the last step sent of each tag, which W&B offline does not know."""

    def __init__(self, folder: Path, after: int | None = None):
        import wandb

        super().__init__(folder, "wandb.json", after)
        new: dict[str, Any] = {"id": uuid.uuid4().hex, "rows": 0, "sent": {}}
        self.id, self.rows, self.sent = ({**new, **self.known}[name] for name in new)
        project = wandb.setup(wandb.Settings(silent=True)).settings.project or "baton"  # silent: no prompt for a key
        settings = wandb.Settings(console="off")
        names = {"project": project, "name": self.name, "id": self.id, "resume": "allow"}
        self.run = wandb.init(**names, config=flags_of(folder), dir=folder, settings=settings)
        self.run.define_metric("*", step_metric="step")  # W&B's own step must only grow: here it counts rows
        log.info("-track:      %s", self.run.url or self.run.dir)

    def send(self, lines: list[tuple[int, dict[str, float]]]) -> None:
        """Hand figures, by step, to W&B's own process, and remember each step."""
        for step, figures in lines:
            self.run.log({**figures, "step": step}, step=self.rows, commit=True)
            self.rows += 1
            self.sent |= dict.fromkeys(figures, step)
            self.remember(id=self.id, rows=self.rows, sent=self.sent)

    def close(self, finished: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=0 if finished else 1)


class Mlflow(Tracked):
    """A run of MLflow, whose server knows which points were sent."""

    def __init__(self, folder: Path, after: int | None = None):
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it reports each retry
        super().__init__(folder, "mlflow.json", after)
        self.mlflow, self.client = mlflow, mlflow.MlflowClient()
        if self.known:
            self.id = self.known["id"]
            self.client.update_run(self.id, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(MLFLOW_EXPERIMENT_NAME.get() or "baton")
            self.id = self.client.create_run(experiment.experiment_id, run_name=self.name).info.run_id
            self.remember(id=self.id)
            params = [mlflow.entities.Param(flag, str(value)) for flag, value in flags_of(folder).items()]
            self.client.log_batch(self.id, params=params)
        self.sent = {metric.key: metric.step for metric in self.client.get_run(self.id).data.to_proto().metrics}
        log.info("-track:      run %s of MLflow", self.id)

    def send(self, lines: list[tuple[int, dict[str, float]]]) -> None:
        """Send figures, by step, and wait until the server has them."""
        now, metric = int(time.time() * 1000), self.mlflow.entities.Metric
        metrics = [metric(tag, value, now, step) for step, figures in lines for tag, value in figures.items()]
        for start in range(0, len(metrics), MOST):
            self.client.log_batch(self.id, metrics=metrics[start : start + MOST], synchronous=True)

    def allowed(self, tag: str) -> str:
        """Return a tag with what MLflow refuses replaced: it would refuse all others with it."""
        return re.sub(r"/+", "/", re.sub(r"[^\w\-./: ]", "_", tag))[:250]

    def close(self, finished: bool) -> None:
        """End the run."""
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


class Kubeflow(Tracked):
    """The status of the TrainJob in whose pod this runs: progress, time left and the last figures.

    Kubeflow's Trainer, from 2.2 on, says by variables where to send it, if its feature gate TrainJobStatus is on
    (https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress).
    """

    URL, TOKEN, CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
    INTERVAL_S = 5.0  # between requests, which the server limits
    TIMEOUT_S = 3.0

    def __init__(self, folder: Path, after: int | None = None):
        if self.URL not in os.environ:
            raise RuntimeError(f"there is no {self.URL}: Trainer 2.2 sets it, with its feature gate TrainJobStatus")
        super().__init__(folder, "kubeflow.json", after)  # which is never there
        self.figures: dict[str, str] = {}
        self.is_due, self.next, self.said = True, 0.0, ""
        log.info("-track:      the status of the TrainJob")

    def send(self, lines: list[tuple[int, dict[str, float]]]) -> None:
        """Take figures; set the status if there are new ones. A server that does not answer is asked again later."""
        for _, figures in lines:
            new = {tag: str(value) for tag, value in figures.items() if not tag.startswith("perf/")}
            self.figures, self.is_due = {**self.figures, **new}, True
        if self.is_due and time.monotonic() >= self.next:
            self.post(**self.progress())

    def progress(self) -> dict[str, int]:
        """Return how far the run is by its last log line; nothing before the first one."""
        found = re.findall(r"step (\d+)/(\d+)  .*left ([\d:]+)$", reading.log(self.folder, 1 << 16), re.M)
        if not found:
            return {}
        step, total, left = found[-1]
        seconds = sum(int(part) * 60**place for place, part in enumerate(reversed(left.split(":"))))
        return {"progressPercentage": 100 * int(step) // int(total), "estimatedRemainingSeconds": seconds}

    def post(self, **status: Any) -> None:
        """Set the status. The token may be another one each time."""
        metrics = [{"name": name, "value": value} for name, value in self.figures.items()]
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = json.dumps({"trainerStatus": {**status, "metrics": metrics, "lastUpdatedTime": now}}).encode()
        try:
            token, headers = Path(os.environ[self.TOKEN]).read_text().strip(), {"Content-Type": "application/json"}
            headers["Authorization"] = f"Bearer {token}"
            request = urllib.request.Request(os.environ[self.URL], body, headers)
            context = ssl.create_default_context(cafile=os.environ[self.CA])
            urllib.request.urlopen(request, timeout=self.TIMEOUT_S, context=context).close()
            self.is_due = False
        except (OSError, KeyError, http.client.HTTPException) as error:
            if self.said != (text := f"{type(error).__name__}: {error}"):
                log.warning("-track: the status of the TrainJob cannot be set (%s); it is tried again", text)
                self.said = text
        self.next = time.monotonic() + self.INTERVAL_S

    def close(self, finished: bool) -> None:
        """Set the status for the last time; try it again twice."""
        end = {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        self.is_due = True
        for attempt in range(3):
            if self.is_due:
                time.sleep(self.INTERVAL_S if attempt else 0)
                self.post(**(end if finished else self.progress()))


BY_NAME = {"wandb": Wandb, "mlflow": Mlflow, "kubeflow": Kubeflow}

if __name__ == "__main__":
    sys.exit(main())
