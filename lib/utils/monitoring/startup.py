"""The start and the end of a process. Imports nothing heavy."""

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STARTED = time.monotonic()


def run_program(main: Callable[[], int]) -> None:
    """Run `main`, and end this process with the exit code that it returns.

    The start runs without Python's garbage collector, which takes a fifth of the imports' time and finds nothing
    there. Once other threads have ended and the functions of `atexit` have run, the process ends at once: Python
    would spend half a second on freeing torch's modules, object by object.
    """
    gc.disable()
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by 2>&-: another file would get its number
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115
    code = main()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone, or a plugin has closed them
        for stream in (sys.stdout, sys.stderr):
            print(end="", file=stream, flush=True)
    os._exit(code)


@contextlib.contextmanager
def enable_garbage_collector() -> Iterator[None]:
    """Switch the garbage collector on; in the block it skips all objects that exist.

    It then takes microseconds, and forked processes share more memory.
    """
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
