"""How long the start of a run takes, part by part."""

import time

parts: list[tuple[str, float]] = []  # name and seconds of each, in their order
_last = time.monotonic()  # when the last part ended


def begin():
    """Forget the parts of a run that this process made before; the first one begins with the import of this file."""
    global _last
    if parts:
        parts.clear()
        _last = time.monotonic()


def report(part: str):
    """Note that a part has ended: the time since the end of the one before is its own."""
    global _last
    now = time.monotonic()
    parts.append((part, now - _last))
    _last = now


def summary() -> str:
    """All parts in one line: "3.2 s: imports 2.1, data 0.1, ..."."""
    return f"{sum(seconds for _, seconds in parts):.1f} s: {', '.join(f'{name} {s:.1f}' for name, s in parts)}"
