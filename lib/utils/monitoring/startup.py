"""The start and the end of a process, and how long the start takes, part by part. Imports nothing heavy."""

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

parts: dict[str, float] = {}  # seconds by name
_last = time.monotonic()  # when the last part ended


def program(main: Callable[[], int]) -> None:
    """Run `main`, and end this process with the exit code that it returns.

    The start runs without Python's garbage collector, which takes a fifth of the imports' time and finds nothing
    there. Once other threads have ended and the functions of `atexit` have run, the process ends at once: Python
    would take torch's modules apart, object by object, for half a second.
    """
    gc.disable()
    code = main()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the terminal may be gone
        for stream in (sys.stdout, sys.stderr):
            print(end="", file=stream, flush=True)
    os._exit(code)


@contextlib.contextmanager
def garbage_collector() -> Iterator[None]:
    """Switch the garbage collector on; in the block it skips all objects that exist.

    It then takes microseconds, and forked processes share more memory.
    """
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


def report(part: str) -> None:
    """Note that a part has ended."""
    global _last
    parts[part], _last = time.monotonic() - _last, time.monotonic()


def summary() -> str:
    """Return all parts in one line: "3.2 s: imports 2.1, data 0.1, ..."."""
    return f"{sum(parts.values()):.1f} s: {', '.join(f'{name} {s:.1f}' for name, s in parts.items())}"
