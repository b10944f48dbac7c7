"""Signals that stop a run before and after the training, which handles them itself."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from lib.utils.errors import STOPPED, STOPPING

OUTSIDE = "{} before or after the training: stopped at once, and what is saved is whole"


def leaving() -> contextlib.AbstractContextManager:
    """End this process at once if a signal stops the run while the block lasts, with the exit code of a stop.

    There is nothing to save before and after the training.
    """
    own = os.getpid()

    def leave(number: int, frame: object) -> None:
        if os.getpid() == own:  # and not one that a plugin forked, as multiprocessing.Pool does
            with contextlib.suppress(OSError):
                os.write(2, f"train.py: {OUTSIDE.format(signal.Signals(number).name)}\n".encode())
        os._exit(STOPPED)  # an exception might be lost in an import

    return handled_by(leave)


@contextlib.contextmanager
def handled_by(handler: Callable) -> Iterator[None]:
    """Set the handler of the signals that stop a run while the block lasts."""
    before = set_handlers(handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_handlers(handler: Callable | signal.Handlers) -> dict:
    """Set the handler of the signals that stop a run, except for what nohup ignores. Returns the handlers before."""
    heard = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}
