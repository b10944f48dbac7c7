"""cycling_utils' timer: where the time of a script goes, from one point to the next."""

import logging
import time

log = logging.getLogger(__name__)


class TimestampedTimer:
    """Log how long each part of a script takes.

        timer = TimestampedTimer()
        model = build()
        timer.report("the model")    # [ 2026-01-31 12:00:02 ] the model    2,000.000 ms, 2.00 s total

    `start_time` is when the last report ended (seconds of the monotonic clock), `running` the seconds of all reports,
    `reports` each one's name and seconds. Lines go to `say`.
    """

    def __init__(self, report: str = "Start", start_time: float | None = None, running: float = 0.0, say=log.info):
        self.start_time = time.monotonic() if start_time is None else start_time
        self.running, self.say = running, say
        self.reports: list[tuple[str, float]] = []
        self._line(report, 0.0)

    def report(self, annot: str):
        """Log the time since the last report, or the start, as that of `annot`."""
        now = time.monotonic()
        seconds = now - self.start_time
        self.running, self.start_time = self.running + seconds, now
        self.reports.append((annot, seconds))
        self._line(annot, seconds)

    def _line(self, name, seconds):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self.say(f"[ {stamp} ] {name:<70}{1000 * seconds:>12,.3f} ms, {self.running:>12,.2f} s total")
