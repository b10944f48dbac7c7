"""The file-system calls of a process below one folder: they are numbered and recorded, and one of them fails."""

import _pyio
import builtins
import io
import os
import pathlib
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

WATCHED = tuple("open close write pwrite fsync rename symlink mkdir rmdir unlink".split())
TWINS = {"replace": "rename", "remove": "unlink", "fdatasync": "fsync"}
REAL = {name: getattr(os, name) for name in WATCHED}
REAL_OPEN = io.open


@dataclass
class Failure:
    """The call at which a failure happens, and its kind."""

    number: int = -1
    half: bool = False  # half of a write is done
    code: int = 0  # the errno; 0 kills the process


class Calls:
    """What the module says, of this process. Its methods replace the functions of os with the same names."""

    def __init__(self, folder, failure):
        self.folder, self.failure, self.failed = Path(folder).resolve(), failure, False
        self.trace, self.lock = [], threading.RLock()
        self.files = {}  # descriptor -> (number of the open, path)

    def install(self):
        for name in (*WATCHED, *TWINS):
            setattr(os, name, getattr(self, TWINS.get(name, name)))
        io.open = builtins.open = _pyio.open  # its files call the functions of os, where those of io are in C
        bound = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10's pathlib keeps the functions of os
        for name in [name for name in (*WATCHED, *TWINS) if hasattr(bound, name)]:
            setattr(bound, name, staticmethod(_pyio.open if name == "open" else getattr(os, name)))

    def call(self, entry, act, half=None):
        with self.lock:
            if not self.failed and len(self.trace) == self.failure.number:
                if half and self.failure.half:
                    half()
                if not self.failure.code:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.failed = True
                raise OSError(self.failure.code, os.strerror(self.failure.code), entry[1])
            result = act()
            self.trace.append(entry)
            return result

    def named(self, kind, where, act, *facts):
        return act() if where is None else self.call((kind, where, *facts), act)

    def where(self, path, dir_fd=None, follow=False):
        """The path relative to the folder; None outside."""
        path = Path(os.fsdecode(path))
        if dir_fd is not None:
            if dir_fd not in self.files:
                return None
            path = self.folder / self.files[dir_fd][1] / path
        path = path.resolve() if follow else path.parent.resolve() / path.name
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else None

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        where = self.where(path, dir_fd, follow=True)
        if where is None:
            return REAL["open"](path, flags, mode, dir_fd=dir_fd)
        with self.lock:
            kind = "open" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "read"
            handle = len(self.trace)
            number = self.call((kind, where, handle, flags), lambda: REAL["open"](path, flags, mode, dir_fd=dir_fd))
            self.files[number] = (handle, where, flags)
            return number

    def close(self, fd):
        self.files.pop(fd, None)
        REAL["close"](fd)

    def write(self, fd, data):
        return self.put(fd, data) if fd in self.files else REAL["write"](fd, data)

    def pwrite(self, fd, data, offset):
        return self.put(fd, data, offset) if fd in self.files else REAL["pwrite"](fd, data, offset)

    def put(self, fd, data, offset=None):
        data = bytes(data)
        handle, where, flags = self.files[fd]
        at = os.lseek(fd, 0, os.SEEK_END if flags & os.O_APPEND else os.SEEK_CUR) if offset is None else offset

        def act(count):
            done = 0
            while done < count:
                done += REAL["pwrite"](fd, data[done:count], at + done)
            if offset is None:
                os.lseek(fd, at + count, os.SEEK_SET)
            return count

        return self.call(("write", where, handle, at, data), lambda: act(len(data)), half=lambda: act(len(data) // 2))

    def fsync(self, fd):
        number = fd if isinstance(fd, int) else fd.fileno()
        if number not in self.files:
            return REAL["fsync"](fd)
        handle, where, _ = self.files[number]
        return self.call(("fsync", where, handle), lambda: None)

    def rename(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        def act():
            REAL["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        self.named("rename", self.where(src, src_dir_fd), act, self.where(dst, dst_dir_fd))

    def symlink(self, src, dst, target_is_directory=False, *, dir_fd=None):
        where = self.where(dst, dir_fd)
        self.named("symlink", where, lambda: REAL["symlink"](src, dst, dir_fd=dir_fd), os.fsdecode(src))

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        self.named("mkdir", self.where(path, dir_fd), lambda: REAL["mkdir"](path, mode, dir_fd=dir_fd))

    def rmdir(self, path, *, dir_fd=None):
        self.named("rmdir", self.where(path, dir_fd), lambda: REAL["rmdir"](path, dir_fd=dir_fd))

    def unlink(self, path, *, dir_fd=None):
        self.named("unlink", self.where(path, dir_fd), lambda: REAL["unlink"](path, dir_fd=dir_fd))
