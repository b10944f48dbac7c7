"""The folder of a run, out/NAME: its checkpoints' names, its lock, starting from scratch, how the run ended.

Imports no torch: the launchers and the tasks of a Slurm job, which must handle signals at once, import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lib.utils import files
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError, no_exit, printable

if TYPE_CHECKING:
    from lib.config import Args
    from lib.utils.distributed import World

log = logging.getLogger(__name__)
NAME = re.compile(r"(\d{6,})_step_\d+|step_\d+\w*")  # the latter of format 1: they are found, and refused
HINTS = {  # by what is in an error of torch
    "OutOfMemoryError": "a smaller -micro_batch takes less; so do -recompute, -bf16 and -parallel fsdp",
    "FSDP state has already been": "under -parallel fsdp training_step calls the whole model, as self.model(...)",
    "mixed torch.Tensor and DTensor": "FSDP's blocks are called whole: give get_blocks others, or take -parallel ddp",
    "graph a second time": "a tensor of an earlier pass is kept with its graph, as a hidden state: detach() it",
    "got Double and Float": "the samples are of 64 bits: let the dataset make them float32",
    "DTensor random operators": "each rank would draw the same for its shard: take -parallel ddp",
    "Expected more than 1 value per channel": "take -drop_last, or another -batch_size, and -allow_change it",
    "device-side assert": "an index is too large, or negative: labels are 0 to -num_classes - 1, or -ignore_index",
}
WAIT_S = 120.0  # for another process with the lock, which may be saving; NFS keeps the lock of a lost host for 90 s
PATIENCE_S = 2.0  # a network disk may show a host the files of another a little later
_locks: dict[Path, IO] = {}  # of each run of this process: .lock as it was at the start, open


def path_of(args: Args) -> Path:
    """Return the run's folder, out/NAME."""
    return Path(args.out) / args.model


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first; none where it is missing."""
    try:
        checkpoints = [entry for entry in folder.iterdir() if NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(checkpoints, key=lambda entry: checkpoint_number(entry.name), reverse=True)


def checkpoint_number(name: str) -> int:
    """Return the running number in a checkpoint's name, 0 without one."""
    match = NAME.fullmatch(name)
    return int(match[1] or 0) if match else 0


def take_over(run: Path, launch: str) -> None:
    """Wait for the lock: the process of this run that had it may be lost. Raises OSError if another launch has it."""
    fcntl.lockf(_locks[run], fcntl.LOCK_EX)  # the launcher, or the watchdog, ends a process that waits too long
    if read_json(run / "outcome.json").get("launch") != launch:
        raise OSError(errno.EBUSY, "another start has the run's folder", str(run))


def check_lock(run: Path) -> None:
    """Raise OSError if the run's lock is another file than at the start: another process has the folder now."""
    path = run / ".lock"
    if run in _locks and path.exists() and not os.path.samestat(os.fstat(_locks[run].fileno()), path.stat()):
        raise OSError(errno.ESTALE, "was removed, another process has the run's folder, and this one ends", str(path))


def check_owner(run: Path) -> None:
    """Raise UsageError if a run's folder belongs to another user, unless -out is made for a group (chmod g+ws)."""
    mode, owner = run.parent.stat().st_mode, run.lstat().st_uid
    for_group = mode & (stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH) == stat.S_ISGID | stat.S_IWGRP
    if owner != os.geteuid() and not for_group:
        hint = f"take another -out, or make it one for a group: chmod g+ws {run.parent}"
        raise UsageError(f"-out {run.parent} -model {run.name}: the folder belongs to user {owner}; {hint}")


def is_reset_due(args: Args, world: World) -> bool:
    """Whether -reset is still to be carried out: once in a launch, whatever restarts and requeues follow."""
    return args.reset and read_json(path_of(args) / "outcome.json").get("launch") != world.launch


@contextlib.contextmanager
def acquire(args: Args, world: World, job: str | None = None) -> Iterator[RunFolder]:
    """Keep the run's folder for this run alone during the block. All ranks call this together.

    A start that is refused before `begin` leaves the folder as it was. Another exception makes the outcome "failed".
    Raises UsageError if the folder cannot be written, or another run has it.
    """
    folder = RunFolder(args, world)
    try:
        folder.lock(job)
        if args.reset and world.is_main and not (args.restarts or is_reset_due(args, world)):
            remedy = "a new command needs another --rdzv_id (RUN_ID of elastic.sh)"
            log.warning("-reset is not repeated: launch %s has begun this run already; %s", world.launch, remedy)
        with no_exit():
            yield folder
    except Exception as error:
        folder.fail(error)
        raise
    finally:
        folder.unlock()


