"""Reads a run's folder from outside, without torch, so that it answers at once."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lib.utils import files
from lib.utils.checkpoint import run_folder

METRICS_BYTES = 1 << 30  # of a metrics.jsonl that is read
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


def folders(out: Path) -> list[Path]:
    """The runs' folders in `out`, by name; or `out` itself if it is one."""
    if (out / "outcome.json").is_file():
        return [out]
    return sorted(file.parent for file in out.glob("*/outcome.json") if not file.parent.name.startswith("."))


def checkpoint(folder: Path) -> dict:
    """Return the manifest of the newest checkpoint, {} without one."""
    newest = next(iter(run_folder.list_checkpoints(folder / "checkpoints")), None)
    return run_folder.read_json(newest / "manifest.json") if newest else {}


def lines(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl that a run has written whole; see `metrics`."""
    return metrics(folder).lines


@dataclass
class Metrics:
    """What metrics.jsonl holds."""

    lines: list[dict]  # that are whole: a step, and numbers
    fault: str  # which others there are, or why it cannot be read; ""


def metrics(folder: Path) -> Metrics:
    """Return the lines of metrics.jsonl. An incomplete one at the end, which the run is writing, is no fault."""
    path = folder / "metrics.jsonl"
    try:
        *texts, last = files.read_bytes(path, most=METRICS_BYTES).split(b"\n")
    except FileNotFoundError:
        return Metrics([], "")
    except OSError as error:
        return Metrics([], f"metrics.jsonl: {error.strerror}")
    parsed = [parse(text) for text in texts]
    odd = [number for number, line in enumerate(parsed, 1) if not line]
    fault = f"metrics.jsonl: line {odd[0]} is none that a run writes" if odd else ""
    fault += f", nor are {len(odd) - 1} more" if len(odd) > 1 else ""
    return Metrics([line for line in [*parsed, parse(last)] if line], fault)


def parse(text: bytes | str) -> dict:
    """Return what a line of metrics.jsonl holds, {} for a line that no run writes."""
    try:
        line = json.loads(text)
        line = {name: value for name, value in line.items() if not isinstance(value, str)}  # which a fork adds
        [float(value) for value in line.values() if value is not None]  # not of 400 digits
    except (ValueError, RecursionError, OverflowError, TypeError, AttributeError):
        return {}
    good = isinstance(line, dict) and type(line.get("step")) is int
    return line if good and all(isinstance(value, int | float | None) for value in line.values()) else {}


def log(folder: Path, last: int = 1 << 22) -> str:
    """The last bytes of rank 0's log."""
    return tail(folder / "logs" / "rank_0.log", last)


def tail(path: Path, last: int = 1 << 22) -> str:
    """The last bytes of a text file, "" if it cannot be read."""
    try:
        with files.open_regular(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def resumes(folder: Path) -> list[int]:
    """The steps at which the run resumed from a checkpoint."""
    return [int(step) for step in re.findall(r"resuming from .*, step (\d+)$", log(folder), re.M)]


def is_locked(folder: Path) -> bool | None:
    """Return whether a process on any host has the run's lock, None if that cannot be known. Takes no lock."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with files.open_regular(folder / ".lock", "rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK


def requeued(folder: Path) -> str:
    """Return why the run's Slurm job was requeued and its id, while the job waits to be started again; else "".

    This is known only if the job's files are in the run's folder, as they are without -slurm_dir.
    """
    histories = sorted((folder / "slurm").glob("*.json"), key=lambda path: path.stat().st_mtime)
    why = run_folder.read_json(histories[-1]).get("requeued") if histories else None
    outcome = folder / "outcome.json"
    if not why or outcome.stat().st_mtime > histories[-1].stat().st_mtime:
        return ""
    job = histories[-1].stem
    if shutil.which("squeue"):
        queue = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True)
        if not queue.stdout.strip() and (queue.returncode == 0 or "Invalid job id" in queue.stderr):
            return ""  # it was cancelled meanwhile
    return f"{why}: job {job} continues by itself"


def sign_of_life(folder: Path) -> float:
    """The time of the run's last write, in seconds since 1970."""
    written = [folder / name for name in ("outcome.json", "metrics.jsonl", "logs/rank_0.log", ".lock")]
    times = []
    for file in written:
        with contextlib.suppress(OSError):  # it is not there, or this user may not see it
            times.append(file.stat().st_mtime)
    return max(times, default=0.0)
