"""A dataset's own sampler: the same samples on any number of processes, after any stop, or one line."""

import re

import pytest
import torch
from runs import few, norm_net, plugins, run, same_tensors, weights
from saves import SMALL, log_of
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    Sampler,
    WeightedRandomSampler,
)

from lib import config
from lib.utils.data import plan

FLAGS = f"{SMALL} -epochs 2 -threads 1"
HEAVY = [1.0] * 40 + [9.0] * 8


class Rotated(Sampler):
    """What an epoch takes follows from set_epoch."""

    def __len__(self):
        return 48

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter((number + self.epoch) % 48 for number in range(48))


SAMPLERS = {
    "weighted": lambda part: WeightedRandomSampler(HEAVY, 30),
    "rotated": lambda part: Rotated(),
    "own": lambda part: WeightedRandomSampler(HEAVY, 30, generator=torch.Generator()),
    "distributed": lambda part: DistributedSampler(part, 2, 0),
    "batches": lambda part: BatchSampler(range(48), 8, drop_last=False),
    "short": lambda part: type("Short", (Rotated,), {"__iter__": lambda self: iter(range(47))})(),
}


def with_sampler(name):
    def get_dataset(args):
        parts = few(args)
        parts["train"].sampler = SAMPLERS[name](parts["train"])
        return parts

    return get_dataset


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    made = {name: with_sampler(name) for name in SAMPLERS}
    with plugins(arch={"norm_net": norm_net}, dataset={**made, "few": few}):
        yield


@pytest.mark.parametrize("name", ["weighted", "rotated"])
def test_a_sampler_gives_the_same_run_on_any_number_of_processes_and_after_a_stop(name, tmp_path):
    flags = FLAGS.replace("-dataset few", f"-dataset {name}")
    one = weights(run(tmp_path, f"{flags} -cpu 1 -model one"))
    assert same_tensors(one, weights(run(tmp_path, f"{flags} -cpu 3 -model three")))
    run(tmp_path, f"{flags} -cpu 2 -model parts -limit_steps 3", wanted=75)
    assert same_tensors(one, weights(run(tmp_path, f"{flags} -cpu 3 -model parts")))
    assert not same_tensors(one, weights(run(tmp_path, f"{FLAGS} -cpu 1 -model usual")))


def test_a_weighted_sampler_draws_others_in_each_epoch_and_none_without_shuffling():
    draws = [plan.order(4800, 0, epoch, sampler=WeightedRandomSampler(HEAVY, 4800)).tolist() for epoch in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]
    assert plan.order(9, 0, 1, shuffle=False, sampler=Rotated()).tolist() == [*range(9)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("distributed", "is a DistributedSampler: the run itself shares the samples out"),
        ("batches", "gives (6, 8) indices, and its len() is 6"),
        ("short", "gives (47,) indices, and its len() is 48"),
        ("weighted -overfit 8", "draws from more samples than the train split has"),
    ],
)
def test_a_sampler_that_cannot_be_right_is_refused(name, message, error_of):
    assert message in error_of(f"-dataset {name} -arch norm_net -num_classes 4 -cpu 1")


def test_a_sampler_with_a_generator_of_its_own_is_warned_of(tmp_path):
    own = run(tmp_path, f"{FLAGS.replace('-dataset few', '-dataset own')} -cpu 1")
    assert "the samples of sampler differ each time they are read" in log_of(own)


def test_other_weights_are_other_data(tmp_path, refused, monkeypatch):
    flags = FLAGS.replace("-dataset few", "-dataset weighted")
    run(tmp_path, f"{flags} -cpu 1 -limit_steps 2", wanted=75)
    monkeypatch.setitem(SAMPLERS, "weighted", lambda part: WeightedRandomSampler(HEAVY[::-1], 30))
    assert "sampler digest was" in refused(f"{flags} -cpu 1")
    run(tmp_path, f"{flags} -cpu 1 -allow_change data")


def test_the_sampler_in_the_page_gives_each_sample_once_in_batches_of_similar_length():
    text = (config.ROOT / "docs/data.md").read_text()
    space = {"Sampler": Sampler, "torch": torch}
    exec(re.search(r"```python\n(class ByLength.*?)```", text, re.S)[1], space)
    lengths = torch.randint(1, 100, (1000,))
    order = plan.order(1000, 0, 1, sampler=space["ByLength"](lengths, batch=16, window=10))
    assert sorted(order.tolist()) == [*range(1000)]
    spread = [int(lengths[batch].max() - lengths[batch].min()) for batch in order.split(16)]
    usual = [int(lengths[batch].max() - lengths[batch].min()) for batch in plan.order(1000, 0, 1).split(16)]
    assert sum(spread) < 0.4 * sum(usual)
