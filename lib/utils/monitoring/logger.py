"""What a run reports of itself: to the terminal and the logs, metrics.jsonl, TensorBoard, a tracker."""

import logging
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from lib.utils.distributed import World
from lib.utils.monitoring import console, images, metrics, startup, tensorboard, tensorboard_server, trackers

log = logging.getLogger(__name__)


class NoLogger:
    """The methods of Logger, which do nothing: for -debug, for -eval, and for most ranks of a run."""

    def __init__(self):
        self.board = tensorboard.NoEventWriter()

    def first_batch(self, batch: Any) -> None:
        """Do nothing."""

    def step(self, loss: Tensor) -> None:
        """Do nothing."""

    def log_training(self, state: Any, interval: dict, figures: dict, speed: dict) -> None:
        """Do nothing."""

    def log_evaluation(self, state: Any, split: str, figures: dict, predictions: images.Predictions) -> None:
        """Do nothing."""

    def log_outcome(self, outcome: dict) -> None:
        """Do nothing."""

    def close(self, finished: bool = False) -> None:
        """Do nothing."""


class Logger:
    """The logger of a run, on the first rank of each disk. A public name is one of NoLogger, too."""

    def __init__(self, folder: Path, world: World, args: Namespace, start_step: int, total_steps: int):
        self.folder, self.args, self.start_step, self.total_steps = folder, args, start_step, total_steps
        self.started = False
        # Steps after the checkpoint come again; an evaluation at its very step may be logged already.
        self.logged = metrics.truncate_lines(folder / "metrics.jsonl", start_step)
        self.metrics_file = (folder / "metrics.jsonl").open("a", buffering=1)
        hparams = {name: value for name, value in vars(args).items() if name not in args.flag_rules.free}
        self.board = tensorboard.EventWriter(folder, start_step + 1, hparams)
        self.bar = console.Progress(total_steps, start_step)
        self.tracker = self.server = None
        if world.is_main and args.track != "none":
            self.tracker = trackers.Tracker(args.track, folder)
        if world.is_main and (args.tb or args.ngrok):
            self.server = tensorboard_server.start(folder.parent, args.ngrok_auth if args.ngrok else "")

    def first_batch(self, batch: Any) -> None:
        """After each micro-batch: the first one ends the start of the run, and is shown if it is images."""
        if self.started:
            return
        self.started = True
        log.info("start-up:    %.1f s", time.monotonic() - startup.STARTED)
        if isinstance(batch, (tuple, list)) and images.is_image_batch(batch[0]):
            self.board.image("train/samples", images.image_grid(batch[0]), self.start_step + 1)

    def step(self, loss: Tensor) -> None:
        """After each optimizer step, with the loss of its last micro-batch."""
        self.bar.step(loss)

    def log_training(self, state: Any, interval: dict, figures: dict, speed: dict) -> None:
        """Log the training since the line before.

        `interval`: sums over its samples; `figures`: of its last step; `speed`: shown as perf/*.
        """
        losses = {"loss": metrics.mean(interval, "loss"), "loss_mean": metrics.mean(state.sums, "loss")}
        others = {name: metrics.mean(interval, name) for name in interval if name not in ("loss", "samples")}
        bad_steps = {"bad_steps": state.bad_steps} if state.bad_steps else {}
        figures = {**losses, **figures, **others, **bad_steps}
        left = speed.pop("left_s")
        shown = {"epoch": (state.epoch + 1, self.args.epochs), **figures, **speed}
        text = console.format_line({**shown, "step": (state.step, self.total_steps), "left_s": left})
        log.info("%s", text, extra={"in_bar": self.bar.on_stdout})
        self.bar.show(shown)
        tagged = {f"train/{name}": value for name, value in figures.items()}
        self._write(state, tagged | {f"perf/{name}": value for name, value in speed.items()})

    def log_evaluation(self, state: Any, split: str, figures: dict, predictions: images.Predictions) -> None:
        """Log the metrics of a split and pictures of the model's answers."""
        if not figures:
            return
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        log.info("epoch %d/%d  %s  %s", state.epoch, self.args.epochs, split, shown)
        tagged = {f"{split}/{name}": value for name, value in figures.items()}
        if state.step == self.start_step and self.logged & tagged.keys():
            return
        drawn = split == "test" or images.is_due(state.epoch, self.args.epochs)
        for name, picture in predictions.draw().items() if drawn else ():
            self.board.image(f"{split}/{name}", picture, state.step)
        self._write(state, tagged)

    def log_outcome(self, outcome: dict) -> None:
        """Log how the run ended (as in outcome.json), where its files are, and what to do next."""
        if outcome["state"] == "stopped":
            place = f"epoch {outcome['epoch'] + 1}" if outcome["epoch"] < self.args.epochs else "the last evaluation"
            log.info("stopped (%s) in %s at step %d, state saved", outcome["reason"], place, outcome["step"])
            log.info("resume:      python train.py -cfg %s", self.folder / "config.yaml")
            return
        reached = "  ".join(f"{name} {value:.4f}" for name, value in outcome["test"].items())
        reached = f"test {reached}" if reached else f"{outcome['epoch']} epochs"
        if best := outcome["best"]:
            reached += f"  (best val {best['metric']} {best['value']:.4f} in epoch {best['epoch']})"
        log.info("finished:    %s", reached)
        if outcome["epoch"] < self.args.epochs:
            log.info("early:       %s", outcome["reason"])
        log.info("weights:     %s", self.folder / "final" / "weights.safetensors")
        log.info("logs:        %s, tensorboard --logdir %s", self.folder / "logs", self.folder.parent)

    def close(self, finished: bool = False) -> None:
        """Close the files, and end the progress bar and TensorBoard's server."""
        self.bar.close()
        self.board.close()
        if self.tracker:
            self.tracker.close(finished)
            self.tracker = None  # closed once
        if self.server:
            self.server.terminate()

    def _write(self, state: Any, tagged: dict) -> None:
        self.board.scalars(state.step, tagged)  # first: TensorBoard has every line of metrics.jsonl
        place = {"step": state.step, "epoch": state.epoch, "samples": state.samples}
        metrics.write_line(self.metrics_file, place | tagged)
