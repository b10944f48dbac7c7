"""The speed that a run reports, and the time that it waits for data."""

import torch

from lib.utils.checkpoint.state import State
from lib.utils.monitoring import throughput


def test_speed_data_share_and_time_left_are_computed_from_the_clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])

    def batches():
        for number in range(4):
            clock[0] += 0.5
            yield number

    state = State(step=4, samples=36)
    rate = throughput.Throughput(24, state, torch.device("cpu"))
    seen, figures = [], []
    for samples in (36, 32):  # of two epochs
        for batch in rate.time_data_loading(batches()):
            seen.append(batch)
            clock[0] += 1.5
            state.step += 1
        state.samples += samples
        figures.append(rate.interval(state))
        clock[0] += 3  # an evaluation
    assert seen == [*range(4)] * 2
    first, second = ({name: figure for name, figure in one.items() if name != "memory_gb"} for one in figures)
    assert first == {"samples_per_s": 4.5, "data_share": 0.25, "left_s": 16 * 8 / 4}
    assert second == {"samples_per_s": 4.0, "data_share": 0.25, "left_s": 12 * 19 / 8}
