"""Files and folders that are whole or absent, however the writing ends: temporary name, fsync, rename, fsync again.

What a name will show is on disk before the name is, and what it replaces is deleted only after: the order that holds
on every file system in Pillai and others, "All File Systems Are Not Created Equal" (OSDI 2014).
"""

import contextlib
import errno
import logging
import math
import os
import secrets
import shutil
from pathlib import Path

log = logging.getLogger(__name__)
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)  # links, or the fsync of a folder


def write_file(path: Path, data: bytes | str):
    """Puts data, text as UTF-8, into a file in one instant: at any time it holds the old content or the new, whole.

    On disk when this returns. Raises OSError, the file then being as it was.
    """
    with replacing(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path):
    """A file to write bytes to; when the block ends it takes the path's place in one instant, and is on disk. Raises
    OSError."""
    with staged(path) as partial, partial.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged(path: Path):
    """A new name beside path; what is there when the block ends, already on disk, takes path's place at once."""
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

    Where there are no symbolic links, a file that holds the name stands for one; `read_link` reads both. Raises
    OSError.
    """
    try:
        with staged(link) as partial:
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
