"""Models without memory get the very values that building them as usual gives."""

import functools
import math

import pytest
import torch
import torchvision
from processes import in_a_child
from torch import nn

from lib.core import deferred


class Odd(nn.Module):
    """Tied, frozen, scaled afterwards, with constants, a padding row, an orthogonal matrix, a half-precision part."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("constant", torch.tensor([1.0, math.pi]))
        self.register_buffer("table", torch.outer(torch.arange(5).float(), torch.ones(3)).cos(), persistent=False)
        self.square = nn.Linear(4, 4)
        nn.init.orthogonal_(self.square.weight)
        self.scale = nn.Parameter(torch.randn(3) * 0.1, requires_grad=False)
        self.norm = nn.BatchNorm2d(7)
        self.mixed = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Embedding) else None)
        with torch.no_grad():
            self.square.weight.mul_(1 / math.sqrt(2))
            self.head.weight[3:5] += 1


class Depths(nn.Module):
    """Numbers read from tensors that nothing drawn is in, and weights cut off far from their mean."""

    def __init__(self):
        super().__init__()
        rates = torch.linspace(0, 0.3, 4)
        rates[1:].mul_(2)
        self.drops = nn.ModuleList(nn.Dropout(rate.item()) for rate in rates)
        self.widths = nn.ModuleList(nn.Linear(width, 3) for width in (torch.arange(1, 4) * 2).tolist())
        nn.init.trunc_normal_(self.widths[0].weight, 0.0, 0.5, a=1.0, b=2.0)


@pytest.fixture(autouse=True)
def _in_a_child(request, monkeypatch):
    """torch refuses a backward pass in a fork of a process that had fake tensors: they stay in a child."""
    monkeypatch.setattr(request.node, "obj", functools.partial(in_a_child, request.node.obj))


def everything(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("make", [
    Odd,
    torchvision.models.resnet18,
    lambda: nn.TransformerEncoderLayer(8, 2),
    lambda: nn.LSTM(3, 4, num_layers=2),
    lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 32, 32),
    Depths,
], ids=["odd", "resnet", "transformer", "lstm", "vit", "depths"])  # fmt: skip
def test_the_values_are_those_of_the_model_built_as_usual(make):
    torch.manual_seed(5)
    usual, after = make(), torch.get_rng_state()
    torch.manual_seed(5)
    model, values = deferred.build(make)
    assert all(tensor.device.type == "meta" for tensor in everything(model).values())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in usual.parameters()]

    ties = model.head.weight is model.tokens.weight if isinstance(model, Odd) else True
    model.to_empty(device="cpu")
    values.fill(model)
    there, here = everything(usual), everything(model)
    given = dict(model.named_parameters(remove_duplicate=True)).keys() | dict(model.named_buffers()).keys()
    assert ties and there.keys() == here.keys() and str(model) == str(usual)
    assert all(torch.equal(there[name], here[name]) for name in given if name != "head.weight")
    assert torch.equal(torch.get_rng_state(), after), "what is drawn next is the same, too"


def test_no_more_than_a_tensor_is_whole_at_a_time(monkeypatch):
    """Twenty layers of 4 MB: the memory in use while they are filled stays near that of one."""

    def make():
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(20)))
        for layer in net:
            nn.init.xavier_normal_(layer.weight)
        return net

    model, values = deferred.build(make)
    most, play = [0], deferred._play

    def watched(entry, real):
        play(entry, real)
        most[0] = max(most[0], sum(storage.nbytes() for storage in real.values()))

    monkeypatch.setattr(deferred, "_play", watched)
    values.fill(model.to_empty(device="cpu"))
    assert most[0] < 3 * 4 * 1024 * 1024


def test_a_constructor_that_looks_at_its_values_builds_the_whole(caplog):
    class Looks(nn.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            while self.weight.abs().max() > 0.5:
                self.weight.data.mul_(0.9)

    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.hidden = torch.arange(3)

    for make, told in ((lambda: Looks(3, 3), "what uniform_.default draws"), (Keeps, "hidden")):
        torch.manual_seed(1)
        usual = make()
        torch.manual_seed(1)
        model, values = deferred.build(make)
        assert values is None and torch.equal(model.weight, usual.weight)
        assert told in caplog.text


def test_what_the_constructor_refuses_is_refused():
    with pytest.raises(ZeroDivisionError):
        deferred.build(lambda: nn.Linear(1 // 0, 1))
