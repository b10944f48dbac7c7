"""What a run reports of itself: to the terminal and the logs, metrics.jsonl, TensorBoard, a tracker."""

import logging
import math
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lib.utils import files
from lib.utils.distributed import World
from lib.utils.errors import load_optional
from lib.utils.monitoring import console, metrics

log = logging.getLogger(__name__)


class NoLogger:
    """The methods of Logger, which do nothing: for -debug, for -eval, and for most ranks of a run."""

    def step(self, *figures: Any) -> None:
        """Do nothing."""

    log_training = log_evaluation = close = step


class Logger:
    """The logger of a run, on its writers. A public method is one of NoLogger, too."""

    def __init__(self, folder: Path, world: World, args: Namespace, plan: Any, state: Any):
        from torch.utils.tensorboard import SummaryWriter, summary

        self.folder, self.args, self.plan, self.start_step = folder, args, plan, state.step
        # Steps after the checkpoint come again; an evaluation at its very step may be logged already.
        self.logged = metrics.truncate_lines(folder / "metrics.jsonl", state.samples)
        self.metrics_file = files.open_regular(folder / "metrics.jsonl", "a", buffering=1)
        # TensorBoard drops what an earlier start has logged from purge_step on.
        self._board: Any = SummaryWriter(folder, purge_step=state.step + 1)  # None once it cannot be written
        flags = {name: value for name, value in vars(args).items() if name not in args.flag_rules.free}
        hparams = {name: value if type(value) in (int, float) else str(value) for name, value in flags.items()}
        # Without torch's list of flags and metrics, which holds for one run, TensorBoard shows those of all runs.
        self._board.file_writer.add_summary(summary.hparams(hparams, {})[1])
        # disable=None: no bar unless stderr is a terminal.
        self.bar = tqdm(total=plan.total_steps, initial=state.step, unit="step", dynamic_ncols=True, disable=None)
        self.tracker = None
        if world.is_main and args.track != "none":
            self.tracker = load_optional("scripts.track", "-track").Tracker(args.track, folder)
        if world.is_main and (args.tb or args.ngrok):
            server = load_optional("scripts.tensorboard_server", "-tb")
            server.start(folder.parent, args.ngrok_auth if args.ngrok else "")

    def step(self) -> None:
        """Move the progress bar on, after each optimizer step."""
        self.bar.update()

    def log_training(self, state: Any, figures: dict, others: dict, speed: dict) -> None:
        """Log an interval of training: loss, loss_mean, lr and grad_norm, other metrics, and its speed."""
        if state.bad_steps:
            others["bad_steps"] = state.bad_steps
        left, rate = tqdm.format_interval(round(speed.pop("left_s"))), speed["samples_per_s"]
        parts = [
            f"{self._epoch(state.step)}  step {state.step}/{self.plan.total_steps}",
            "loss {loss:.4g}  mean {loss_mean:.4g}  lr {lr:.1e}  grad {grad_norm:.3g}".format(**figures),
            f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s",
            *(f"{one.removesuffix('_share')} {100 * speed[one]:.0f} %" for one in speed if one.endswith("_share")),
            f"mem {speed['memory_gb']:.2f} GB",
            *(f"{name} {value:.4g}" for name, value in others.items()),
            f"left {left}",
        ]
        log.info("%s", "  ".join(parts))
        tagged = {f"train/{name}": value for name, value in {**figures, **others}.items()}
        self._write(state, tagged | {f"perf/{name}": value for name, value in speed.items()})

    def log_evaluation(self, state: Any, split: str, figures: dict) -> None:
        """Log the metrics of a split."""
        if not figures:
            return
        within = f"  step {state.step}/{self.plan.total_steps}" if state.step % self.plan.steps else ""
        log.info("%s%s  %s  %s", self._epoch(state.step), within, split, console.format_metrics(figures))
        self._write(state, {f"{split}/{name}": value for name, value in figures.items()})

    def close(self, outcome: dict | None = None) -> None:
        """Close all. A run that ends well says how (as in outcome.json), where its files are, and what to do next."""
        self.bar.close()
        if self._board:
            self._board.close()
        if self.tracker:
            self.tracker.close(finished=bool(outcome) and outcome["state"] == "finished")
            self.tracker = None  # closed once
        if outcome and outcome["state"] == "stopped":
            why, step = outcome["reason"], outcome["step"]
            log.info("stopped (%s) in %s at step %d, state saved", why, self._epoch(step), step)
            log.info("resume:      python train.py -cfg %s", shlex.quote(f"{self.folder}/config.yaml"))
        elif outcome:
            self._log_results(outcome)

    def _log_results(self, outcome: dict) -> None:
        best, epoch = outcome["best"], math.ceil(outcome["step"] / self.plan.steps)
        chosen = final = f"final weights, of epoch {epoch}"
        if best:
            first = min([name.split()[0] for name in self.plan.data if name.startswith("val")], default="val")
            metric = best["metric"] if "/" in best["metric"] else f"{first} {best['metric']}"
            chosen = f"best weights: {metric} {best['value']:.4f} in epoch {best['epoch']}"
            final = final if "test_best" in outcome else chosen
        tests = [(outcome.get("test_best"), chosen), (outcome["test"], final)]
        lines = [f"test {console.format_metrics(figures)}  ({weights})" for figures, weights in tests if figures]
        for title, line in zip(("finished:", "final:"), lines or [f"{epoch} epochs  ({chosen})"]):
            log.info("%-12s %s", title, line)
        if outcome["step"] < self.plan.total_steps:
            log.info("early:       %s", outcome["reason"])
        for name in ("best", "final") if best else ("final",):
            log.info("weights:     %s", self.folder / name / "weights.safetensors")
        log.info("logs:        %s, tensorboard --logdir %s", self.folder / "logs", self.folder.parent)

    def _epoch(self, step: int) -> str:
        """Return in which epoch a step is, the first of them for 0."""
        return f"epoch {max(1, math.ceil(step / self.plan.steps))}/{self.plan.epochs}"

    def _write(self, state: Any, tagged: dict) -> None:
        if state.step == self.start_step and self.logged & tagged.keys():
            return
        if self._board:  # first: it has every line of metrics.jsonl, also after kill -9
            try:
                for name, value in tagged.items():
                    self._board.add_scalar(tensorboard_tag(name), value, state.step)
                self._board.flush()
            except OSError as error:
                self._board = None
                log.warning("nothing more is written for TensorBoard (%s); training continues", error)
        place = {"step": state.step, "epoch": state.epoch, "samples": state.samples}
        metrics.write_line(self.metrics_file, place | tagged)


def tensorboard_tag(name: str) -> str:
    """Return a figure's tag in TensorBoard, which unfolds only the first two groups: losses, then metrics and lr."""
    split, _, figure = name.partition("/")
    if not split.startswith("val") and name not in ("train/loss", "train/lr"):
        return name
    # Its curves sort "/" before "-". Its table of hparams sorts "-" before "/": there the metrics come first.
    return f"{'learning' if figure == 'loss' else 'learning-metrics'}/{figure}_{split}"
