"""The terminal and the log files: log lines, the progress bar, and how a line of figures looks."""

import contextlib
import functools
import logging
import sys
import threading
from pathlib import Path

log = logging.getLogger(__name__)
OURS = ("lib", "train", "__main__", "root")  # the first part of our loggers' names


def setup_logging(folder: Path | None, rank: int, main: bool):
    """Send Python's logging to folder/logs/rank_N.log and, on rank 0 (main), to stdout.

    The file (none without a folder) gets time, level, message and traceback, also of warnings.warn. The terminal gets
    the messages alone: ours from INFO on, those of other packages from WARNING on. A second call replaces the first.
    """
    close_logging()
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if folder is not None:
        path = Path(folder) / "logs" / f"rank_{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        root.addHandler(LogFile(path, errors="backslashreplace"))
        root.handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if main:
        root.addHandler(Terminal(sys.stdout))


def close_logging():
    """Undo `setup_logging`, but for the level."""
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, (LogFile, Terminal))]:
        root.removeHandler(handler)
        handler.close()


class LogFile(logging.FileHandler):
    """The log of one rank. On a full disk it loses lines, without a word: metrics.jsonl warns of that."""

    def handleError(self, record):
        """Handle what `emit` raises."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Terminal(logging.StreamHandler):
    """Messages on stdout, above the progress bar if there is one. Records marked `in_bar` are left out."""

    def filter(self, record):
        """Whether the terminal shows this record."""
        ours = record.name.partition(".")[0] in OURS
        return (ours or record.levelno >= logging.WARNING) and not getattr(record, "in_bar", False)

    def format(self, record):
        """The message alone: Python prints the traceback that ends a run."""
        return record.getMessage()

    def emit(self, record):
        """Write a record."""
        with _tqdm().external_write_mode(file=self.stream) if self.stream.isatty() else contextlib.nullcontext():
            super().emit(record)


class Progress:
    """Show the figures of a run in a progress bar if stderr is a terminal, else in log lines; rank 0 (main) only."""

    def __init__(self, total_steps: int, start_step: int, main: bool):
        self._main = main
        self._bar = _tqdm()(
            total=total_steps,
            initial=start_step,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f} %|{bar:20}| {desc}",
            disable=None if main else True,  # None: unless stderr is a terminal
        )

    def show(self, steps: int, figures: str):
        """Move the bar on by so many steps and log the figures. A terminal with a bar shows them there alone."""
        self._bar.update(steps)
        if self._main:
            log.info("%s", figures, extra={"in_bar": not self._bar.disable and sys.stdout.isatty()})
        self._bar.set_description_str(figures)

    def close(self):
        """Leave the bar as it stands."""
        self._bar.close()


@functools.cache
def _tqdm():
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread that redraws
    tqdm.set_lock(threading.RLock())  # the default is a lock between processes: a semaphore and a tracker process
    return tqdm


def line(figures: dict) -> str:
    """Return the log line of these figures: those of FORMS first, then any others as `name value`.

    "epoch 3/12  step 400/1200  loss 0.123 (mean 0.150)  lr 1.0e-03  grad 0.52  12,345 samples/s  data 3 %"
    """
    known = [FORMS[name](figures[name]) for name in FORMS if name in figures]
    others = [f"{name} {_three_digits(value)}" for name, value in figures.items() if name not in FORMS]
    return "  ".join(known + others).replace("  (mean", " (mean")


def _three_digits(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:#.3g}".rstrip(".")


def _bytes(count):
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


FORMS = {  # epoch and step: now, and of how many; data_share: from 0 to 1; memory: in bytes
    "epoch": lambda value: "epoch {}/{}".format(*value),
    "step": lambda value: "step {}/{}".format(*value),
    "loss": lambda value: f"loss {_three_digits(value)}",
    "loss_mean": lambda value: f"(mean {_three_digits(value)})",
    "lr": lambda value: f"lr {value:.1e}",
    "grad_norm": lambda value: f"grad {value:.3g}",
    "samples_per_s": lambda value: f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2g} samples/s",
    "data_share": lambda value: f"data {100 * value:.0f} %",
    "memory": lambda value: f"mem {_bytes(value)}",
    "left_s": lambda value: f"left {_tqdm().format_interval(round(value))}",
}
