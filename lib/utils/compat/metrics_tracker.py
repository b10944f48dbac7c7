"""cycling_utils' tracker of metrics: sums over micro-batches, epochs and ranks."""

import math
from collections import defaultdict

from lib.utils.monitoring.metrics import Sums, exact_terms


class MetricsTracker(Sums):
    """Named sums: `update` adds on this process, `reduce` adds up all ranks, `end_epoch` closes the epoch.

    `agg` has the epoch's sums over all ranks, `epoch_reports` those of the epochs before. Unlike in cycling_utils,
    a reduce() begins a new interval, so that nothing is counted twice.
    """

    def __init__(self):
        super().__init__()
        self.agg = defaultdict(float)
        self.epoch_reports: list[dict[str, float]] = []
        self._reduced = {}

    def reduce(self):
        """Put this interval's sums over all ranks into `local`, add them to `agg`, and begin a new interval."""
        self._reduced = super().reduce()
        for name, value in self._reduced.items():
            self.agg[name] += value
        return self

    @property
    def local(self) -> defaultdict[str, float]:
        """The sums of this process since the last reduce(), or else those of that. Waits for the device."""
        sums = {name: math.fsum(exact_terms(terms)) for name, terms in self.terms.items()}
        return defaultdict(float, sums or self._reduced)

    def reset_local(self):
        """Forget what was added since the last reduce()."""
        self.terms, self._reduced = {}, {}
        return self

    def end_epoch(self):
        """Append the epoch's sums to `epoch_reports` and begin a new epoch. What is not yet reduced is dropped."""
        self.epoch_reports.append(dict(self.agg))
        self.agg = defaultdict(float)
        return self.reset_local()

    def state_dict(self) -> dict:
        """Return the reduced sums, the same on all ranks and ready for JSON."""
        return {"agg": dict(self.agg), "epoch_reports": [dict(report) for report in self.epoch_reports]}

    def load_state_dict(self, state: dict):
        """Continue from what `state_dict` gave, or its "agg" alone, on any number of ranks."""
        self.agg = defaultdict(float, state["agg"])
        self.epoch_reports = [dict(report) for report in state.get("epoch_reports", ())]
        return self.reset_local()
