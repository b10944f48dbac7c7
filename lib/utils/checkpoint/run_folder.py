"""The folder of a run, out/NAME: its checkpoints' names, its lock, starting from scratch, how the run ended.

Imports no torch: the launchers and the tasks of a Slurm job, which must handle signals at once, import it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError, no_exit

if TYPE_CHECKING:
    from lib.config import Args
    from lib.utils.checkpoint.shared_disk import Disk
    from lib.utils.distributed import World

log = logging.getLogger(__name__)
NAME = re.compile(r"(\d{6,})_step_\d+|step_\d+\w*")  # the latter of format 1: they are found, and refused
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)  # there is no such file
LESS_MEMORY = "a smaller -micro_batch takes less; so do -recompute, -bf16 and -parallel fsdp"
OUT_OF_RANGE = "an index is too large, or negative: labels are 0 to -num_classes - 1, or -ignore_index"  # on a GPU
WAIT_S = 120.0  # for another process with the lock, which may be saving; NFS keeps the lock of a lost host for 90 s


# Checkpoints by name: a number that grows with every save, and the step for people


def path_of(args: Args) -> Path:
    """Return the run's folder, out/NAME."""
    return Path(args.out) / args.model


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first; none where it is missing."""
    try:
        checkpoints = [entry for entry in folder.iterdir() if NAME.fullmatch(entry.name)]
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return []
    return sorted(checkpoints, key=lambda entry: checkpoint_number(entry.name), reverse=True)


def checkpoint_number(name: str) -> int:
    """Return the running number in a checkpoint's name, 0 without one."""
    match = NAME.fullmatch(name)
    return int(match[1] or 0) if match else 0


# The lock


def is_reset_due(args: Args, world: World) -> bool:
    """Whether -reset is still to be carried out: once in a launch, whatever restarts and requeues follow."""
    return args.reset and read_outcome(path_of(args)).get("launch") != world.launch


@contextlib.contextmanager
def acquire(args: Args, world: World, disk: Disk, job: str | None = None) -> Iterator[RunFolder]:
    """Keep the run's folder for this run alone during the block. All ranks call this together.

    A start that is refused before `begin` leaves the folder as it was. Another exception makes the outcome "failed".

    Raises:
        UsageError: the folder cannot be written, or another run has it.
    """
    folder = RunFolder(args, world, disk)
    try:
        disk.do(lambda: folder.lock(job))
        with no_exit():
            yield folder
    except Exception as error:
        folder.fail(error)
        raise
    finally:
        folder.unlock()


class NoRunFolder:
    """Stands in for a RunFolder where nothing is to be locked or written."""

    path = None

    def begin(self, config: str) -> None:
        """Do nothing."""


