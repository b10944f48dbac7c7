"""How long the start of a run takes, part by part. Imports nothing heavy: it measures that, too."""

import time

parts: dict[str, float] = {}  # seconds by name
_last = time.monotonic()  # when the last part ended


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
