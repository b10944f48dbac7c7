"""What a run reports of itself: to the terminal and the logs, metrics.jsonl and TensorBoard."""

import contextlib
import logging
from pathlib import Path

from lib.utils.distributed import World
from lib.utils.monitoring import console, images, metrics, profiler, startup, tensorboard, tensorboard_server

log = logging.getLogger(__name__)
FEW_STEPS = 100  # a finished run with fewer is advised to take more


@contextlib.contextmanager
def opened(folder: Path | None, world: World, args, epoch_steps: int, state):
    """The logger of a run in this folder, which is as far as `state`; without a folder one that does nothing."""
    total = args.epochs * epoch_steps
    report = Logger(folder, world, args, total_steps=total, state=state) if folder else Silent()
    try:
        yield report
    finally:
        report.close()


class Silent:
    """A logger that does nothing, for -dry, -debug and -eval."""

    profile = profiler.Off()

    def first_batch(self, batch):
        """After each micro-batch: the first one ends the start of the run, and is shown if it is images."""

    def training(self, state, interval: dict, figures: dict, speed: dict):
        """A log line on the training since the one before.

        `interval`: sums over its samples; `figures`: of its last step; `speed`: shown as perf/*.
        """

    def evaluated(self, state, split: str, figures: dict, answers: images.Answers):
        """The metrics of a split and pictures of the model's answers; every rank calls this."""

    def last_words(self, outcome: dict, args):
        """How the run ended (as in outcome.json), where its files are, and what to try next, if anything."""

    def close(self, finished: bool = False):
        """Close the files, and end the progress bar, the profile and TensorBoard's server."""


class Logger(Silent):
    """The logger of a run. Every rank has one, but only rank 0 writes more than its own log and profile."""

    def __init__(self, folder: Path, world: World, args, *, total_steps: int, state):
        """`total_steps`: of the whole run; `state`: how far it is already."""
        startup.report("resume")
        self.main = main = world.is_main
        self.folder, self.args, self.total_steps = folder, args, total_steps
        self.start_step, self.shown_step = state.step, state.step
        self.started = False
        # Steps after the checkpoint come again; an evaluation at its very step may be logged already.
        self.logged = metrics.cut_back(folder / "metrics.jsonl", state.step) if main else set()
        self.lines = metrics.Lines(folder / "metrics.jsonl", main)
        comparable = [name for name in vars(args) if name not in args.flag_rules.free]
        self.board = tensorboard.Board(folder / "tensorboard", main, state.step + 1, vars(args), comparable)
        self.bar = console.Progress(total_steps, state.step, main)
        self.profile = profiler.Profile(folder / "profile", world, args.profile) if args.profile else profiler.Off()
        self.server = None
        if main and (args.tb or args.ngrok):
            credentials = f"{args.ngrok_auth}:{tensorboard_server.password()}" if args.ngrok else None
            self.server = tensorboard_server.Server(folder, credentials)

    def first_batch(self, batch):
        if self.started:
            return
        self.started = True
        startup.report("first step")
        log.info("start-up %s", startup.summary())
        if self.main and isinstance(batch, (tuple, list)) and images.is_picture(batch[0]):
            self.board.image("train/samples", images.grid(batch[0]), self.start_step + 1)

    def training(self, state, interval, figures, speed):
        progress = {"epoch": (state.epoch + 1, self.args.epochs), "step": (state.step, self.total_steps)}
        losses = {"loss": metrics.mean(interval, "loss"), "loss_mean": metrics.mean(state.sums, "loss")}
        others = {name: metrics.mean(interval, name) for name in interval if name not in ("loss", "samples")}
        bad_steps = {"bad_steps": state.bad_steps} if state.bad_steps else {}
        figures = {**losses, **figures, **others, **bad_steps}
        self.bar.show(state.step - self.shown_step, console.line({**progress, **figures, **speed}))
        self.shown_step = state.step
        tagged = {f"train/{name}": value for name, value in figures.items()}
        self._write(state, tagged | {f"perf/{name}": value for name, value in speed.items() if name != "left_s"})

    def evaluated(self, state, split, figures, answers):
        if not figures:
            return
        pictures = answers.shown()
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        log.info("epoch %d/%d  %s  %s", state.epoch, self.args.epochs, split, shown)
        tagged = {f"{split}/{name}": value for name, value in figures.items()}
        if state.step == self.start_step and self.logged & tagged.keys():
            return
        for name, picture in pictures.items():
            self.board.image(f"{split}/{name}", picture, state.step)
        self._write(state, tagged)

    def last_words(self, outcome, args):
        if not self.main:
            return
        if outcome["state"] == "stopped":
            place = f"epoch {outcome['epoch'] + 1}" if outcome["epoch"] < args.epochs else "the last evaluation"
            log.info("stopped (%s) in %s at step %d, state saved", outcome["reason"], place, outcome["step"])
            log.info("go on:       python train.py -cfg %s", self.folder / "config.yaml")
            return
        reached = "  ".join(f"{name} {value:.4f}" for name, value in outcome["test"].items())
        reached = f"test {reached}" if reached else f"{args.epochs} epochs"
        if best := outcome["best"]:
            reached += f"  (best val {best['metric']} {best['value']:.4f} in epoch {best['epoch']})"
        log.info("finished:    %s", reached)
        log.info("weights:     %s", self.folder / "final" / "weights.safetensors")
        log.info("logs:        %s, tensorboard --logdir %s", self.folder / "logs", self.folder.parent)
        if self.total_steps < FEW_STEPS:
            log.info("try next:    %d steps only: a smaller -batch_size or more -epochs", self.total_steps)
        elif best and best["epoch"] == args.epochs > 1:
            log.info("try next:    more -epochs: the last one was the best")

    def close(self, finished=False):
        self.profile.close()
        self.profile = profiler.Off()  # closed once
        self.bar.close()
        self.board.close(finished)
        if self.server is not None:
            self.server.close()

    def _write(self, state, tagged):
        self.board.scalars(state.step, tagged)  # first: TensorBoard has every line of metrics.jsonl
        self.lines.write({"step": state.step, "epoch": state.epoch, "samples": state.samples, **tagged})
