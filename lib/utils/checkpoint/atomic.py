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
    """Put data (text as UTF-8) into a file in one instant: it holds the old content or the new, whole.

    It is on disk when this returns. If this raises OSError, the file is as it was.
    """
    with new_version(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def new_version(path: Path) -> Iterator[Path]:
    """Give a new name in path's folder; the file there, synced when the block ends, takes path's place at once."""
    partial = _unique(path, "partial")
    try:
        yield partial
        fsync_file(partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # there still if anything failed
    fsync_folder(path.parent)


def _unique(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{ending}")


def fsync_file(path: Path) -> None:
    """Return when the content of a file is on disk; its name is only after `fsync_folder`."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def fsync_folder(path: Path) -> None:
    """Return when the names in a folder are on disk; at once where the file system has no such call."""
    try:
        fsync_file(path)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise


def publish(partial: Path, final: Path) -> None:
    """Give a finished folder its name; OSError if that is taken. Its writers have synced its files."""
    fsync_folder(partial)
    partial.rename(final)
    fsync_folder(final.parent)


def swap_link(link: Path, target_name: str) -> None:
    """Point a link at a target, which is on disk already, in one instant: a reader sees the old or the new."""
    if link.is_dir() and not link.is_symlink():  # of a copy that followed links, as scp -r does
        link.rename(_unique(link, "aside"))
    partial = _unique(link, "partial")
    partial.symlink_to(target_name)
    partial.replace(link)
    fsync_folder(link.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder: first its name, on disk, so that a half-removed one never looks whole; then what is in it.

    What cannot be deleted is left to `sweep`.
    """
    removed = _unique(path, "removed")
    path.rename(removed)
    fsync_folder(path.parent)
    shutil.rmtree(removed, ignore_errors=True)


def sweep(folder: Path, start: str | tuple[str, ...] = "") -> None:
    """Remove what crashes left in a folder where nobody writes: START*.partial and START*.removed."""
    for entry in sorted(folder.glob("*")):
        if entry.name.startswith(start) and entry.name.endswith((".partial", ".removed")):
            shutil.rmtree(entry, ignore_errors=True)
            with contextlib.suppress(OSError):
                entry.unlink()  # it was no folder
