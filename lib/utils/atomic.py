"""Files and folders that are whole or absent, however the writing ends: temporary name, fsync, rename, fsync again.

What a name will show is on disk before the name is, and what it replaces is deleted only after: the order that holds
on every file system in Pillai and others, "All File Systems Are Not Created Equal" (OSDI 2014).
"""

import contextlib
import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)  # links, or the fsync of a folder
STALE = 3600  # seconds since a writer that is alive has written
STRATEGIES = ("sync_any", "sync_all", "async", "mono", "offline")  # offline: another name that mono has had
ROOM = 4096  # bytes of a message between ranks
PATIENCE = 60  # seconds until a new folder has to be seen by every rank


def write_file(path: Path, data: bytes | str):
    """Puts data, text as UTF-8, into a file in one instant: at any time it holds the old content or the new, whole.

    On disk when this returns. Raises OSError, the file then being as it was.
    """
    with _replacing(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def _replacing(path):
    with _staged(path) as partial, partial.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _staged(path):
    """A new name beside path; what is there when the block ends takes path's place."""
    partial = _unique(path, "partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # there still if anything failed
    fsync_folder(path.parent)


def _unique(path, ending):
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{ending}")


def fsync_file(path: Path):
    """Returns when the content of a file is on disk. Its name is the folder's matter."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def fsync_folder(path: Path):
    """Returns when the names in a folder are on disk; at once where the file system has no such call."""
    try:
        fsync_file(path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def publish(partial: Path, final: Path):
    """Gives a finished folder its name, in the same folder. Its files must be on disk: each writer fsyncs its own.

    Raises OSError, also if there is something at `final`.
    """
    fsync_folder(partial)
    partial.rename(final)
    fsync_folder(final.parent)


def swap_link(link: Path, target_name: str):
    """Points a link at a target in one instant: a reader sees the old or the new. The target must be on disk already.

    A real folder in the link's place, left by a copy that followed links, is moved to NAME.*.aside. Where there are
    no symbolic links, a file that holds the name stands for one; `read_link` reads both. Raises OSError.
    """
    if link.is_dir() and not link.is_symlink():
        aside = _unique(link, "aside")
        log.warning("%s is a folder where a link should be: moved to %s", link, aside.name)
        link.rename(aside)
    try:
        with _staged(link) as partial:
            partial.symlink_to(target_name)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        write_file(link, target_name)


def read_link(link: Path) -> str | None:
    """The target that `swap_link` wrote, or None where there is neither a link nor a file in its place."""
    if link.is_symlink():
        return str(link.readlink())
    return link.read_text(errors="replace").strip() if link.is_file() else None


def remove_folder(path: Path):
    """Removes a folder: first, on disk, its name, so that a half-removed one never looks whole; then what is in it.

    Raises OSError if it cannot be renamed. What cannot be deleted after that is left to `sweep`, with a warning.
    """
    removed = _unique(path, "removed")
    path.rename(removed)
    fsync_folder(path.parent)
    _delete(removed)


def sweep(folder: Path, start: str | tuple = "", before: float = math.inf):
    """Removes what crashes left in a folder: all that is called START*.partial or START*.removed, and nothing else.

    For its owner, while nobody writes there; or only what was last changed `before` a time (seconds, as st_mtime).
    """
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(start) and entry.name.endswith((".partial", ".removed")):
            _delete(entry, before)


def _delete(path, before=math.inf):
    try:
        if path.lstat().st_mtime >= before:
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s could not be removed (%s): the next start tries again", path, error)


def atomic_torch_save(obj, f: str | Path):
    """torch.save, but f is in one instant the new file, whole and on disk: cycling_utils' function of this name.

    Removes what saves of f that were killed more than an hour ago left beside it. Raises OSError.
    """
    path = Path(f)
    with _replacing(path) as file:
        torch.save(obj, file)
    sweep(path.parent, f"{path.name}.", before=path.stat().st_mtime - STALE)  # all by the file server's clock


class AtomicDirectory:
    """Checkpoint folders NAME_checkpoint_0, _1, ... and a link NAME.latest_checkpoint to the newest complete one.

    The interface of cycling_utils (https://github.com/StrongResearch/cycling_utils), on any device, and without a
    process group if there is one process. Every rank makes one, with the same strategy; one passes is_master=True.
    "sync_any", "sync_all": all ranks share a folder; it is kept for good (suffix _force) if any, or all, force it.
    "async": each rank has its own NAME_rank_R_checkpoint_0, ... and link, and waits for nobody.
    "mono": one process, which talks to no other even if there is a group.

    keep_last: how many complete folders to keep, besides those kept for good; -1: all. The newest is always kept.
    The link's target is an absolute path, for os.readlink from any working directory. In a tree that was moved or
    copied, with links, without, or with folders in their place, making an AtomicDirectory mends the link.
    An OSError of one rank is raised on all. Raises ValueError if strategies, name or masters do not fit.
    """

    def __init__(self, output_directory, is_master=False, name="AtomicDirectory", keep_last=-1, strategy="sync_any"):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r}: one of {', '.join(STRATEGIES)} is needed")
        if Path(name).name != name:
            raise ValueError(f"name {name!r}: a plain file name is needed")
        grouped = dist.is_available() and dist.is_initialized() and strategy not in ("mono", "offline")
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._compare(strategy, is_master)
        if strategy == "async":
            name, self.size = f"{name}_rank_{self.rank}", 1
        self.output_directory = Path(output_directory).absolute()
        self.name, self.keep_last, self.strategy = name, keep_last, strategy
        self.is_master = is_master or self.size == 1
        self.symlink_name = f"{name}.latest_checkpoint"
        self._link = self.output_directory / self.symlink_name
        self._writing = self.output_directory / f"{self.symlink_name}.partial"  # names a folder that is incomplete
        self._together(self._mend)

    def prepare_checkpoint_directory(self, force_save: bool = False) -> str:
        """The absolute path of a new, empty folder, one for all ranks that share it. Removes unfinished ones."""
        forces = self._together(lambda: bool(force_save))
        forced = all(forces) if self.strategy == "sync_all" else any(forces)
        names = self._together(lambda: self._make(forced) if self.is_master else None)
        path = self.output_directory / next(name for name in names if name)
        self._together(lambda: _await(path))
        return str(path)

    def symlink_latest(self, checkpoint_directory: str | Path):
        """Makes a folder the latest once all ranks have come here: all in it on disk, link swapped, old ones removed.

        Raises OSError; the link is then still the old one, unless it was the removal that failed.
        """
        path = self.output_directory / Path(checkpoint_directory).name
        self._together(lambda: None)  # all have finished writing
        self._together(lambda: self._settle(path, checkpoint_directory))
        self._together(lambda: self._finish(path) if self.is_master else None)

    def _compare(self, strategy, is_master):
        answers = self._gather([strategy, bool(is_master)])
        if len({answer[0] for answer in answers}) > 1:
            raise ValueError(f"strategies differ, by rank: {', '.join(answer[0] for answer in answers)}")
        masters = sum(answer[1] for answer in answers)
        if self.size > 1 and strategy != "async" and masters != 1:
            raise ValueError(f"is_master=True on {masters} of {self.size} ranks: exactly one is needed")

    def _mend(self):
        self.output_directory.mkdir(parents=True, exist_ok=True)
        latest = self._latest() if self.is_master else None
        if latest and not (self._link.is_symlink() and read_link(self._link) == str(latest)):
            swap_link(self._link, str(latest))

    def _make(self, forced):
        latest, folders = self._latest(), self._folders()
        for path, number in folders.items():
            unlinked = number > folders.get(latest, -1) and not path.name.endswith("_force")
            if path != latest and (unlinked or path == self._unfinished()):
                remove_folder(path)
        sweep(self.output_directory, (f"{self.name}_checkpoint_", f"{self.symlink_name}."))
        number = 1 + max(self._folders().values(), default=-1)
        path = self.output_directory / f"{self.name}_checkpoint_{number}{'_force' if forced else ''}"
        write_file(self._writing, path.name)
        path.mkdir()
        return path.name

    def _settle(self, path, given):
        if path not in self._folders() or not path.samefile(given):
            raise FileNotFoundError(f"{given}: is no checkpoint folder of {self.output_directory}")
        for entry in (*path.rglob("*"), path):  # by every rank: on a network disk the writer's host must
            if not entry.is_symlink():
                (fsync_folder if entry.is_dir() else fsync_file)(entry)

    def _finish(self, path):
        fsync_folder(self.output_directory)
        swap_link(self._link, str(path))
        self._writing.unlink(missing_ok=True)
        folders = self._folders()
        for folder, number in folders.items() if self.keep_last > 0 else ():
            if number <= folders[path] - self.keep_last and not folder.name.endswith("_force"):
                remove_folder(folder)

    def _latest(self):
        """The newest complete folder: the link's target, or where that is lost, the last that nobody was writing."""
        path = self.output_directory / Path(read_link(self._link) or "lost").name
        folders = self._folders()
        return path if path in folders else next((f for f in reversed(folders) if f != self._unfinished()), None)

    def _unfinished(self):
        return self.output_directory / (read_link(self._writing) or "none")

    def _folders(self):  # and their numbers, ascending
        match = re.compile(re.escape(self.name) + r"_checkpoint_(\d+)(_force)?").fullmatch
        entries = [entry for entry in self.output_directory.iterdir() if match(entry.name) and entry.is_dir()]
        return dict(sorted(((entry, int(match(entry.name)[1])) for entry in entries), key=lambda item: item[1]))

    def _together(self, action):
        """What action() returns, by rank. An OSError of one rank is raised on all, so that none waits in vain."""
        value, failure = None, None
        try:
            value = action()
        except OSError as error:
            failure = error
        answers = self._gather([value, failure and f"rank {self.rank}: {failure}"[: ROOM // 8]])
        if told := [text for _, text in answers if text]:
            raise failure or OSError(told[0])
        return [value for value, _ in answers]

    def _gather(self, value):  # a short JSON
        if self.size == 1:
            return [value]
        device = "cpu" if "cpu:" in dist.get_backend_config() else torch.accelerator.current_accelerator()
        row = torch.tensor(list(json.dumps(value).encode().ljust(ROOM)), dtype=torch.uint8, device=device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return [json.loads(bytes(row.tolist())) for row in rows]


def _await(folder):
    end = time.monotonic() + PATIENCE  # a network disk may show a host the folder of another a little later
    while not folder.is_dir() and time.monotonic() < end:
        time.sleep(0.05)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: not seen for {PATIENCE} s; is it on a disk that all ranks share?")
