"""The start and the end of a process. Imports nothing heavy."""

import atexit
import contextlib
import gc
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable

STARTED = time.monotonic()


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
