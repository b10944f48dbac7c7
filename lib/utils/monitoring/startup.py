"""The start and the end of a process, and how long the start takes, part by part. Imports nothing heavy."""

import atexit
import contextlib
import gc
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable

parts: dict[str, float] = {}  # seconds by name
_last = time.monotonic()  # when the last part ended


def program(main: Callable[[], int]):
    """Run `main`, and end this process with the exit code that it returns.

    The start runs without Python's garbage collector, which takes a fifth of the imports' time and finds nothing
    there. The process ends at once when all functions of `atexit` were called: Python would take torch's modules
    apart, object by object, for half a second.
    """
    gc.disable()
    codes = []
    atexit.register(_exit, codes)  # what is registered first is called last
    codes.append(main())
    sys.exit(codes[0])


def _exit(codes):
    if codes:
        # What modules registered when they were imported.
        multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            print(end="", file=stream, flush=True)
        os._exit(codes[0])


@contextlib.contextmanager
def over():
    """Switch the garbage collector on; in the block it skips all objects that exist.

    It then takes microseconds, and forked processes share more memory.
    """
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


def begin():
    """Forget the parts of an earlier run in this process."""
    if parts:
        report("earlier")
        parts.clear()


def report(part: str):
    """Note that a part has ended."""
    global _last
    parts[part], _last = time.monotonic() - _last, time.monotonic()


def summary() -> str:
    """Return all parts in one line: "3.2 s: imports 2.1, data 0.1, ..."."""
    return f"{sum(parts.values()):.1f} s: {', '.join(f'{name} {s:.1f}' for name, s in parts.items())}"
