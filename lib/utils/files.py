"""Opening files that others may have put there: regular ones only; no link is followed, no pipe waited for."""

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNFIT = (errno.ELOOP, errno.ENXIO, errno.EMLINK, errno.EFBIG)  # errors of these functions
OF_DISK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)  # which say nothing about a file
PAUSES_S = (0.5, 1.5, 3.0)  # between attempts to read from a disk that fails
DEBRIS = {  # of systems, disk stations and archives, in lower case; names that begin with a dot are left out anyway
    *("__macosx", "__pycache__", "thumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
    *("lost+found", "@eadir", "@tmp", "#recycle", "@recycle", "#snapshot", "@synoresource", "@synoeastream"),
    *("recycler", "recycled", "found.000", "network trash folder", "temporary items", "icon\r", "@recently-snapshot"),
}


def open_regular(path: Path, mode: str, *, follow: bool = False, **options: Any) -> Any:
    """Open a regular file, in any mode of `open` but "w". A link in its place is followed only if `follow`.

    Raises OSError, also before writing to a file with a hard link: what that shows would change, too.
    """

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), 0o666)
        about = os.fstat(number)
        is_linked = about.st_nlink > 1 and mode not in ("r", "rb")
        if is_linked or not stat.S_ISREG(about.st_mode):
            os.close(number)
            raise OSError(errno.ENXIO, "it has a hard link" if is_linked else "not a regular file", name)
        return number

    return open(path, mode, opener=opener, **options)


def read_bytes(path: Path, *, most: int = 1 << 26, follow: bool = False) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path, "rb", follow=follow) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return data


def retry(read: Callable[[], Any]) -> Any:
    """Return what `read()` returns. Where the disk fails, call it again for some seconds. Raises what it raises."""
    for pause in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in OF_DISK:
                raise
            time.sleep(pause)
    return read()


def is_debris(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or made by a system that nobody asked to."""
    return name.startswith((".", "~$")) or name.lower() in DEBRIS


def split_of(name: str) -> str:
    """Return the split that a word of a name says, as training, Valid or dev; "" without one, or with several."""
    words = re.findall(r"(?<![a-z])(train|val|dev|test)(?:ing|id|idation)?(?![a-z])", name.lower())
    found = {"val" if word == "dev" else word for word in words}
    return found.pop() if len(found) == 1 else ""
