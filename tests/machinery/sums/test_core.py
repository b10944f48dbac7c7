"""lib/core compared with torch's schedulers and clipping, with the formulas of papers, and with plain gradients."""

import copy
import math

import pytest
import torch
from command_line import parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score
from torch import nn
from truth import measured

from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.core import scheduler

STEADY = settings(deadline=None, derandomize=True, max_examples=100)
STOCK = "-deterministic no -weight_decay 0.1"
ON_GPU = type("OnGpu", (torch.Tensor,), {"is_cuda": True})  # a tensor that says that it is on a GPU


def torch_rates(kind, total, warmup, start, end):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=start)
    schedulers, steps = torch.optim.lr_scheduler, max(1, total - 1 - warmup)
    last = steps // 5  # the decay of wsd
    falls = {
        "cosine": lambda: [schedulers.CosineAnnealingLR(optimizer, steps, eta_min=end)],
        "linear": lambda: [schedulers.LinearLR(optimizer, 1.0, end / start, steps)],
        "constant": lambda: [schedulers.ConstantLR(optimizer, 1.0)],
        "step": lambda: [schedulers.MultiStepLR(optimizer, [-(-steps // 3), -(-2 * steps // 3)])],
        "wsd": lambda: [
            schedulers.ConstantLR(optimizer, 1.0),
            schedulers.LinearLR(optimizer, 1.0, end / start, max(1, last)),
        ],
    }
    rise = [schedulers.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)] if warmup else []
    edges = ([warmup] if warmup else []) + ([warmup + steps - last] if kind == "wsd" else [])
    schedule = schedulers.SequentialLR(optimizer, [*rise, *falls[kind]()], edges)
    for _ in range(total):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


@STEADY
@given(
    total=st.integers(2, 120), share=st.floats(0, 1), start=st.floats(1e-4, 1), fall=st.floats(0, 1), data=st.data()
)
@pytest.mark.parametrize("kind", scheduler.BY_NAME)
def test_the_learning_rate_is_that_of_torch_at_any_step_in_any_order(kind, total, share, start, fall, data):
    warmup, end = int(share * (total - 2)), start * (0.0 if kind == "step" else fall)
    if kind == "wsd":
        total = warmup + 1 + 5 * -(-(total - 1 - warmup) // 5)  # so that a fifth is a whole number of steps
    wanted = list(torch_rates(kind, total, warmup, start, end))
    for step in data.draw(st.permutations(range(total))):
        rate = scheduler.lr_at(step, kind=kind, total=total, warmup=float(warmup), start=start, end=end)
        assert rate == pytest.approx(wanted[step], rel=1e-9, abs=1e-12)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = nn.ModuleList([nn.Conv2d(2, 3, 3), nn.Linear(4, 5), nn.Embedding(6, 4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.LayerNorm(4), nn.GroupNorm(1, 3)])
        self.scale, self.frozen = nn.Parameter(torch.ones(())), nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize("name", ["sgd", "Adam", "adamw"])
def test_biases_and_norms_have_no_weight_decay_and_frozen_parameters_are_left_out(name):
    model = Mixed()
    [optimizer] = optimizers.get_optimizers(model, nn.Identity(), parsed(f"{STOCK} -optimizer {name}"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay_of = [(names[p], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    trained = [name for name in names.values() if not name.startswith("frozen")]
    assert sorted(name for name, _ in decay_of) == sorted(trained)
    decays = {f"matrices.{number}.weight" for number in range(3)}
    assert dict(decay_of) == {name: 0.1 if name in decays else 0.0 for name in trained}
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])} == decays
    optimizer.add_param_group({"params": [model.frozen.weight]})
    assert optimizer.param_groups[-1]["weight_decay"] == 0.1


def test_no_fused_kernel_writes_between_the_values_of_a_slice():
    whole = torch.ones(4, 3)
    model = nn.ParameterList([nn.Parameter(whole[:, :1])])
    [optimizer] = optimizers.get_optimizers(model, nn.Identity(), parsed("-cpu 1"))
    model[0].grad = torch.ones(4, 1)
    optimizer.step()
    assert (whole[:, 0] != 1).all() and (whole[:, 1:] == 1).all()


@STEADY
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5),
    limit=st.floats(0, 9),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    without=st.booleans(),
    exact=st.booleans(),
)
def test_gradients_are_clipped_as_by_torch(shapes, limit, scale, without, exact):
    ours = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in ours:
        parameter.grad = scale * torch.randn(parameter.shape)
    ours += [nn.Parameter(torch.zeros(2))] if without else []
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    norm = optimizers.clip(ours, limit, exact)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, limit or math.inf)
    assert norm.ndim == 0
    torch.testing.assert_close(norm, wanted)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is other.grad is None or torch.allclose(mine.grad, other.grad, rtol=1e-5)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("name", ["sgd", "Adam", "adamw"])
def test_a_skipped_first_step_on_a_gpu_or_by_the_scaler_leaves_no_trace(name, switch, monkeypatch):
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    scaler = torch.amp.GradScaler("cpu", enabled=not switch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN, to be noticed
    torch.use_deterministic_algorithms(True)
    try:
        for model, values in zip(models, ([math.inf, 1.0, 2.0], [1.0, 2.0]), strict=True):
            [optimizer] = optimizers.get_optimizers(model, nn.Identity(), parsed(f"{STOCK} -optimizer {name}"))
            if switch and not getattr(optimizer, "_step_supports_amp_scaling", False):
                pytest.skip(f"this torch has no such switch in {name}")
            for value in values:
                optimizer.zero_grad()
                scaler.scale(value * model(torch.ones(1, 3)).sum()).backward()
                scaler.unscale_(optimizer)
                norm = optimizers.clip(list(model.parameters()), 0, exact=False)
                optimizers.step(optimizer, norm.as_subclass(ON_GPU) if switch else norm)
                scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("size", [4, 5])
def test_the_class_dimension_is_the_first_for_pixels_and_the_last_for_tokens_even_if_both_fit(size):
    loss = losses.get_loss(parsed("-label_smoothing 0"))
    pixels, tokens = torch.randint(4, (2, size, size)), torch.randint(size, (2, size))
    images, rows = torch.randn(2, 4, size, size), torch.randn(2, size, size)
    assert torch.equal(loss(images, pixels), nn.functional.cross_entropy(images, pixels))
    assert losses.compute_metrics(loss, images, pixels) == {}
    assert torch.equal(loss(rows, tokens), nn.functional.cross_entropy(rows.flatten(0, 1), tokens.flatten()))
    assert losses.compute_metrics(loss, rows, tokens).keys() == {"bits_per_token"}


def test_losses_and_accuracy_are_those_of_torch():
    outputs, labels = torch.randn(9, 4), torch.randint(4, (9,))
    loss = losses.get_loss(parsed("-label_smoothing 0.2"))
    theirs = nn.functional.cross_entropy(outputs, labels, label_smoothing=0.2)
    torch.testing.assert_close(loss(outputs, labels), theirs)  # ours is a sum, divided
    assert measured(loss, (outputs, labels))["accuracy"] == (outputs.argmax(1) == labels).double().mean()
    assert losses.compute_metrics(loss, outputs, outputs.softmax(1)) == {}
    outputs_12, labels_12 = torch.randn(40, 12), torch.randint(12, (40,))
    top5 = top_k_accuracy_score(labels_12, outputs_12, k=5, labels=range(12))
    assert measured(loss, (outputs_12, labels_12))["top5"] == pytest.approx(top5)
    for name, theirs in {"mse": "mse_loss", "l1": "l1_loss", "huber": "huber_loss"}.items():
        loss = losses.get_loss(parsed(f"-loss {name} -label_smoothing 0.2"))
        assert torch.equal(loss(outputs, 2 * outputs), getattr(nn.functional, theirs)(outputs, 2 * outputs))
        assert measured(loss, (outputs, outputs + 1)) == {"mae": pytest.approx(1)}
