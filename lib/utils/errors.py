"""How a run ends: signals, exit codes, and the exception for what the user can correct."""

import atexit
import contextlib
import difflib
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

FINISHED, FAILED, USAGE, STOPPED, ABORTED = 0, 1, 2, 75, 130  # 75 is EX_TEMPFAIL: try again, the run resumes
EXIT_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
PARENT = os.getppid()  # read before torch is imported: it may be gone a second later
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class UsageError(Exception):
    """A run cannot start with these arguments. The message is one line: flag, value, and what would be right."""


def run_program(main: Callable[[], int]) -> None:
    """Run `main`, and end this process with the exit code that it returns.

    The start runs without the garbage collector, which takes a fifth of the imports' time; `main` switches it on.
    At its end the process does not free torch's modules, which takes half a second.
    """
    gc.disable()
    sys.excepthook = lambda *error: sys.stderr.write(printable("".join(traceback.format_exception(*error))))
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
def no_exit() -> Iterator[None]:
    """Turn sys.exit in the block into a RuntimeError: exit code 0 would mean that the run is finished."""
    try:
        yield
    except SystemExit as error:
        hint = "-stop_after N ends a run; a trainer stops it, to go on later, by self.stop.request_stop(WHY)"
        raise RuntimeError(f"sys.exit({error.code!r}) was called, and the run is not finished; {hint}") from error


def load_optional(module: str, flag: str) -> ModuleType:
    """Import a plugin, or a part that a project may have deleted. Raises UsageError, with its flag, if it cannot."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "deleted here, or not installed (is .venv active?)"
        raise UsageError(f"{flag}: {module} cannot be imported: {error}: {hint}") from None


def call_optional(module: str, function: str, *arguments: object) -> None:
    """Call a function of a module that a project may have left out; do nothing without it."""
    if importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module):
        getattr(importlib.import_module(module), function)(*arguments)


def suggest(name: str, there: Iterable[str]) -> str:
    """Return a question with the names that a misspelt one may mean, "" if none is near."""
    text = name.lstrip("-")
    starts = [other for other in there if text and other.lstrip("-").startswith(text)]
    names = dict.fromkeys(sorted(starts, key=len) or difflib.get_close_matches(name, there, n=3))
    return f" (do you mean {' or '.join(names)}?)" if names else ""


def printable(text: str) -> str:
    """Return a text with what no terminal should get, and what UTF-8 cannot encode, written as escapes."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
