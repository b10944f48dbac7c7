"""The start of a run: how long it takes, part by part, and without the garbage collector. Imports nothing heavy."""

import contextlib
import gc
import time

parts: dict[str, float] = {}  # seconds by name
_last = time.monotonic()  # when the last part ended


def begin():
    """Forget the parts of an earlier run in this process; switch Python's garbage collector off.

    It finds nothing in what modules define, and takes a fifth of the imports' time.
    """
    gc.disable()
    if parts:
        report("earlier")
        parts.clear()


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


def report(part: str):
    """Note that a part has ended."""
    global _last
    parts[part], _last = time.monotonic() - _last, time.monotonic()


def summary() -> str:
    """Return all parts in one line: "3.2 s: imports 2.1, data 0.1, ..."."""
    return f"{sum(parts.values()):.1f} s: {', '.join(f'{name} {s:.1f}' for name, s in parts.items())}"
