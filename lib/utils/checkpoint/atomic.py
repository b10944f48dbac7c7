"""Files and folders that are whole or absent, however the writing ends: temporary name, fsync, rename, fsync again.

What a name will show is on disk before the name is, and what it replaces is deleted only after: the order that holds
on every file system in Pillai and others, "All File Systems Are Not Created Equal" (OSDI 2014).
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)  # of folders, on some file systems


def write_file(path: Path, data: bytes | str) -> None:
    """Put data (text as UTF-8) into a file in one instant, on disk on return. Raises OSError: it is as before."""
    with new_version(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def new_version(path: Path) -> Iterator[Path]:
    """Give a new name in path's folder; the file or link there, synced in the end, takes path's place at once."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        publish(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # there still if anything failed


def fsync(path: Path) -> None:
    """Return when a file's content, or the names in a folder, are on disk; at once where there is no such call."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
    finally:
        os.close(number)


def publish(partial: Path, final: Path) -> None:
    """Give a finished file, or a folder of synced files, its name. Raises OSError if a folder has that name."""
    fsync(partial)
    partial.replace(final)
    fsync(final.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder: first its name, on disk, so that a half-removed one never looks whole; then what is in it."""
    partial = path.rename(path.with_name(f"{path.name}.partial"))
    fsync(path.parent)
    _remove(partial)


def sweep(folder: Path, start: str | tuple[str, ...] = "") -> None:
    """Remove what crashes left in a folder where nobody writes: START*.partial."""
    for entry in sorted(folder.glob("*")):
        if entry.name.startswith(start) and entry.name.endswith(".partial"):
            _remove(entry)


def _remove(path: Path) -> None:
    """Delete what it can of a folder, or whatever else is there; rmtree would open a pipe, and wait."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
