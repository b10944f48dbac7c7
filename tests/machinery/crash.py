"""All ways to cut a save short: a kill or an error at each file-system call, or a loss of power at any moment.

`save` is any function that writes below one folder, also in threads, if it starts them itself. It runs in a forked
child (before, import what it needs and set torch to one thread) where os and open() are watched. Each time the folder
is first put back to what it was; while the loop's body runs it holds what is left:

    for cut in crash.kills(save, folder):              # before each call, and with half of each write done
    for cut in crash.failures(save, folder):           # each call, with ERRORS in turn; of a write, half is done
    for cut in crash.power_loss_states(save, folder):  # see disk.py
        assert newest(folder) == (new if cut.finished else one_of_both), cut.what

`points` lists the calls; `kill_at` does one, starting from the folder as it is. fsync is counted and not
carried out. Writes of other C code are not seen, which raises.
"""

import errno
import itertools
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import calls
from calls import Failure
from disk import Disk, read_tree, write_tree

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
LIMIT = 60  # seconds for one save


@dataclass
class Cut:
    """How a save was cut short."""

    what: str
    finished: bool = False  # save returned: the new state must be there
    error: str = ""  # the traceback of the error that it raised
    trace: list = field(default_factory=list, repr=False)


def points(save: Callable, folder: Path) -> list[str]:
    """The file-system calls of a save, one line each."""
    return [f"{kind} {path}" for kind, path, *_ in _clean(save, folder).trace]


def kills(save: Callable, folder: Path) -> Iterator[Cut]:
    """The save is killed before each call, and in the middle of each write."""
    tree = read_tree(folder)
    for number, line in enumerate(points(save, folder)):
        for half in (False, True) if line.startswith("write") else (False,):
            write_tree(tree, folder)
            cut = kill_at(save, folder, number, half)
            cut.what += f": {line}"
            yield cut
    write_tree(tree, folder)


def failures(save: Callable, folder: Path) -> Iterator[Cut]:
    """Each call of the save fails once: the next one with the next error."""
    tree = read_tree(folder)
    for (number, line), code in zip(enumerate(points(save, folder)), itertools.cycle(ERRORS)):
        write_tree(tree, folder)
        cut = _run(save, folder, Failure(number, half=True, code=code))
        cut.what = f"{errno.errorcode[code]} at call {number}: {line}"
        yield cut
    write_tree(tree, folder)


def power_loss_states(save: Callable, folder: Path) -> Iterator[Cut]:
    """Each state, once, in which a loss of power during or right after the save may leave the folder."""
    tree, seen = read_tree(folder), set()
    trace = _clean(save, folder).trace
    disk = Disk(tree)
    for number in range(len(trace) + 1):
        for state in disk.states():
            key = (number == len(trace), frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                write_tree(state, folder)
                before = "returning" if key[0] else f"call {number}: {trace[number][0]} {trace[number][1]}"
                yield Cut(f"power lost before {before}", finished=key[0])
        if number < len(trace):
            disk.apply(trace[number])
    write_tree(tree, folder)


def kill_at(save: Callable, folder: Path, number: int, half: bool = False) -> Cut:
    """Kill the save before its call of this number, or in the middle of it if it is a write."""
    cut = _run(save, folder, Failure(number, half))
    cut.what = f"killed {'in' if half else 'before'} call {number}"
    return cut


def _clean(save, folder):
    """Run the save without a cut, check that its trace explains all its changes, and restore the folder."""
    tree = read_tree(folder)
    cut = _run(save, folder, Failure())
    after = read_tree(folder)
    write_tree(tree, folder)
    assert cut.finished, f"the save fails by itself:\n{cut.error}"
    disk = Disk(tree)
    for entry in cut.trace:
        disk.apply(entry)
    unseen = {name for name, _ in disk.now().items() ^ after.items()}
    assert not unseen, f"written by calls that are not watched: {sorted(unseen)}"
    return cut


def _run(save, folder, failure):
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        watch, error = calls.Calls(folder, failure), ""
        try:
            watch.install()
            save()
        except BaseException:
            error = traceback.format_exc()
        with calls.REAL_OPEN(sink, "wb") as file:
            file.write(pickle.dumps((error, watch.trace)))
        os._exit(0)
    os.close(sink)
    data = b""
    while select.select([source], [], [], LIMIT)[0] and (block := os.read(source, 1 << 20)):
        data += block
    hung = select.select([source], [], [], 0)[0] == []
    os.close(source)
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert not hung, f"{failure}: the save hangs"
    assert data or os.WTERMSIG(status) == signal.SIGKILL, f"{failure}: the child ended with status {status}"
    error, trace = pickle.loads(data) if data else ("killed", [])
    return Cut("uncut", not error, error, trace)
