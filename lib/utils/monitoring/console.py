"""The terminal and the log files: where log lines go, and their format."""

import logging
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from lib.utils import files
from lib.utils.errors import printable


def setup_logging(folder: Path | None, rank: int) -> None:
    """Send Python's logging, and warnings, to folder/logs/rank_N.log, if there is a folder, and on rank 0 to stdout.

    stdout gets the messages alone. Ours count from INFO on, others' from WARNING on. A second call replaces all.
    """
    tqdm.set_lock(threading.RLock())  # the default is a lock between processes: a semaphore and a tracker process
    tqdm.monitor_interval = 0  # no thread that redraws
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, (LogFileHandler, TerminalHandler))]:
        root.removeHandler(handler)
        handler.close()
    for name in ("lib", "scripts", "train", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    if folder is not None:
        path = Path(folder) / "logs" / f"rank_{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.open_regular(path, "a").close()
        file = LogFileHandler(path, errors="backslashreplace")
        file.name = "lib.file"
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(file)
    if rank == 0:
        root.addHandler(TerminalHandler(sys.stdout))


class LogFileHandler(logging.FileHandler):
    """A log file without anything that controls a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's text."""
        return printable(super().format(record))


class TerminalHandler(logging.StreamHandler):
    """Messages on stdout, above the progress bar if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message alone: Python prints the traceback that ends a run."""
        return printable(record.getMessage())

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Write no more to a terminal or pipe that is gone: the log file has all lines."""
        if isinstance(sys.exc_info()[1], OSError):
            logging.getLogger().removeHandler(self)
        else:
            super().handleError(record)


def format_metrics(figures: dict[str, float]) -> str:
    """Return the figures of an evaluation as text."""
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
