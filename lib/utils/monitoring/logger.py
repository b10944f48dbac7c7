"""What a run says of itself: the terminal, the logs, metrics.jsonl and TensorBoard. Silent off rank 0."""

import contextlib
import logging
from pathlib import Path

import torch

from lib.utils.distributed import World
from lib.utils.monitoring import (
    console,
    metrics,
    profiler,
    startup,
    tensorboard,
    tensorboard_server,
    throughput,
    tunnel,
)
from lib.utils.monitoring.images import Answers, grid, is_picture

log = logging.getLogger(__name__)
METRICS = ["train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy"]
PERF = ("samples_per_s", "data_share", "memory")  # figures of speed, shown as perf/*


class Silent:
    """Stands in for a Logger where nothing is to be shown or written: the same methods, without effect."""

    def waited(self, seconds: float): ...

    def first_batch(self, batch): ...

    def training(self, state, figures: dict): ...

    def histograms(self, step: int, model): ...

    def evaluated(self, state, split: str, figures: dict, answers): ...

    def last_words(self, outcome: dict, args): ...

    def close(self, finished: bool = False): ...


class Logger:
    """The figures of a run as it goes."""

    def __init__(self, folder: Path, world: World, args, *, total_steps: int, state):
        """`state`: how far the run is already."""
        step, samples = state.step, state.samples
        startup.report("resume")
        self.folder, self.world, self.total_steps, self.epochs = folder, world, total_steps, args.epochs
        # What was logged after the checkpoint comes again. An evaluation at its very step may be logged already.
        self.logged = metrics.cut_back(folder / "metrics.jsonl", step) if world.is_main else set()
        self.lines = metrics.Lines(folder / "metrics.jsonl", world.is_main)
        self.board = tensorboard.Board(folder / "tensorboard", world.is_main, step + 1)
        self.board.config(vars(args))
        self.board.hparams(
            {name: value for name, value in vars(args).items() if name not in args.flag_rules.free}, METRICS
        )
        self.histogram_every = args.log_histograms
        serves = (args.tb or args.ngrok) and world.is_main
        self.lock = tunnel.Lock(args) if serves else None
        self.addresses, self.address_file = "", folder / "tensorboard_address.txt"
        self.server = tensorboard_server.serve(folder.parent, self._heard, serves, self.lock and self.lock.policy)
        self.profile = profiler.Profile(folder / "profile", world, args.profile)
        self.bar = console.Progress(total_steps, step, world.is_main)
        self.rate = throughput.Rate(total_steps, step, throughput.starving(world.device))
        self.started, self.begun = False, step
        self.timed = step, samples  # as of the last log line of this process

    def waited(self, seconds: float):
        """Count the time that the loop waited for a batch."""
        self.rate.waited(seconds)

    def first_batch(self, batch):
        """Show the first batch that was trained on, where it is images."""
        if not self.started:
            self.started = True
            startup.report("first step")
            log.info("start-up %s", startup.summary())
            self._samples(batch)

    def _samples(self, batch):
        images = batch[0] if self.world.is_main and isinstance(batch, (tuple, list)) else None
        if is_picture(images):
            self.board.picture("train/samples", grid(images), self.begun + 1)

    def training(self, state, figures: dict):
        """A log line, of what was trained since the one before."""
        steps, samples = state.step - self.timed[0], state.samples - self.timed[1]
        self.timed = state.step, state.samples
        shown = {**figures, **self.rate.interval(steps, samples), "memory": throughput.memory(self.world.device)}
        text = console.line(
            {"epoch": (state.epoch + 1, self.epochs), "step": (state.step, self.total_steps), **shown}
        )
        self.bar.advance(steps)
        self.bar.show(text)
        left_out = ("left_s",)
        self._write(
            state,
            {f"{'perf' if name in PERF else 'train'}/{name}": shown[name] for name in shown if name not in left_out},
        )

    def histograms(self, step: int, model):
        """How this step's gradients and the weights are spread, as -log_histograms asks; of a sharded tensor rank 0's
        part."""
        if not self.histogram_every or step % self.histogram_every:
            return
        for name, parameter in model.named_parameters():
            for kind, values in (("weights", parameter.detach()), ("gradients", parameter.grad)):
                if values is not None:
                    local = values.to_local() if hasattr(values, "to_local") else values  # of a sharded tensor
                    self.board.histogram(f"{kind}/{name}", local.detach(), step)

    def evaluated(self, state, split: str, figures: dict, answers: Answers):
        """The metrics of a split and the model's answers, after the epochs that the state has. For all ranks."""
        self.rate.restart()
        if figures:
            told = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            log.info("epoch %d/%d  %s  %s", state.epoch, self.epochs, split, told)
            tagged = {f"{split}/{name}": value for name, value in figures.items()}
            drawn = answers.shown()
            if state.step == self.begun and self.logged & tagged.keys():
                return
            for name, picture in drawn.items():
                self.board.picture(f"{split}/{name}", picture, state.step)
            self._write(state, tagged)

    def last_words(self, outcome: dict, args):
        """How the run ended, where everything lies, what to type next. `outcome`: what outcome.json says."""
        if self.world.is_main:
            for text in last_words(self.folder, outcome, args):
                log.info("%s", text)

    def close(self, finished: bool = False):
        """Ends the bar, the files, the profile and the server."""
        self.profile.close()
        self.bar.close()
        self.board.close(finished)
        self.lines.close()
        self.server.close()
        if self.addresses:
            with contextlib.suppress(OSError):
                self.address_file.unlink()

    def _heard(self, name, address):
        """Says where TensorBoard is. The word in its address keeps other users of this machine out: it goes to the
        terminal, into a file that nobody else can read, and into no log."""
        what = "TensorBoard for others" if name == "tunnel" else "TensorBoard"
        self.addresses += f"{what}: {address}\n"
        try:
            self.address_file.unlink(missing_ok=True)
            self.address_file.touch(mode=0o600)
            self.address_file.write_text(self.addresses)
            log.info("%s: the address is in %s", what, self.address_file)
        except OSError as error:
            log.warning("%s: the address cannot be written to %s (%s)", what, self.address_file, error)
        if console.terminal():
            console.whisper(f"{what}: {address}")
        if name == "tunnel":
            self.lock.tell()

    def _write(self, state, tagged):
        self.board.scalars(state.step, tagged)  # first: what stands in metrics.jsonl is on the board
        self.lines.write({"step": state.step, "epoch": state.epoch, "samples": state.samples, **tagged})


