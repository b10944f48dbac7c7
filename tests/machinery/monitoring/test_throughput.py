"""The speed that a run reports, and the time that it waits for data."""

import torch

from lib.utils.checkpoint.state import State
from lib.utils.monitoring import throughput


def test_speed_data_share_and_time_left_are_computed_from_the_clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])
    state = State(step=4, samples=36)
    rate = throughput.Throughput(24, state, torch.device("cpu"))
    for samples, left_s in ((36, 16 * 8 / 4), (32, 12 * 19 / 8)):  # of two epochs
        for _ in rate.time_data_loading(clock.append(clock.pop() + 0.5) for _ in range(4)):
            clock[0] += 1.5
            state.step += 1
        state.samples += samples
        figures = {"samples_per_s": samples / 8, "data_share": 0.25, "left_s": left_s}
        assert rate.interval(state).items() >= figures.items()
        clock[0] += 3  # an evaluation
