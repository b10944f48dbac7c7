"""BatchNorm's running statistics depend only on the step, not on the distribution of the samples over ranks."""

import copy

import pytest
import torch
from runs import same_tensors
from torch import nn

from lib.core import buffers as model_buffers
from lib.core import exact
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World


def norm_model(momentum=0.1):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.BatchNorm1d(6))


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def close(one, other) -> bool:
    """Whether float buffers are equal up to rounding, and integers exactly."""
    assert one.keys() == other.keys()
    return all(torch.allclose(one[name].double(), other[name].double(), rtol=1e-5, atol=1e-6) for name in one)


def buffers_after(model, batch):
    """The buffers of a plain BatchNorm after this batch."""
    plain = copy.deepcopy(model).train()
    plain(batch)
    return buffers(plain)


def mean_buffers(model, parts):
    """The mean, weighted by samples, of the buffers after each micro-batch; integers of one."""
    total = sum(len(part) for part in parts)
    made = [buffers_after(model, part) for part in parts]
    return {
        name: sum(one[name] * (len(part) / total) for one, part in zip(made, parts, strict=True))
        if first.is_floating_point()
        else first
        for name, first in made[0].items()
    }


def micro_batch(number, count, of, parts):
    return MicroBatch(
        0, number, [], count, step_samples=of, step_parts=parts, first=number == 0, last=number == parts - 1
    )


class Statistics:
    """Running statistics as the exact engine sums them on one process."""

    def __init__(self, model):
        self.statistics = model_buffers.Buffers([model], World())

    def step(self, keys, passes):
        nodes = {}
        for key, forward in zip(keys, passes, strict=True):
            self.statistics.before(key)
            forward()
            self.statistics.after()
            if key.count:
                exact.add_leaf(nodes, key.number, self.statistics.shares(key))
        sums = exact.sum_nodes(nodes) if len(keys) > 1 else []
        self.statistics.finish(sums)


def step(model, statistics, parts, of):
    keys = [micro_batch(number, len(part), of, len(parts)) for number, part in enumerate(parts)]
    statistics.step(keys, [lambda part=part: model(part) for part in parts])


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_statistics_are_the_mean_over_the_micro_batches(momentum):
    """Those of a single micro-batch are BatchNorm's to the bit."""
    model = norm_model(momentum).train()
    statistics = Statistics(model)
    for sizes in ([8], [4, 4], [5, 3, 2], [2, 9]):
        parts = [2 + 3 * torch.randn(size, 4) for size in sizes]
        wanted = mean_buffers(model, parts)
        step(model, statistics, parts, sum(sizes))
        same = same_tensors if len(parts) == 1 else close
        assert same(buffers(model), wanted)