def last_words(folder: Path, outcome: dict, args) -> list[str]:
    """The last lines of a run: what was reached, where it lies, what to type next."""
    again = f"python train.py -cfg {folder / 'config.yaml'}"
    if outcome["state"] == "stopped":
        at = f"epoch {outcome['epoch'] + 1}" if outcome["epoch"] < args.epochs else "the last evaluation"
        why = f"stopped ({outcome['reason']}) in {at} at step {outcome['step']}, state saved"
        return [why, f"go on:       {again}"]
    reached = "  ".join(f"{name} {value:.4f}" for name, value in outcome["test"].items())
    best = outcome["best"]
    kept = f"  (best val {best['metric']} {best['value']:.4f} in epoch {best['epoch']})" if best else ""
    return [
        f"finished:    {f'test {reached}' if reached else f'{args.epochs} epochs'}{kept}",
        f"weights:     {folder / 'final' / 'weights.safetensors'}",
        f"logs:        {folder / 'logs'}, tensorboard --logdir {folder.parent}",
        f"try next:    {again} -model {folder.name}_2 -lr_start {args.lr_start / 2:g}",
    ]


def window_sums(window: list) -> dict:
    """The losses of (loss, samples) pairs, each times its samples, and the samples: finite losses only."""
    if not window:
        return {}
    losses = torch.stack([loss for loss, _ in window]).cpu().double()  # MPS has no float64
    counts = torch.tensor([count for _, count in window], dtype=torch.float64)
    good = torch.isfinite(losses)
    return {"loss": (losses[good] * counts[good]).sum(), "samples": int(counts[good].sum())}
