"""Files and folders that are whole or absent, however the writing ends: temporary name, fsync, rename, fsync again.

What a name will show is on disk before the name is, and what it replaces is deleted only after: the order that holds
on every file system in Pillai and others, "All File Systems Are Not Created Equal" (OSDI 2014).
"""

import contextlib
import errno
import logging
import os
import secrets
import shutil
from pathlib import Path

log = logging.getLogger(__name__)
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)  # links, or the fsync of a folder


def write_file(path: Path, data: bytes | str):
    """Put data (text as UTF-8) into a file in one instant: it holds the old content or the new, whole.

    It is on disk when this returns. If this raises OSError, the file is as it was.
    """
    with replacing(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path):
    """Give a file to write bytes to; when the block ends it takes the path's place in one instant, and is on disk."""
    with staged(path) as partial, partial.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged(path: Path):
    """Give a new name in path's folder; what is there when the block ends, synced, takes path's place at once."""
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
    """Return when the content of a file is on disk; its name is only after `fsync_folder`."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def fsync_folder(path: Path):
    """Return when the names in a folder are on disk; at once where the file system has no such call."""
    try:
        fsync_file(path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def publish(partial: Path, final: Path):
    """Give a finished folder its name; OSError if that is taken. Its writers have synced its files."""
    fsync_folder(partial)
    partial.rename(final)
    fsync_folder(final.parent)


def swap_link(link: Path, target_name: str):
    """Point a link at a target, which is on disk already, in one instant: a reader sees the old or the new.

    Where there are no symbolic links, a file that holds the name stands for one; `read_link` reads both.
    A folder there, from a copy that followed links (cp -rL), is moved to NAME.*.aside.
    """
    if link.is_dir() and not link.is_symlink():
        link.rename(_unique(link, "aside"))
    try:
        with staged(link) as partial:
            partial.symlink_to(target_name)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        write_file(link, target_name)


def read_link(link: Path) -> str | None:
    """Return the target that `swap_link` wrote, or None where there is neither a link nor a file in its place."""
    if link.is_symlink():
        return str(link.readlink())
    return link.read_text(errors="replace").strip() if link.is_file() else None


def remove_folder(path: Path):
    """Remove a folder: first its name, on disk, so that a half-removed one never looks whole; then what is in it.

    What cannot be deleted is left to `sweep`, with a warning.
    """
    removed = _unique(path, "removed")
    path.rename(removed)
    fsync_folder(path.parent)
    _delete(removed)


def sweep(folder: Path, start: str | tuple = ""):
    """Remove what crashes left in a folder: all that is called START*.partial or START*.removed, and nothing else.

    For its owner, while nobody writes there.
    """
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(start) and entry.name.endswith((".partial", ".removed")):
            _delete(entry)


def _delete(path):
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s could not be removed (%s): the next start tries again", path, error)
