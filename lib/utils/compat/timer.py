"""cycling_utils' timer: where the time of a script goes, from one point to the next."""

import os
import time


class TimestampedTimer:
    """Print how long each part of a script takes, on rank 0.

        timer = TimestampedTimer()
        model = build()
        timer.report("the model")    # [ 2026-01-31 12:00:02 ] the model    2,000.000 ms, 2.00 s total

    `start_time` is when the last report ended (as time.time() gives it), `running` the seconds of all reports.
    """

    def __init__(self, report: str | None = None, start_time: float | None = None, running: float = 0.0):
        self.start_time = time.time() if start_time is None else start_time
        self.running = running
        self._print(report or "Start", 0.0)

    def report(self, annot: str, ret: bool = False) -> float | None:
        """Print the time since the last report, or the start, as that of `annot`. With `ret`, return the seconds."""
        now = time.time()
        seconds = now - self.start_time
        self.running, self.start_time = self.running + seconds, now
        self._print(annot, seconds)
        return seconds if ret else None

    def _print(self, name, seconds):
        if os.environ.get("RANK", "0") == "0":
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"[ {stamp} ] {name:<70}{1000 * seconds:>12,.3f} ms, {self.running:>12,.2f} s total")
