"""BatchNorm's running statistics depend only on the step, not on the distribution of the samples over ranks."""

import copy

import pytest
import torch
from runs import few, plugins, run, weights
from torch import nn

from lib.utils.data.plan import Plan, order


def mean_buffers(model, parts):
    """The mean, weighted by samples, of a plain BatchNorm's buffers after each micro-batch; integers of one."""
    total, means = sum(len(part) for part in parts), {}
    for part in parts:
        plain = copy.deepcopy(model).train()
        plain(part)
        for name, value in plain.named_buffers():
            means[name] = means.get(name, 0) + value * (len(part) / total) if value.is_floating_point() else value
    return means


@pytest.mark.parametrize(("batch", "micro", "cpu"), [(8, 8, 1), (11, 4, 1), (11, 4, 2)])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_statistics_are_the_mean_over_the_micro_batches(momentum, batch, micro, cpu, tmp_path):
    """Those of a single micro-batch are BatchNorm's to the bit. The rate is too low to change a weight."""
    torch.manual_seed(5)
    norms = (nn.BatchNorm1d(6, momentum=momentum), nn.BatchNorm1d(6))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), *norms, nn.Linear(6, 4))
    flags = f"-dataset few -arch norms -num_classes 4 -lr_start 1e-30 -lr_end 0 -epochs 2 -model {cpu}"
    with plugins(arch={"norms": lambda args: copy.deepcopy(model)}, dataset={"few": few}):
        found = weights(run(tmp_path, f"{flags} -batch_size {batch} -micro_batch {micro} -cpu {cpu}"))
    inputs, plan = few(None)["train"].tensors[0], Plan(50, batch, micro)
    for epoch in (0, 1):
        samples = inputs[order(50, 0, epoch)]
        for step in range(plan.steps):
            buffers = mean_buffers(model, [samples[part.start : part.stop] for part in plan.cut(step)])
            model.load_state_dict(buffers, strict=False)
    for name, value in model.named_buffers():
        close = micro < batch and value.is_floating_point()
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) if close else torch.equal(found[name], value)
