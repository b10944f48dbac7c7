"""What a run says of its own speed: where the start went, what holds it up, and which rank is slow."""

import re

import pytest
import torch
from runs import few, plugins, run

from lib.utils.compat import timer as timers
from lib.utils.distributed import World
from lib.utils.monitoring import startup, throughput

FINE = {"taken": 100.0, "waited": 1.0, "own": 50.0, "memory": None}


@pytest.mark.parametrize(("ranks", "workers", "told"), [
    ([{}], 0, []),
    ([{}, {}, {}], 0, []),
    ([{"waited": 40.0}], 4, ["40 % of the time is spent waiting for data: try -workers 7"]),
    ([{}, {"waited": 80.0}], 0, ["80 % of the time is spent waiting for data: try -workers 4"]),
    ([{"waited": 90.0}], 7, ["90 % of the time is spent waiting for data, and 7 workers are all that 8 cores can"]),
    ([{}, {}, {}, {"own": 80.0}], 0, ["rank 3 is 1.6 times slower than the rest"]),
    ([{"own": 1.0}, {"own": 2.0}], 0, []),  # twice a trifle
    ([{"memory": 0.31}, {"memory": 0.2}], 0, ["GPU memory 31 % used: a larger -micro_batch fits"]),
    ([{"memory": 0.2}, {"memory": 0.8}], 0, []),
    ([{"waited": 4.0, "taken": 4.0, "own": 1.0}, {"taken": 4.0, "own": 3.0}], 0, []),  # a short epoch
])  # fmt: skip
def test_advice_names_what_holds_an_epoch_up(ranks, workers, told):
    words = list(throughput.advice([{**FINE, **rank} for rank in ranks], workers, cores=8).values())
    assert len(words) == len(told) and all(word.startswith(start) for word, start in zip(words, told))


def test_the_start_is_accounted_for(tmp_path):
    words = "-dataset few -arch mlp -image_size 8 -num_classes 4 -batch_size 8 -epochs 1 -cpu 2 -model x"
    with plugins(dataset={"few": few}):
        log = (run(tmp_path, words) / "logs" / "rank_0.log").read_text()
    parts = re.search(r"start-up [\d.]+ s: (.*)", log)[1]
    assert [part.rpartition(" ")[0] for part in parts.split(", ")] == [
        "imports", "data", "processes", "past", "model", "resume", "first step"
    ]  # fmt: skip


def test_what_lies_between_two_epochs_is_no_ranks_own_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])
    own = throughput.OwnTime(World(size=2))
    for began in (0.0, 100.0):  # an epoch, and another after an evaluation
        clock[0] = began
        own.begin(anew=True)
        for _ in range(2):  # steps with one second of its own, and one for the others
            clock[0] += 1
            own.end()
            clock[0] += 1
            own.begin()
    own.read()
    assert own.seconds == 4.0


@pytest.mark.parametrize("starving", [True, False])
def test_a_batch_is_waited_for_only_by_a_device_that_has_nothing_to_do(starving, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])

    def slow():
        for _ in range(3):
            clock[0] += 2
            yield

    rate = throughput.Rate(3, starving=lambda: starving)
    for _ in rate.waiting(slow()):
        clock[0] += 1
    assert rate.interval(3, 3)["data_share"] == pytest.approx(6 / 9 if starving else 0)
    assert throughput.starving(torch.device("cpu"))()


def test_a_timer_tells_each_part_and_their_sum(monkeypatch):
    clock, said = [100.0], []
    monkeypatch.setattr(timers.time, "monotonic", lambda: clock[0])
    timer = timers.TimestampedTimer(start_time=99.0, running=5.0, say=said.append)
    clock[0] += 1
    timer.report("sleeping")
    timer.report("nothing")
    assert (timer.running, timer.start_time) == (7.0, 101.0)
    assert timer.reports == [("sleeping", 2.0), ("nothing", 0.0)]
    assert re.fullmatch(r"\[ [\d: -]+ \] Start {65,} 0\.000 ms, +5\.00 s total", said[0]), said[0]
    assert re.search(r"\] sleeping +2,000\.000 ms, +7\.00 s total$", said[1])


def test_the_parts_of_a_start_are_told_in_one_line_and_forgotten_by_the_next_run(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(startup, "parts", [("an old one", 9.0)])
    startup.begin()
    for part, seconds in (("imports", 2.0), ("data", 0.5)):
        clock[0] += seconds
        startup.report(part)
    assert startup.summary() == "2.5 s: imports 2.0, data 0.5"
