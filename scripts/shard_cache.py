"""Copies the shards of a URL to this node's disk while a run reads: -cache_gb of -dataset tar starts it.

One process of a node copies, one shard after the other, until -cache_gb is full; all read a shard from the disk as
soon as it is there, and the others from the URL. It ends with the run. Other processes of the node wait for the
lock, and go on where this one is killed.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError

started: dict[str, subprocess.Popen] = {}  # by their tasks: the pipe closes when the last process of the run is gone
copies: dict[str, Path] = {}  # of shards, by their URLs: there, or on the way


def start(root: Path, limit_gb: float, splits: dict[str, tuple[str, list[str]]]) -> None:
    """Let the shards of (index file, shards) of each split be copied.

    The copies of an index have a folder of its name, so that shards which changed, and have another, get new ones.
    """
    wanted = {
        shard: str(root / Path(index).stem / f"{number:06d}.tar")
        for index, shards in splits.values()
        for number, shard in enumerate(shards)
    }
    copies.update({shard: Path(file) for shard, file in wanted.items()})
    task = json.dumps({"root": str(root), "limit_gb": limit_gb, "copies": wanted})
    if task not in started:
        options = {"stdin": subprocess.PIPE, "text": True, "start_new_session": True}  # Ctrl-C is for the run
        process = started[task] = subprocess.Popen([sys.executable, __file__], **options)
        assert process.stdin
        process.stdin.write(f"{task}\n")
        process.stdin.flush()


def read(shard: str, offset: int, size: int) -> bytes:
    """Return the bytes at a place of a shard's copy, b"" if they are not there."""
    try:
        with open(copies[shard], "rb", buffering=0) as file:  # noqa: PTH123
            data = os.pread(file.fileno(), size, offset)
            return data if len(data) == size else b""
    except (KeyError, FileNotFoundError):
        return b""


def main() -> int:
    if not (line := sys.stdin.readline()):  # the run is gone already
        return 0
    task = json.loads(line)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    try:
        copy_all(Path(task["root"]), int(task["limit_gb"] * 1e9), task["copies"])
    except (UsageError, OSError) as error:
        print(f"shard_cache.py: {error}: what is not copied is read from the URL", file=sys.stderr)
    return 0


def end_with_stdin() -> None:
    """End this process when all processes of the run are gone."""
    sys.stdin.read()
    os._exit(0)


def copy_all(root: Path, limit: int, wanted: dict[str, str]) -> None:
    """Copy shards to files until `limit` bytes are in `root`, once no other process does so.

    Raises UsageError or OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("a") as lock:
        is_first = True  # and says what is left out
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_first = False
            fcntl.flock(lock, fcntl.LOCK_EX)
        from scripts.remote import Storage  # which is large, for those that only wait

        used = sum(file.stat().st_size for file in root.glob("*/*.tar"))
        for folder in {Path(file).parent for file in wanted.values()}:
            folder.mkdir(exist_ok=True)
            atomic.sweep(folder)  # of killed ones
        for shard, file in wanted.items():
            if Path(file).exists():
                continue
            store = Storage(shard)
            size = store.version(shard)[0]
            if used + size > limit:
                if is_first:
                    text = f"-cache_gb is full: {shard} and others are read from the URL"
                    print(f"shard_cache.py: {text}", file=sys.stderr)
                return
            with atomic.new_version(Path(file)) as partial:
                store.copy(shard, partial, size)
            used += size


if __name__ == "__main__":
    sys.exit(main())
