"""The folder of a run, out/NAME: who owns it, starting from scratch, and how the run ended."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from torch import OutOfMemoryError
from torch.distributed import DistError

from lib.utils import distributed
from lib.utils.checkpoint import atomic, shared_disk, stored
from lib.utils.distributed import World
from lib.utils.errors import UsageError, no_exit
from lib.utils.monitoring import console
from lib.utils.watchdog import Hang

log = logging.getLogger(__name__)
LESS_MEMORY = ("a smaller -micro_batch takes less, for the same steps but for BatchNorm and dropout; so do "
               "-recompute, -bf16 and -parallel fsdp")  # fmt: skip
PATIENCE_S = 3.0  # for an owner that was killed and is not quite gone
NEEDED_FILES = 16  # by a run, and one for each of its processes
LEAVING_S = 180.0  # for one that may be ending; the lock of a host that is lost stays 90 s on NFS


@contextlib.contextmanager
def claimed(args, world: World):
    """The run's folder, held by this run alone while the block lasts; under -reset an old one is moved aside first.

    Logging goes there, and outcome.json says "running" until the run says how it ended; an exception makes it
    "failed". Raises UsageError where the folder cannot be written or another run holds it.
    """
    folder = stored.run_of(args)
    locks = []
    shared_disk.look(folder.parent, world).do(lambda: locks.append(_claim(folder, args, world)))
    lock_id = stored.lock_id(folder)
    console.setup_logging(folder, world.rank, world.is_main)
    try:
        with no_exit():
            yield folder
    except Exception as error:
        if isinstance(error, OutOfMemoryError):
            error.args = (f"{error} ({LESS_MEMORY})",)
        log.critical("failed", exc_info=True)
        try:
            if stored.has_lock(folder, lock_id):  # else it may be another run's by now
                _failed(folder, world, error)
        except OSError as second:  # the first one is the cause
            log.warning("%s could not be written (%s)", folder / "outcome.json", second)
        raise
    finally:
        for lock in locks:
            lock.close()


@contextlib.contextmanager
def left_alone(args, world: World):
    """The run's folder, neither held nor written to: for who only looks at the run. Logging goes to the terminal."""
    console.setup_logging(None, world.rank, world.is_main)
    yield stored.run_of(args)


def _failed(folder, world, error):
    """The first rank that fails says why; those that fail because it is gone leave that as it is, in any order."""
    before, lost = stored.outcome(folder), lost_peer(error)
    known = before.get("state") == "failed" and before.get("launch") == world.launch
    if not known or (before.get("lost_peer") and not lost):
        text = f"{type(error).__name__}: {error}"
        text = text.strip().splitlines()[-1] if "\nOriginal Traceback" in text else text  # a loader process's
        reason = f"rank {world.rank}: {text}"
        write_outcome(folder, world, "failed", reason=reason, lost_peer=lost)


def lost_peer(error: Exception) -> bool:
    """Whether this is how a process fails when another one is gone. gloo's errors have no type of their own."""
    return isinstance(error, (DistError, ConnectionError, Hang)) or "gloo" in str(error)


def starts_anew(args, world: World) -> bool:
    """Whether -reset is still to be carried out: once for a launch, whatever restarts and requeues follow."""
    return args.reset and stored.outcome(stored.run_of(args)).get("launch") != world.launch


def _claim(folder, args, world):
    try:
        if not starts_anew(args, world):
            _check_files(folder)
        lock = _lock(folder, world.launch, max(LEAVING_S, args.grace_s + PATIENCE_S))
        _open(folder, lock, args, world)
    except OSError as error:
        free = f", {shared_disk.free_there(folder)}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UsageError(
            f"-out {folder.parent} -model {folder.name}: cannot be written ({error.strerror}{free})"
        ) from None
    return lock


def _check_files(folder):
    for path in (folder / name for name in ("STOP", "outcome.json", "metrics.jsonl", "config.yaml")):
        if path.is_dir():
            raise UsageError(f"-model {folder.name}: {path} must be a file and is a folder: move it away")


