"""The speed that a run reports: the time that it waits for data."""

import types

import pytest
import torch

from lib.utils.checkpoint.state import State
from lib.utils.monitoring import throughput


def test_waiting_for_data_counts_only_if_the_device_is_idle(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])

    def slow():
        for _ in range(3):
            clock[0] += 2
            yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(query=lambda: clock[0] < 3))
    monkeypatch.setattr(throughput, "memory", lambda device: 0)
    rate = throughput.Throughput(3, State(), torch.device("cuda"))
    for _ in rate.time_data_loading(slow()):
        clock[0] += 1
    assert rate.interval(State(step=3, samples=3))["data_share"] == pytest.approx(2 / 9), "only the first time"