class RunFolder:
    """The folder of a run. Its `world` knows whether all nodes share it; else each has the whole run in its own."""

    def __init__(self, args: Args, world: World):
        self.args, self.world = args, world
        self.path = path_of(args)
        self.begun = False
        self.before: dict[str, bytes] = {}  # what this start has replaced, until its first checkpoint
        self.checkpoints: list[Path] = []  # then

    def begin(self, config: str, start: dict) -> None:
        """Make room for a new run under -reset, and write config.yaml, start.json and the outcome "running"."""

        def write() -> None:
            with self._writing():
                if is_reset_due(self.args, self.world):
                    _move_away(self.path)
                self.checkpoints = list_checkpoints(self.path / "checkpoints")
                for name, text in (("config.yaml", config), ("start.json", json.dumps(start))):
                    if self.checkpoints and (self.path / name).exists():
                        self.before[name] = files.read_bytes(self.path / name)
                    atomic.write_file(self.path / name, text)
                write_outcome(self.path, self.world, "running")

        self.world.on_writers(write)
        self.begun = True

    def lock(self, job: str | None) -> None:
        """Let rank 0 take the lock, and the first process of each node, if some do not see rank 0's."""
        owner = self.world.on_writers(lambda: self._wait_for_lock(job))[0]
        nodes = dataclasses.replace(self.world, shares_disk=False)

        def sees_it() -> bool:  # the owner does not look: who closes a file loses all locks on it
            if not nodes.is_main and read_json(self.path / ".lock") != owner:
                time.sleep(PATIENCE_S)
            return nodes.is_main or read_json(self.path / ".lock") == owner

        if not all(nodes.on_writers(sees_it)):
            self.world = nodes
            nodes.on_writers(lambda: None if nodes.is_main else self._wait_for_lock(job))
        if not self.world.is_writer:
            with contextlib.suppress(FileNotFoundError):  # a network disk may show it later
                _locks[self.path] = files.open_regular(self.path / ".lock", "r+")

    def _wait_for_lock(self, job: str | None) -> dict[str, Any]:
        """Take the lock, and return what is in it; wait if another has it. The kernel frees it after kill -9."""
        until, used = time.monotonic() + max(WAIT_S, self.args.grace_s), ""
        while not (file := self._take()):
            if not used:
                owner = ", ".join(f"{key} {value}" for key, value in read_json(self.path / ".lock").items() if value)
                used = f"{self.path} is in use by {printable(owner) or 'another process'}"
                log.warning("%s: waiting up to %.0f s until it is gone", used, until - time.monotonic())
            if time.monotonic() > until:
                raise UsageError(f"-model {self.path.name}: {used}; take another name or wait")
            time.sleep(0.05)
        _locks[self.path] = file
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": since}
        with self._writing():
            file.truncate(0)
            file.write(json.dumps(mine))
            file.flush()
        return mine

    def _take(self) -> IO[str] | None:
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            check_owner(self.path)
            for name in ("checkpoints", "best", "final", "logs", "slurm", "metrics.jsonl", "../.old"):
                if (path := self.path / name).is_symlink():
                    raise OSError(errno.ELOOP, "a link, which is not followed", os.path.normpath(path))
            file = files.open_regular(self.path / ".lock", "a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), (self.path / ".lock").stat()):
                raise FileNotFoundError(errno.ENOENT, "another start has removed it, and made its own")
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.ENOENT):  # another has (SMB: EACCES) or removed it
                file.close()
                return None
            log.warning("%s: this file system has no locks (%s): a second run is not noticed", file.name, error)
        return file

    def unlock(self) -> None:
        """Release the lock; remove what a start that was refused has made."""
        with contextlib.suppress(OSError, KeyError), _locks.pop(self.path):  # a full disk; a lock that was not taken
            if self.world.is_writer and [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()

    def fail(self, error: Exception) -> None:
        """Write the outcome "failed" and why, unless the start was refused or the folder is still the old run's.

        A rank that fails because another is gone does not replace that one's reason, in whatever order they write.
        """
        for sign, hint in HINTS.items():
            if sign in f"{type(error).__name__} {error}":
                error.args = (f"{error} ({hint})",)
        if self.begun:
            log.critical("failed", exc_info=error)
        elif isinstance(error, UsageError) or is_reset_due(self.args, self.world):
            return
        before, lost = read_json(self.path / "outcome.json"), is_lost_peer(error)
        known = before.get("state") == "failed" and before.get("launch") == self.world.launch
        taken = self.begun and before.get("launch") != self.world.launch  # by another start
        if not taken and (not known or (before.get("lost_peer") and not lost)):
            text = f"{type(error).__name__}: {error}"
            text = text.strip().splitlines()[-1] if "\nOriginal Traceback" in text else text  # a loader process's
            reason = f"rank {self.world.rank}: " + (f"lost another process ({text})" if lost else text)
            with contextlib.suppress(OSError):  # the first error is the cause
                if self.before and list_checkpoints(self.path / "checkpoints") == self.checkpoints:
                    for name, data in self.before.items():  # as the checkpoints are: they are continued by it
                        atomic.write_file(self.path / name, data.decode())
                write_outcome(self.path, self.world, "failed", reason=reason, lost_peer=lost)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            flags = f"-out {self.path.parent} -model {self.path.name}"
            raise UsageError(f"{flags}: cannot be written ({error.strerror}: {error.filename})") from error


def _move_away(folder: Path) -> None:
    """Move an old run to out/.old, but not the lock and the files of Slurm jobs: one of them may be this start."""
    old = folder.resolve().parent / ".old"  # on its own disk, if out/NAME is a link
    target = old / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6}"
    for entry in [*folder.iterdir()]:
        if entry.name not in (".lock", "slurm"):
            target.mkdir(parents=True, exist_ok=True)
            entry.rename(target / entry.name)


def write_outcome(folder: Path, world: World, state: str, **facts: Any) -> None:
    """Write outcome.json: running, finished, stopped or failed, and why. Launchers and people decide from it."""
    check_lock(folder)
    who = {"launch": world.launch, "host": socket.gethostname(), "pid": os.getpid(), "written": time.time_ns()}
    atomic.write_file(folder / "outcome.json", json.dumps({"state": state, **facts, **who}, indent=2) + "\n")


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is how a process fails when another one is gone. gloo's errors have no class of their own."""
    by_gloo = isinstance(error, RuntimeError) and re.search(r"\bgloo/", str(error)) is not None
    return by_gloo or any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # of torch


def read_json(path: Path, *, follow: bool = False) -> dict:
    """Return what a JSON file, or with `follow` a link to one, holds; {} if it holds no dict, or cannot be read."""
    try:
        facts = json.loads(files.read_bytes(path, follow=follow))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