def _open(folder, lock, args, world):
    """What the owner of the lock does first: says who it is, and makes room for a new run."""
    free = shared_disk.free_files(folder)
    if free < NEEDED_FILES + world.size:
        raise UsageError(f"-out {folder.parent}: its disk has inodes for {free} more files, which is too few; remove "
                         f"files there, or take another disk")  # fmt: skip
    launcher = os.getppid() if world.size > 1 else None
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": distributed.job_id(), "launcher": launcher,
             "launch": world.launch}  # fmt: skip
    lock.truncate(0)
    lock.write(json.dumps(owner))
    lock.flush()
    if starts_anew(args, world):
        _move_aside(folder)
    write_outcome(folder, world, "running")


def _lock(folder, launch, leaving_s):
    """The lock of a run's folder, taken: an open file. An owner that may be ending is waited for up to so many
    seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a+")
    begun, said = time.monotonic(), False
    while not _take(lock):
        owner = _owner(lock)
        named = ", ".join(f"{name} {owner[name]}" for name in ("host", "pid", "job") if owner.get(name))
        used = f"{folder} is in use by {named or 'another process'}"
        why = _may_be_leaving(owner, launch)
        if time.monotonic() - begun > (leaving_s if why else PATIENCE_S):
            lock.close()
            raise UsageError(f"-model {folder.name}: {used}; take another name or wait")
        if why and not said:
            said = True
            log.warning("%s, and %s: waiting up to %.0f s until it is gone", used, why, leaving_s)
        time.sleep(0.05)
    return lock


def _take(lock) -> bool:
    """A record lock is the process's own: no child inherits it, and the kernel frees it after kill -9, once a write
    to disk that was under way is done: hence the patience."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning(
            "%s: this file system has no locks (%s): a second run here would not be noticed", lock.name, error
        )
    return True


def _owner(lock) -> dict:
    """What the owner of a lock says of itself; {} of one that has said nothing yet."""
    lock.seek(0)
    try:
        owner = json.loads(lock.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _may_be_leaving(owner: dict, launch: str) -> str:
    """Why the owner of a lock may be gone soon; "" for one of this machine that is well."""
    if owner.get("host", socket.gethostname()) != socket.gethostname():
        return "whether it runs cannot be seen from this machine"
    if owner.get("launch") == launch:
        return "it is an earlier start of this launch"
    parent = _parent(owner.get("pid"))
    if owner.get("launcher") and parent and parent != owner["launcher"]:
        return "its launcher is gone, so it is saving"
    return ""


def _parent(pid) -> int | None:
    """The parent of a process, None where that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _move_aside(folder):
    """All but the lock and what Slurm's jobs live from: a job that carries out -reset has its own files there."""
    entries = [entry for entry in folder.iterdir() if entry.name not in (".lock", "slurm")]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{folder.name}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    target = next(folder.parent / ".old" / name for name in names if not (folder.parent / ".old" / name).exists())
    if entries:
        target.mkdir(parents=True)
    for entry in entries:
        entry.rename(target / entry.name)


def write_config(folder: Path, world: World, text: str):
    """config.yaml: what was asked. Raises UsageError where it cannot be written."""
    try:
        distributed.main_does(lambda: atomic.write_file(folder / "config.yaml", text), world)
    except OSError as error:
        raise UsageError(
            f"-out {folder.parent}: {folder / 'config.yaml'} cannot be written ({error}, "
            f"{shared_disk.free_there(folder)})"
        ) from error


def write_outcome(folder: Path, world: World, state: str, **facts):
    """outcome.json: running, finished, stopped or failed, and why. Launchers and people decide from it."""
    facts = {
        "state": state,
        **facts,
        "launch": world.launch,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    path, text = folder / "outcome.json", json.dumps(facts, indent=2) + "\n"
    try:
        atomic.write_file(path, text)
    except OSError:  # a disk that is full has room for what takes the old one's place
        if not path.exists():
            raise
        with path.open("r+") as file:
            file.write(text)
            file.truncate()
