"""The speed that a run reports: the time that it waits for data, and timers."""

import re
import time
import types

import pytest
import torch

from lib.utils.checkpoint.state import State
from lib.utils.compat import TimestampedTimer
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


def test_a_timer_prints_each_part_and_the_total_on_rank_0(monkeypatch, capsys):
    timer = TimestampedTimer(start_time=time.time() - 3)
    assert 3 <= timer.report("before", ret=True) < 60
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    capsys.readouterr()
    timer = TimestampedTimer(start_time=99.0, running=5.0)
    clock[0] += 1
    assert timer.report("sleeping") is None and timer.report("nothing", ret=True) == 0
    assert (timer.running, timer.start_time) == (7.0, 101.0)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\[ [\d: -]+ \] Start {65,} 0\.000 ms, +5\.00 s total", lines[0]), lines[0]
    assert re.search(r"\] sleeping +2,000\.000 ms, +7\.00 s total$", lines[1])
    monkeypatch.setenv("RANK", "1")
    assert TimestampedTimer("x").report("y", ret=True) == 0 and capsys.readouterr().out == ""
