"""What a person sees of a run: log lines, a progress bar, figures, and each rank's own log."""

import contextlib
import functools
import logging
import os
import sys
import threading
from pathlib import Path

log = logging.getLogger(__name__)


def setup_logging(folder: Path | None, rank: int, main: bool):
    """Send Python's logging to folder/logs/rank_N.log and, on rank 0 (main), in plain lines to stdout.

    The file (none without a folder) gets time, level, message and tracebacks, also of warnings.warn and of an
    uncaught exception. The terminal gets the messages alone: ours from INFO on, other packages' from WARNING on.
    Nothing here stops the run: a full disk is one warning, a closed stdout is pointed to the null device. A second
    call replaces the first.
    """
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, (LogFile, Terminal))]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    if folder is not None:
        root.addHandler(LogFile(Path(folder) / "logs" / f"rank_{rank}.log"))
    if main and sys.stdout is not None:
        root.addHandler(Terminal(sys.stdout))
    logging.captureWarnings(True)
    if getattr(sys.excepthook, "func", None) is not _log_uncaught:
        sys.excepthook = functools.partial(_log_uncaught, sys.excepthook)


def _log_uncaught(then, kind, error, trace):
    details = (kind, error, trace)
    log.critical("uncaught %s: %s", kind.__name__, error, exc_info=details, extra={"aside": True})
    then(kind, error, trace)


class LogFile(logging.Handler):
    """A rank's own log, appended to, written through line by line."""

    def __init__(self, path: Path):
        super().__init__()
        self._file = Appender(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record):
        try:
            text = self.format(record) + "\n"
        except (TypeError, ValueError, KeyError):  # a message and arguments that do not fit
            self.handleError(record)
            return
        self._file.append(text.encode(errors="backslashreplace"))

    def close(self):
        self._file.close()
        super().close()


class Terminal(logging.StreamHandler):
    """Plain lines on stdout, above the progress bar where there is one; records marked `aside` are not shown."""

    def filter(self, record):
        ours = record.name.partition(".")[0] in ("lib", "train", "__main__", "root")
        return (ours or record.levelno >= logging.WARNING) and not getattr(record, "aside", False)

    def format(self, record):
        return record.getMessage()

    def emit(self, record):
        with _bar_lifted(self.stream):
            super().emit(record)

    def handleError(self, record):
        error = sys.exc_info()[1]
        if isinstance(error, BlockingIOError):  # a slow reader: this line is lost, the next one may pass
            return
        if isinstance(error, OSError) or getattr(self.stream, "closed", False):
            _silence(self.stream)
            return
        super().handleError(record)


def terminal():
    """The stream of ours that a person reads, None where neither stdout nor stderr is a terminal."""
    return next((stream for stream in (sys.stdout, sys.stderr) if _is_terminal(stream)), None)


def whisper(text: str):
    """Show a line on the terminal, and in no log."""
    stream = terminal()
    with _bar_lifted(stream), contextlib.suppress(OSError):
        stream.write(text + "\n")
        stream.flush()


def _bar_lifted(stream):
    tqdm = sys.modules.get("tqdm")
    return tqdm.tqdm.external_write_mode(file=stream) if tqdm else contextlib.nullcontext()


def _silence(stream):
    # The interpreter flushes stdout when it ends, and would turn a finished run's exit code into 120.
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Appender:
    """A file that grows by whole pieces. A piece that cannot be written is left out; one warning for all of them."""

    def __init__(self, path: Path):
        self._path, self._file, self._warned = Path(path), None, False

    def append(self, piece: bytes) -> bool:
        """Write the piece and say whether it is there; it survives the end of the process, if not of the machine."""
        try:
            self._write(memoryview(piece))
        except OSError as error:
            self.close()
            self._warn(error)
            return False
        return True

    def close(self):
        """Close the file; another append opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, piece):
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        end = self._file.tell()
        try:
            while piece:
                piece = piece[self._file.write(piece) :]
        except OSError:
            self._file.truncate(end)  # a full disk may have room for a part
            raise

    def _warn(self, error):
        if not self._warned:
            self._warned = True
            log.warning("cannot write %s (%s): training goes on, what does not fit is left out", self._path, error)


class Progress:
    """The run's figures as they come: on a terminal a progress bar on stderr, elsewhere log lines; rank 0 only."""

    def __init__(self, total_steps: int, start_step: int, main: bool):
        self._main = main
        self._bar = _bar(total_steps, start_step) if main and _is_terminal(sys.stderr) else None
        self._aside = self._bar is not None and _is_terminal(sys.stdout)

    def advance(self, steps: int = 1):
        """Move the bar on by optimizer steps."""
        if self._bar is not None:
            self._draw(self._bar.update, steps)

    def show(self, figures: str):
        """Log the figures of `line`; on a terminal they stand beside the bar instead, and in the log file."""
        if self._main:
            log.info("%s", figures, extra={"aside": self._aside})
        if self._bar is not None:
            self._draw(self._bar.set_description_str, figures)

    def close(self):
        """Leave the bar as it stands, on a line of its own."""
        if self._bar is not None:
            self._draw(self._bar.close)
        self._bar = None

    def _draw(self, draw, *values):
        try:
            draw(*values)
            sys.stderr.flush()  # tqdm keeps silent about a terminal that is gone
        except OSError:
            _silence(sys.stderr)
            self._bar.disable = True
            self._bar, self._aside = None, False


def _is_terminal(stream):
    return stream is not None and not stream.closed and stream.isatty()


def _bar(total_steps, start_step):
    from tqdm import tqdm

    # Neither tqdm's monitor thread nor its lock between processes (semaphores, a tracker process) is needed here.
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())
    look = "{percentage:3.0f} %|{bar:20}| {desc}"
    return tqdm(total=total_steps, initial=start_step, file=sys.stderr, dynamic_ncols=True, bar_format=look)


def line(figures: dict) -> str:
    """The log line of these figures; any may be missing or None, and others come last, as `name value`.

    epoch, step: (now, of how many) or now; loss, loss_mean, lr, grad_norm; samples_per_s; data_share: of the time,
    0 to 1; memory: bytes; left_s: seconds. "epoch 3/12  step 400/1200  loss 0.123 (mean 0.150)  lr 1.0e-03
    grad 0.52  12,345 samples/s  data 3 %  mem 1.2 GB  left 0:42"
    """
    figures = {name: value for name, value in figures.items() if value is not None}
    if {"loss", "loss_mean"} <= figures.keys():
        figures["loss"] = f"{_three(figures['loss'])} (mean {_three(figures.pop('loss_mean'))})"
    known = [form(figures.pop(name)) for name, form in FORMS.items() if name in figures]
    return "  ".join([*known, *(f"{name} {_three(value)}" for name, value in figures.items())])


def _three(value):
    return (
        value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:#.3g}".rstrip(".")
    )


def _of(value):
    return "/".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def _bytes(count):
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


FORMS = {
    "epoch": lambda value: f"epoch {_of(value)}",
    "step": lambda value: f"step {_of(value)}",
    "loss": lambda value: f"loss {_three(value)}",
    "loss_mean": lambda value: f"loss mean {_three(value)}",
    "lr": lambda value: f"lr {value:.1e}",
    "grad_norm": lambda value: f"grad {value:.3g}",
    "samples_per_s": lambda value: f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2g} samples/s",
    "data_share": lambda value: f"data {value:.0%}".replace("%", " %"),
    "memory": lambda value: f"mem {_bytes(value)}",
    "left_s": lambda value: f"left {_clock(value)}",
}