class RunFolder:
    """The folder of a run; the first rank of each disk has its lock."""

    def __init__(self, args: Args, world: World, disk: Disk):
        self.args, self.world, self.disk = args, world, disk
        self.path = path_of(args)
        self.lock_file: IO[str] | None = None
        self.begun = False

    def begin(self, config: str) -> None:
        """Make room for a new run under -reset, and write config.yaml and the outcome "running"."""

        def write() -> None:
            with self._writing():
                if is_reset_due(self.args, self.world):
                    _move_away(self.path)
                atomic.write_file(self.path / "config.yaml", config)
                write_outcome(self.path, self.world, "running")

        self.disk.do(write)
        self.begun = True

    def lock(self, job: str | None) -> None:
        """Take the lock. Wait for another process that has it: it may be saving.

        A record lock belongs to the process: no child inherits it, and the kernel frees it after kill -9.
        """
        until, used = time.monotonic() + max(WAIT_S, self.args.grace_s), ""
        while not (file := self._take()):
            if not used:
                owner = ", ".join(f"{key} {value}" for key, value in read_json(self.path / ".lock").items() if value)
                used = f"{self.path} is in use by {owner or 'another process'}"
                log.warning("%s: waiting up to %.0f s until it is gone", used, until - time.monotonic())
            if time.monotonic() > until:
                raise UsageError(f"-model {self.path.name}: {used}; take another name or wait")
            time.sleep(0.05)
        self.lock_file = file
        with self._writing():
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job}))
            file.flush()

    def _take(self) -> IO[str] | None:
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / ".lock").stat()
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.ENOENT):  # another has (SMB: EACCES) or removed it
                file.close()
                return None
            log.warning("%s: this file system has no locks (%s): a second run is not noticed", file.name, error)
        return file

    def unlock(self) -> None:
        """Release the lock; remove what a start that was refused has made."""
        if self.lock_file is None:
            return
        with contextlib.suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
        with contextlib.suppress(OSError):  # a full disk
            self.lock_file.close()

    def fail(self, error: Exception) -> None:
        """Write why the run failed, unless the start was refused or the folder is still the old run's."""
        if type(error).__name__ == "OutOfMemoryError":
            error.args = (f"{error} ({LESS_MEMORY})",)
        if "device-side assert" in str(error):
            error.args = (f"{error} ({OUT_OF_RANGE})",)
        if self.begun:
            log.critical("failed", exc_info=error)
        elif isinstance(error, UsageError) or is_reset_due(self.args, self.world):
            return
        try:
            record_failure(self.path, self.world, error)
        except OSError as second:  # the first one is the cause
            log.warning("%s could not be written (%s)", self.path / "outcome.json", second)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            flags = f"-out {self.path.parent} -model {self.path.name}"
            raise UsageError(f"{flags}: cannot be written ({error.strerror})") from error


def _move_away(folder: Path) -> None:
    """Move an old run to out/.old, except the lock and the files of Slurm jobs: one of them may be this start."""
    entries = [entry for entry in folder.iterdir() if entry.name not in (".lock", "slurm")]
    target = folder.parent / ".old" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    if entries:
        target.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        entry.rename(target / entry.name)


# How the run ended


def read_outcome(run: Path) -> dict:
    """Return outcome.json, {} if there is none. Its entry `written` differs each time that it is written."""
    return read_json(run / "outcome.json")


def read_job_outcome(run: Path, job: str) -> dict:
    """Return the outcome if a start of this Slurm job wrote it, else {}: its launches are called JOB or JOB.STEP."""
    facts = read_outcome(run)
    return facts if str(facts.get("launch")).partition(".")[0] == job else {}


def write_outcome(folder: Path, world: World, state: str, **facts: Any) -> None:
    """Write outcome.json: running, finished, stopped or failed, and why. Launchers and people decide from it."""
    who = {"launch": world.launch, "host": socket.gethostname(), "pid": os.getpid(), "written": time.time_ns()}
    atomic.write_file(folder / "outcome.json", json.dumps({"state": state, **facts, **who}, indent=2) + "\n")


def record_failure(folder: Path, world: World, error: Exception) -> None:
    """Write the outcome "failed" and the first rank's reason.

    A rank that fails because another is gone does not replace it, in whatever order they write.
    """
    before, lost = read_outcome(folder), is_lost_peer(error)
    known = before.get("state") == "failed" and before.get("launch") == world.launch
    if not known or (before.get("lost_peer") and not lost):
        text = f"{type(error).__name__}: {error}"
        text = text.strip().splitlines()[-1] if "\nOriginal Traceback" in text else text  # a loader process's
        text = f"lost another process ({text})" if lost else text
        write_outcome(folder, world, "failed", reason=f"rank {world.rank}: {text}", lost_peer=lost)


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is how a process fails when another one is gone. gloo's errors have no class of their own."""
    by_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # this file imports no torch
    by_gloo = isinstance(error, RuntimeError) and re.search(r"\bgloo/", str(error)) is not None
    return by_torch or by_gloo or isinstance(error, ConnectionError)


def read_json(path: Path) -> dict:
    """Return what a JSON file holds, {} if it holds no dict, or cannot be read."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
