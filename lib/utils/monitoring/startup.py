"""The start and the end of a process. Imports nothing heavy."""

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def run_program(main: Callable[[], int]) -> None:
    """Run `main`, and end this process with the exit code that it returns.

    The start runs without the garbage collector, which takes a fifth of the imports' time; `main` switches it on.
    At its end the process does not free torch's modules, which takes half a second.
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
