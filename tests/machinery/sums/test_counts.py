"""What counts: means are over the targets that are there, for any micro-batch and any number of processes."""

import copy

import pytest
import torch
from command_line import usage_error
from runs import distance, lines, outcome, plugins, run, weights
from saves import bits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

from lib.core import loss as losses
from lib.trainer import trainer
from lib.utils.data import plan
from lib.utils.data.tensors import Tensors
from scripts import check_loss

FLAGS = "-num_classes 4 -batch_size 16 -epochs 2 -optimizer sgd -lr_start 0.1 -lr_schedule constant -log_every 1"
SEED = torch.Generator().manual_seed(3)
INPUTS, LABELS = torch.randn(48, 6, generator=SEED), torch.randint(4, (48,), generator=SEED)
TOKENS = torch.randint(4, (48, 5), generator=SEED)
LABELS[torch.randperm(48, generator=SEED)[:20]] = -100
LABELS[:16] = -100  # a whole batch, where samples are not shuffled
TOKENS[torch.rand(48, 5, generator=SEED) < torch.rand(48, 1, generator=SEED)] = -100
LEARNABLE = torch.eye(4).repeat(25, 1)


def linear(args):
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def per_token(args):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Unflatten(1, (5, 4)))


def with_targets(targets):
    return lambda args: {"train": Tensors(INPUTS, targets), "val": Tensors(INPUTS[:21], targets[10:31])}


CASES = {"labels": (linear, with_targets(LABELS), LABELS), "tokens": (per_token, with_targets(TOKENS), TOKENS)}


def plain(model: nn.Module, inputs, targets, order) -> nn.Module:
    """The model after two epochs of torch's own steps on whole batches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for chosen in order(epoch).split(16):
            optimizer.zero_grad()
            wanted = targets[chosen]
            if (wanted != -100).any():
                functional.cross_entropy(model(inputs[chosen]).flatten(0, -2), wanted.flatten()).backward()
            else:
                (model(inputs[chosen]) * 0).sum().backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("case", CASES)
def test_ignored_targets_weigh_nothing_for_any_micro_batch_engine_and_number_of_processes(case, tmp_path):
    arch, dataset, targets = CASES[case]
    with plugins(arch={"net": arch}, dataset={"gaps": dataset}):
        flags = f"-dataset gaps -arch net {FLAGS} -momentum 0.9 -weight_decay 0"
        whole = run(tmp_path, f"{flags} -cpu 1 -micro_batch 16 -model whole")
        exact = f"{flags} -deterministic -micro_batch 2"
        cut = run(tmp_path, f"{exact} -cpu 1 -model cut")
        for more in ("-cpu 3", "-cpu 2 -parallel fsdp"):
            assert bits(run(tmp_path, f"{exact} {more} -model bits{more[-1]}")) == bits(cut)
        stock = run(tmp_path, f"{flags} -cpu 2 -micro_batch 2 -deterministic no -model stock")
    truth = plain(arch(None), INPUTS, targets, lambda epoch: plan.order(48, 0, epoch)).state_dict()
    model, wanted = arch(None), targets[10:31]
    for folder in (whole, cut, stock):
        for name, value in weights(folder).items():
            assert torch.allclose(value, truth[name], atol=1e-5), folder
        model.load_state_dict(weights(folder))
        outputs, last = model(INPUTS[:21]), [one for one in lines(folder) if "val/loss" in one][-1]
        loss = functional.cross_entropy(outputs.flatten(0, -2), wanted.flatten()).item()
        assert last["val/loss"] == pytest.approx(loss, abs=1e-5), "one pass over the targets that are there"
        right = (outputs.argmax(-1) == wanted)[wanted != -100].float().mean().item()
        assert case == "tokens" or last["val/accuracy"] == pytest.approx(right)


def masked_in_place(batch):
    batch[1].masked_fill_(batch[0][:, 0] > 0, -100)
    return batch


def test_a_metric_of_each_target_does_not_count_ignored_ones():
    targets, criterion = torch.tensor([[1, 2], [3, -100]]), losses.CrossEntropy()
    check_loss.check_metrics(criterion, (targets, targets[:, 0]), {"own": targets, "sure": targets[0]})
    fault = usage_error(check_loss.check_metrics, criterion, (targets, targets), {"own": targets * 1.0})
    assert "metric 'own' has a value for each target, (2, 2), also for those that are ignored" in fault


class Stretching(nn.MSELoss):
    def forward(self, outputs, targets):
        return ((outputs - targets) ** 2).mean()


class Squeezing(Stretching):
    def forward(self, outputs, targets):
        return super().forward(outputs.squeeze(1), targets)


def test_a_loss_of_ones_own_that_stretches_targets_is_refused_and_one_that_squeezes_outputs_is_not():
    batch = torch.randn(6, 3), torch.randn(6)
    losses.forward(nn.Linear(3, 1), batch, Squeezing())
    assert "Stretching stretches them against" in usage_error(losses.forward, nn.Linear(3, 1), batch, Stretching())
    column, flat = (batch[0], batch[1][:, None]), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    assert "stretches them" in usage_error(losses.forward, flat, column, type("Other", (Stretching,), {})())


@pytest.mark.parametrize("mask", [masked_in_place, lambda one: (one[0], one[1].masked_fill(one[0][:, 0] > 0, -100))])
def test_targets_that_a_pass_masks_are_not_counted(mask, tmp_path):
    hides = lambda self, batch: trainer.Trainer.training_step(self, mask(batch))  # noqa: E731
    kind, data = type("Hides", (trainer.Trainer,), {"training_step": hides}), with_targets(LABELS.clamp_min(0))
    with plugins(arch={"linear": linear}, dataset={"all": data}, trainer={"hides": kind}):
        flags = f"{FLAGS} -arch linear -dataset all -trainer hides -cpu 1"
        assert distance(*[run(tmp_path, f"{flags} -micro_batch {size} -model of{size}") for size in (4, 16)]) < 1e-6


def drops(samples):
    """Leaves out the samples of one class."""
    return default_collate([one for one in samples if one[1] != 3] or samples[:1])


def empties(samples):
    """Leaves out all samples of some micro-batches."""
    inputs, targets = default_collate(samples)
    kept = targets < 2
    return inputs[kept], inputs[kept] * 9.0


def joins(samples):
    """Gives each sample twice."""
    return default_collate([*samples, *samples])


@pytest.mark.parametrize("collate", [drops, joins, empties])
def test_a_collate_fn_that_drops_or_joins_samples_leaves_a_perfect_model_perfect(collate, tmp_path):
    loss, wanted = ("-loss mse -lr_start 1e-9 -lr_end 0", 0.0) if collate is empties else ("", 1.0)
    perfect = nn.Linear(4, 4, bias=False)
    perfect.weight = nn.Parameter(9.0 * torch.eye(4))
    part = TensorDataset(LEARNABLE, LEARNABLE.argmax(1))
    part.collate_fn = collate
    made = {"train": part, "val": part}
    with plugins(arch={"perfect": lambda args: perfect}, dataset={"collated": lambda args: made}):
        flags = f"{FLAGS} -train_metrics -cpu 2 -micro_batch 4 -model x {loss}"
        folder = run(tmp_path, f"-dataset collated -arch perfect {flags}")
    assert outcome(folder)["best"]["value"] == pytest.approx(wanted, abs=1e-9)
