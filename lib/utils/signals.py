"""Handlers of the signals that stop a run, before and after the training; preemption.py has those of the training."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from lib.utils.errors import STOP_SIGNALS, STOPPED, UsageError

OUTSIDE = "{} before or after the training: stopped at once, as there was nothing to save"


def exit_on_signal() -> contextlib.AbstractContextManager:
    """End this process at once if a signal stops the run while the block lasts, with the exit code of a stop."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("train.main runs in the main thread alone, which gets the signals that stop a run")
    own = os.getpid()

    def leave(number: int, frame: object) -> None:
        if os.getpid() == own:  # and not one that a plugin forked, as multiprocessing.Pool does
            with contextlib.suppress(OSError):
                os.write(2, f"train.py: {OUTSIDE.format(signal.Signals(number).name)}\n".encode())
        os._exit(STOPPED)  # an exception might be lost in an import

    return use_handler(leave)


@contextlib.contextmanager
def use_handler(handler: Callable, *, hangup: bool = False) -> Iterator[None]:
    """Set the handler of the signals that stop a run while the block lasts, as `set_handlers` does."""
    before = set_handlers(handler, hangup=hangup)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def set_handlers(handler: Callable | signal.Handlers, *, hangup: bool = False) -> dict:
    """Set the handler of the signals that stop a run. Returns the handlers before.

    SIGHUP, a lost terminal, stops only a run that writes there, without nohup; with `hangup` any, as under torchrun.
    """
    handlers = dict.fromkeys(STOP_SIGNALS, handler)
    at_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    if not hangup and (not at_terminal or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN):
        handlers[signal.SIGHUP] = signal.SIG_IGN
    return {number: signal.signal(number, one) for number, one in handlers.items()}
