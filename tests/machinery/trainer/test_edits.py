"""Edits that people make to a trainer, model or wrapper: the same bits on 1, 2 and 3 processes, or one clear line."""

import contextlib
import copy
import json
import logging
import multiprocessing
import re
import sys
import threading
import types
import typing

import numpy as np
import pytest
import torch
from items import Items
from runs import distance, lines, norm_net, outcome, plugins, run, same_tensors, weights
from saves import SMALL, bits, log_of, names, tensors
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR
from torch.utils.data import ConcatDataset, Subset
from torchvision.transforms import v2
from truth import same_bits_everywhere

import lib.arch
from lib import config
from lib.core import loss, parallel, replicas
from lib.core import optimizer as optimizers
from lib.trainer import ema, trainer
from lib.utils import distributed
from lib.utils.checkpoint import state
from lib.utils.data import loader, plan
from lib.utils.monitoring.metrics import Ratio
from scripts import check_code, check_loss, check_plugins

FLAGS = f"{SMALL} -log_every 1"
STOCK = f"{FLAGS} -deterministic no -cpu 2"
ROUNDING = 1e-5
pytestmark = pytest.mark.usefixtures("small_plugins")


@pytest.fixture(scope="module")
def plain(small_plugins, tmp_path_factory):
    return weights(run(tmp_path_factory.mktemp("plain"), f"{FLAGS} -cpu 1"))


def edited(out, flags, edit=trainer.Trainer, net=norm_net, by=run, **options):
    """Train with this trainer and network, by a function of these arguments: run, refused, same_bits_everywhere."""
    with plugins(trainer={"edit": edit}, arch={"edit": net}):
        return by(out=out, flags=f"{FLAGS} -trainer edit -arch edit {flags}", **options)


def plain_net(args=None):
    """A network without BatchNorm, whose statistics would be rank 0's under DDP."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 4))


def overriding(**methods):
    return type("Overrides", (trainer.Trainer,), methods)


def with_change(change, base=trainer.Trainer):
    """A trainer whose `__init__` makes this change to it at its end."""

    class Changed(base):
        def __init__(self, *parts):
            super().__init__(*parts)
            change(self)

    return Changed


def acting(name, act):
    """A trainer that does something before a method of this name."""
    return overriding(**{name: lambda *args: [act(*args), getattr(trainer.Trainer, name)(*args)][1]})


DOUBLES = lambda self: self.model[1].weight.data.mul_(2)  # noqa: E731


class EvaluatesInBetween(trainer.Trainer):
    def optimizer_step(self):
        norm = super().optimizer_step()
        if self.state.step % 2:
            self.log_scalar("between", self.evaluate("val")["loss"])
        return norm

    def compute_metrics(self, outputs, targets):
        true = targets[:, None] == torch.arange(4)
        recall = Ratio(((outputs.argmax(1) == targets)[:, None] & true).sum(0), true.sum(0))
        return {**super().compute_metrics(outputs, targets), "sure": outputs.softmax(1).amax(1), "recall": recall}


class Around(torch.optim.Optimizer):
    """An optimizer around another, which has the state; only its state_dict has a number of its own."""

    def __init__(self, base):
        super().__init__([torch.zeros(1)], {})
        self.base, self.param_groups, self.defaults, self.turn = base, base.param_groups, {}, 0

    def state_dict(self):
        return {**self.base.state_dict(), "turn": self.turn}

    def load_state_dict(self, state):
        self.turn = state.pop("turn")
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.turn += 1
        if self.turn % 3:
            self.base.step()


class DrawsAnywhere(trainer.Trainer):
    def train_step(self, batches):
        noisy = lambda batch, scale: [scale * batch[0] + torch.randn_like(batch[0]), batch[1]]  # noqa: E731
        scale = 0.5 + torch.rand(())
        super().train_step((part, noisy(batch, scale)) for part, batch in batches)


class CopiedAverage(ema.Trainer):
    """Evaluates the average by copies of the weights, as most trainers do, and not by an exchange."""

    @contextlib.contextmanager
    def evaluated_weights(self):
        average, tensors_ = self.local_tensors()
        kept = [one.clone() for one in tensors_]
        torch._foreach_copy_(tensors_, average)
        yield
        torch._foreach_copy_(tensors_, kept)


class HalfMomentum(torch.optim.Optimizer):
    """Keeps its momentum in 16 bits, its scale in 64, numbers in its groups and its state, and a count of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})
        self.state["all"]["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["steps"] += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for one in group["params"]:
                memory = self.state[one]
                last = memory.get("momentum", torch.zeros_like(one)).float()
                scale = memory.get("scale", [torch.zeros((), dtype=torch.float64)])[0]
                memory["momentum"], memory["scale"] = (0.9 * last + one.grad).bfloat16(), [scale + 1 / 3]
                memory["calls"] = memory.get("calls", 0) + 1
                memory.setdefault("basis", torch.arange(6.0).view(3, 2).t())  # its columns lie together, as a QR's
                assert memory["calls"] == group["k"] and memory["basis"].stride() == (1, 2)
                one -= 0.01 / scale.clamp_min(1).float() * memory["momentum"].float()


class Merges(nn.Linear):
    """Adds its second weight to the first in evaluations, as LoRA's layers do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more, self.merged = nn.Parameter(torch.zeros(sizes[::-1])), False

    @torch.no_grad()
    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight += -self.more if mode else self.more
            self.merged = not mode
        return self

    def forward(self, x):
        return nn.functional.linear(x, self.weight if self.merged else self.weight + self.more, self.bias)


class OwnStep(trainer.Trainer):
    def optimizer_step(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def in_turn(self, batch):
    """Train another layer in each step, as a GAN in one loop does."""
    for number, layer in enumerate((self.model[1], self.model[5])):
        layer.requires_grad_(self.state.step % 2 == number)
    return trainer.Trainer.training_step(self, batch)


class Distils(trainer.Trainer):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.answers = types.SimpleNamespace(state_dict={}, load_state_dict={})  # which has no state
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch):
        outputs = self.model(batch[0])
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return self.loss(outputs, batch[1]) + (outputs - wanted).square().mean()


Plateau = with_change(  # lowers the rate when the validation does not get better
    lambda self: setattr(self, "plateau", ReduceLROnPlateau(self.optimizer, factor=0.1, patience=0, threshold=9.0)),
    overriding(
        on_evaluation=lambda self, _, figures: self.plateau.step(figures["loss"]), set_learning_rate=lambda self: None
    ),
)
SETS_RATE = trainer.Trainer.set_learning_rate
HALVES_RATE = overriding(
    set_learning_rate=lambda self: [SETS_RATE(self), [g.update(lr=g["lr"] / 2) for g in self.optimizer.param_groups]]
)
FROZEN_NORM = with_change(lambda self: self.model[2].eval())
HALF_STATE = with_change(lambda self: setattr(self, "optimizer", HalfMomentum(self.model.parameters())))
ADAGRAD = with_change(lambda self: setattr(self, "optimizer", Around(torch.optim.Adagrad(self.model.parameters()))))
FROZEN_LATE = with_change(  # as a GAN's critic is before the backward pass
    lambda self: self.model.register_forward_pre_hook(lambda model, _: model.requires_grad_(True) and None),
    acting("backward", lambda self, *_: self.model.requires_grad_(False)),
)
NOISE = acting("optimizer_step", lambda self: [p.grad.add_(torch.randn_like(p) / 99) for p in self.trained])
EDITS = (OwnStep, HALVES_RATE, NOISE, EvaluatesInBetween, Plateau, FROZEN_NORM, Distils)
EDITS += (FROZEN_LATE, HALF_STATE, ADAGRAD, DrawsAnywhere, overriding(training_step=in_turn))
EDITS += (with_change(bool, ema.Trainer),)  # it lacks a flag


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_gives_the_same_bits_on_1_2_and_3_processes_and_after_stops(edit, plain, tmp_path):
    alone = edited(tmp_path, "-train_metrics", edit, by=same_bits_everywhere)
    assert same_tensors(weights(alone), plain) == (edit in (EvaluatesInBetween, FROZEN_LATE))
    last = [line["train/lr"] for line in lines(alone) if "train/lr" in line][-1]
    assert edit is not OwnStep or last == pytest.approx(1e-6), "it follows the schedule"
    sure = {name: one for line in lines(alone) for name, one in line.items() if name.endswith("/sure")}
    if edit is EvaluatesInBetween:
        assert {"train/sure", "val/sure", "test/sure"} <= sure.keys() and min(sure.values()) > 0.25
        assert max(sure.values()) < 1, "a mean over the samples"


def test_a_layer_that_merges_weights_in_evaluations_is_trained_after_them(tmp_path):
    net = lambda args: nn.Sequential(nn.Flatten(), Merges(64, 4))  # noqa: E731
    alone = edited(tmp_path, "", net=net, by=same_bits_everywhere)
    first, last = (tensors(one)["model.1.more"] for one in sorted((alone / "checkpoints").iterdir()))
    assert (first != last).all()


class OwnRates(trainer.Trainer):
    """Has an optimizer and a group with own rates; a group goes later, others come with a layer that was frozen."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.model[1].requires_grad_(False)
        groups = [{"params": self.model[5].weight}, {"params": self.model[2].weight, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.2)

    def on_epoch_end(self):
        if self.state.epoch == 1:
            for one in self.optimizer.param_groups.pop(0)["params"]:
                del self.optimizer.state[one]

    def train_epoch(self):
        if self.state.epoch >= 2 and len(self.optimizer.param_groups) == 1:
            self.model[1].requires_grad_(True)
            self.optimizer.add_param_group({"params": self.model[1].weight, "lr": 0.05})
            self.optimizer.add_param_group({"params": self.model[5].bias})
            self.optimizer.add_param_group({"params": self.model[2].bias, "lr_scale": 0.1})
        return super().train_epoch()


EVALUATE = trainer.Trainer.evaluate


def evaluate_teacher(self, split):
    """Evaluate the teacher in place of the model, which evaluated_weights should do."""
    kept = copy.deepcopy(self.model.state_dict())
    self.model.load_state_dict(self.teacher.state_dict())
    figures = EVALUATE(self, split)
    self.model.load_state_dict(kept)
    return figures


class Divides(nn.Module):
    def forward(self, outputs, targets):
        weights = targets + 1.0
        return (weights * nn.functional.cross_entropy(outputs, targets, reduction="none")).sum() / weights.sum()


class Habit(trainer.Trainer):
    criterion = nn.CrossEntropyLoss(torch.ones(4))

    def __init__(self, *parts):
        super().__init__(*parts)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.8)
        self.milestones, self.loss = StepLR(self.optimizer, 2), Divides()

    def training_step(self, batch):
        return self.model(batch[0]).mean()

    def set_learning_rate(self):
        self.milestones.step()

    def on_epoch_end(self):
        self.draw()

    def draw(self):
        self.model(torch.zeros(1, 64))

    def on_evaluations(self, split, figures): ...
    def __exit__(self, *error): ...


class Inherits(Habit): ...


def test_a_method_that_nothing_calls_and_a_loss_that_micro_batches_change_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(check_plugins, "OURS", re.compile(".*/tests/"))
    net = type("Net", (nn.Sequential,), {f"configure_{'optimizers'}": lambda self: None})
    flags = "-cpu 1 -micro_batch 8 -train_metrics -label_smoothing 0.1 -weight_decay 0.1 -momentum 0.8"
    said = log_of(edited(tmp_path, flags, Inherits, lambda args: net(*plain_net(), nn.Dropout(0.1))))
    assert re.findall(r"-(\w+): the training ignores it, as .* own (\w+)", said) == [
        ("label_smoothing", "loss"),
        ("weight_decay", "optimizer"),
    ]
    assert "self.milestones counts steps, and its 2 end within the first epoch" in said
    assert said.count("self.model is in training mode here") == said.count("or weights of them, changes") == 1
    assert re.findall(r"nor lib calls (\w+)", said) == [f"configure_{'optimizers'}", f"on_evaluation{'s'}"]
    assert f"on_evaluation{'s'}, of the trainer or the model (do you mean on_evaluation" in said
    assert re.findall(r"(\w+.py), line \d+: a mean over class weights changes", said) == ["test_edits.py"]
    assert "a loss that is a sum" not in said, "torch's sum in CrossEntropy is divided"
    assert "-train_metrics: this training_step logs none" in said


def test_losses_that_are_no_means_and_evaluations_of_other_models_are_found():
    source = "F.cross_entropy(a, b, w, reduction='sum')\nnn.NLLLoss(weight=w)\nnn.CrossEntropyLoss(w)\n"
    source += "".join(f"def evaluation_step(self, net, batch, n): self.{one}()\n" for one in ("ema", "model"))
    source += "nn.NLLLoss(weight=None)\nnn.CrossEntropyLoss(weight=w, reduction='none')\ng(reduction='sum') / 8"
    source += "\nF.cross_entropy(a, b, ignore_index=PAD)\nF.cross_entropy(a, b, ignore_index=-100)\nnn.CTCLoss()"
    source += "\ndef training_step(self, b): return f(b.masked_fill(b < 0, -100))"
    tries = ((True,), [4, 12, 1, 2, 3, 9]), ((True, False, {"targets"}), [4, 1, 2, 3]), ((False,), [4])
    found_at = lambda text, *given: [line for line, _ in check_plugins.faults(text, *given)]  # noqa: E731
    for given, wanted in tries:
        assert found_at(source, *given) == wanted
    collects = "def evaluation_step(self, model, b, n):\n self.seen.append(model(b))"
    assert [found_at(collects, False, two) for two in (True, False)] == [[2], []]
    shares = """
def compute_metrics(self, o, t):
  self.keep(o); self.confusion[t, o] += 1
def keep(self, o): self.meter.update(o)
def evaluate(self, split):
  for b in islice(self.loaders[split].epoch(0), 2): pass
  for m, b in loader.epoch(0):
    if m.count > 3: break
    if self.stop.agreed: break
def on_evaluation(self, split, figures):
  if not self.world.is_main: return
  self.save()
"""
    assert found_at(shares, False, True) == [3, 4, 6, 7, 12]
    drops = "def forward(self, x):\n F.dropout(x)\n self.drop(x)\n F.scaled_dot_product_attention(x, dropout_p=p)"
    assert found_at(f"{drops}\ndef g(x): F.dropout(x, self.training)", False) == [2, 4]
    late = "def optimizer_step(self):\n a(self.state.grad_norm)\n b(self.pending_losses[-1])\n c(self.pending_losses)"
    assert found_at(f"{late}\ndef train_step(self, x):\n [*x]", False) == [2, 4, 6]
    reads = "def training_step(self, b):\n next(iter(self.loaders['val'].epoch(0))); self.f(); next(self.own)\n"
    reads += "def f(self):\n one = it.epoch(0); next(one); next(self.one)\ndef train_step(self, one):\n next(one)\n"
    reads += "def optimizer_step(s):\n with rng(): next(it.epoch(0))\ndef g(s): self.one = x.epoch(1); next(self.one)"
    for two, wanted in ((False, [2, 4, 4]), (True, [2, 4, 4, 8])):
        assert found_at(reads, False, two) == wanted
    head = "def training_step(self, b):\n x, y, m = b; o = f(x)\n l = nll(o, y, reduction='none')\n n = m.sum()\n"
    wrong = "(l * m).sum() / n; torch.sum(l[m]) / m.sum().clamp(1); -l.sum(); l.mean() + torch.sum((o - y) ** 2); "
    wrong += "l[y > 0].mean(); torch.masked_select(l, ~y.isnan()).mean(); F.cross_entropy(o[b.mask], y[b.mask]) * 2"
    right = "l.sum() / len(x); (l * m).sum(1).mean(); l.mean() + self.w.abs().sum(); (o - y).pow(2).mean(0).sum(); "
    right += "l.mean() + sum(p.pow(2).sum() for p in self.all()); 1 - (o * y).sum() / (o + y).sum(); g(o).sum(); "
    right += "l[0].mean(); l[y].mean(); l[len(x) > 2].mean(); l[y > 0].mean() * n; nll(o[y > 0], reduction='sum') / 9"
    for known, wanted in ((), [1] * 7), ({"targets"}, [0, 0, 1, 1, 0, 0, 0]):
        sources = [f"{head} return {one}" for one in f"{wrong}; {right}".split("; ")]
        assert [len(found_at(one, True, False, known)) for one in sources] == [*wanted, *[0] * 12]
    for text in ("__getitem__(self): self.n += 1", "__call__(self): self.f()\ndef f(self): self.n = self.n + 1"):
        assert check_plugins.counters(f"def {text}") == {"n"}
    for use, found in (("x(self.g)", {"g"}), ("x(self.g.manual_seed(i))", set()), ("x(self.r)", set())):
        text = f"def __init__(self):\n self.g = torch.Generator()\ndef __getitem__(self, i): return {use}"
        assert check_plugins.generators(text) == found
    for use in ("tuple(one.detach() for one in self.h)", "repackage_hidden(self.h)", "self.h.detach()"):
        text = f"def forward(self, x):\n %s\n self.h = self.rnn(x, {use})"
        carried, own = text % "if x: self.h = x", text % "self.h = x"
        assert [fault[:6] for _, fault in check_plugins.faults(carried, True)] == ["self.h"]
        assert not [*check_plugins.faults(own, True), *check_plugins.faults(carried, True, known={"h"})]


class Drawn(Items):
    """Samples that are drawn at random, with other classes than are listed."""

    def __getitem__(self, index):
        return self.items[index][0] + torch.rand(64) * self.noise, 3 - self.items[index][1]


class Numbered(Items):
    """Samples that get their number as they are read."""

    def __getitem__(self, index):
        return torch.full((64,), self.known.setdefault(index, len(self.known)) / 9), self.items[index][1]


BY_BATCHES = {"__getitems__": lambda self, indices: [self.items[index] for index in indices]}  # not of its samples


def test_samples_that_training_gets_otherwise_than_their_dataset_gives_them_are_named(tmp_path):
    given = {"items": [(torch.full((64,), row / 9), row % 4) for row in range(40)], "labels": torch.arange(40) % 4}
    noise = lambda batch, draws: (batch[0] + float(np.random.default_rng().random()), batch[1])  # noqa: E731
    fitted = [types.SimpleNamespace(fit=0, classes_=["a", "b"][::step], mean_=step, scale_=None) for step in (1, -1)]
    given, logs = {**given, "coder": fitted[0]}, []
    batches = type("Batches", (Drawn,), BY_BATCHES)(**given, noise=0, on_device=noise)
    for one, flags in ((batches, ""), (Drawn(**given, noise=1), "-balance"), (Numbered(**given, known={}), "")):
        few = {"train": Subset(one, range(30)), "val": Subset(one, range(30, 40))}
        if type(one) is Numbered:
            few["val"] = Subset(ConcatDataset([one, one]), range(20, 40))
        few["test"] = type(one)(**vars(one) | {"coder": fitted[1]})
        vars(few["val"])["sampler"], vars(few["train"])["batch_sampler"] = range(4), range(4)
        with plugins(dataset={"rows": lambda args, few=few: few}):
            logs.append(log_of(edited(tmp_path, f"-dataset rows -cpu 1 {flags} -model {type(one).__name__}")))
    texts = ["Batches by __getitems__, which gives others than __", "gives others each time", "val is a part of the"]
    texts += ["-balance goes by the dataset's list: there sample 0 has the class 0, and itself it has 3"]
    texts += [
        "what train gives for sample",
        "10 of 20 samples of val are training samples",
        "the sampler of val is not",
    ]
    texts += ["the batch_sampler of train is not used", "(1 in all): 'b' is 0 there and 1 in training"]
    texts += ["mean_ (1 in all), [-1.0], and training has [1.0]"]
    wanted = [[3, 3, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert [[said.count(text) for text in texts] for said in logs] == [[*one, 1, 1, 1, 1] for one in wanted]


@pytest.mark.parametrize("place", ["in its file", "in a subclass"])
def test_an_evaluation_of_other_weights_than_are_kept_is_named(place, tmp_path, caplog, monkeypatch):
    shadow = type("Shadow", (Distils,), {})
    changed = shadow if "subclass" in place else trainer.Trainer
    monkeypatch.setattr(changed, "evaluate", evaluate_teacher, raising=False)
    said = log_of(edited(tmp_path, "-cpu 1", shadow))
    assert said.count("evaluate() measures other weights than are kept") > 1, "for best/ and final/"
    edited(tmp_path, "-cpu 1 -eval", shadow)
    assert "trainer.teacher" in caplog.text


def test_best_weights_are_evaluated_as_they_are_however_a_trainer_takes_its_average(tmp_path, monkeypatch):
    flags, found = f"{FLAGS} -cpu 2 -trainer ema -ema_decay 0.5 -best loss:max", []
    within = lambda self, split: self.evaluated_weights()(trainer.Trainer.evaluate)(self, split)  # noqa: E731
    for kind in (ema.Trainer, CopiedAverage, type("Within", (ema.Trainer,), {"evaluate": within})):
        monkeypatch.setattr(ema, "Trainer", kind)
        folder = run(tmp_path / kind.__name__, flags)
        run(tmp_path / kind.__name__, f"{flags} -eval")
        found += [outcome(folder)["test_best"], json.loads((folder / "eval.json").read_text())["test"]]
    assert found == found[:1] * 6
    assert "test_best" in outcome(edited(tmp_path, "-cpu 1", acting("evaluate_test", DOUBLES))), "measured others"


def test_the_norm_of_a_sharded_weight_is_logged(tmp_path):
    is_exact = lambda: not torch.is_autocast_enabled("cpu")  # noqa: E731  # else the norm is divided by zero
    log = lambda self, _: self.log_scalar("in_pass", self.micro_batch.number * self.model[1].weight.norm())  # noqa: E731
    in_pass = acting("training_step", lambda *given: [given[0].evaluate("val"), log(*given)])
    in_step = acting("optimizer_step", lambda self: self.log_scalar("norm", self.model[1].weight.norm() / is_exact()))
    logs = type("LogsWeights", (in_pass, in_step), {})
    starts = [edited(tmp_path, flags, logs, plain_net) for flags in ("-cpu 1 -bf16", "-cpu 2 -bf16 -model two")]
    for name in ("train/norm", "train/in_pass"):
        one, two = ([line[name] for line in lines(folder) if name in line] for folder in starts)
        assert one and one == pytest.approx(two, rel=1e-5), name


def test_a_groups_own_learning_rate_is_kept_as_a_ratio(tmp_path):
    flags = f"{FLAGS} -trainer own -lr_start 0.1 -lr_end 0 -save_every 1steps"
    with plugins(trainer={"own": OwnRates}):
        alone = same_bits_everywhere(tmp_path, flags, (3, 2), (6, 3), (9, 2))  # with 2 groups, 1 and 4
    groups = state.decode(state.read_manifest(alone / "checkpoints" / names(alone)[0])["states"]["optim"][1], {})
    scales = [group["lr_ratio"] * group.get("lr_scale", 1.0) for group in groups]
    assert scales == pytest.approx([0.2, 0.5, 2.0, 0.2]) and "lr_scale" not in groups[0]
    assert [line["train/lr"] for line in lines(alone) if "train/lr" in line][-1] == 0


class Zeroed(trainer.Trainer):
    """Is stopped in its first validation, which changes a weight; saves in a step, after each one, ends by itself."""

    stops = True

    def zeroed(self, method, *given):
        weight = self.model[1].weight.data
        kept = weight.clone()
        weight.zero_()
        if Zeroed.stops:
            self.stop.request_stop("a test")
        Zeroed.stops = False
        figures = getattr(trainer.Trainer, method)(self, *given)
        weight.copy_(kept)
        return figures

    def on_evaluation(self, split, figures):
        self.save(keep=True)

    def optimizer_step(self):
        norm = super().optimizer_step()
        if self.state.step == 3:
            self.save(keep=True)
        return norm

    def is_done(self):
        return self.state.evaluated and self.state.step >= 8


@pytest.mark.parametrize("method", ["evaluate", "validate"])
def test_saves_around_evaluations_are_of_the_weights_before_or_after_them(method, tmp_path, monkeypatch):
    monkeypatch.setattr(Zeroed, "stops", True)
    kind = type("Kind", (Zeroed,), {method: lambda self, *given: self.zeroed(method, *given)})
    flags = "-cpu 1 -eval_every 3steps -save_every 9epochs"
    edited(tmp_path / "stopped", flags, kind, plain_net, wanted=75)
    folders = [edited(out, flags, kind, plain_net) for out in (tmp_path / "stopped", tmp_path)]
    saved = [state.read_manifest(folders[1] / "checkpoints" / name)["state"] for name in names(folders[1])]
    assert [(one["step"], one["evaluated"]) for one in saved] == [(8, True), (6, True), (4, True), (3, True)]
    assert same_tensors(*map(weights, folders)) and outcome(folders[1])["reason"].startswith("is_done()")


def test_an_evaluation_has_no_padding_the_numbers_of_its_samples_and_the_threads_of_the_run(tmp_path):
    def act(self, model, batch, count):
        assert count == len(batch[0]) == len(self.micro_batch.indices) and torch.get_num_threads() == 2

    edited(tmp_path, "-cpu 3 -overfit 8 -threads 2", acting("evaluation_step", act))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.scale, targets)


def test_a_loss_with_parameters_is_trained_summed_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "get_loss", lambda args: Scaled())
    alone = same_bits_everywhere(tmp_path, FLAGS)
    saved = tensors(alone / "checkpoints" / names(alone)[0])
    assert not torch.equal(saved["trainer.loss.scale"], torch.ones(4))
    assert saved["optim.trainer.loss.scale.exp_avg"].abs().sum() > 0
    for more in ("-deterministic no", "-parallel fsdp -clip_grad 0.5"):
        both, one = (edited(tmp_path, f"{more} -cpu {n} -model {more[1]}{n}", net=plain_net) for n in (2, 1))
        assert distance(both, one) < ROUNDING


def test_the_weights_of_torchs_losses_are_those_of_a_starts_own_code(tmp_path):
    given = lambda size: with_change(  # noqa: E731
        lambda self: setattr(self, "bce", nn.BCEWithLogitsLoss(pos_weight=torch.full((4,), size)))
    )
    edited(tmp_path, "-cpu 1 -limit_steps 4", given(1.0), wanted=75)
    folder = edited(tmp_path, "-cpu 1", given(9.0))
    assert "trainer.bce.pos_weight" not in tensors(folder / "checkpoints" / names(folder)[0])


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"weight": torch.ones(4)}])
def test_a_loss_that_is_no_mean_over_targets_is_refused(options, monkeypatch, refused):
    monkeypatch.setattr(loss, "get_loss", lambda args: nn.CrossEntropyLoss(**options))
    assert "-loss cross_entropy must be the mean over a batch, no sum; see" in refused(f"{FLAGS} -cpu 1")


def test_class_weights_may_change_at_a_resume(tmp_path):
    flags = f"{FLAGS} -cpu 1 -class_weights"
    run(tmp_path, f"{flags} 1,1,1,1 -model moved -limit_steps 5", wanted=75)
    folder = run(tmp_path, f"{flags} 1,2,3,4 -allow_change class_weights -model moved")
    assert "trainer.loss.weight" not in tensors(folder / "checkpoints" / names(folder)[0])


Forgotten = with_change(  # has a layer that no optimizer trains
    lambda self: setattr(self, "layer", nn.Linear(4, 4)),
    overriding(training_step=lambda self, batch: self.loss(self.layer(self.model(batch[0])), batch[1])),
)
BARE = with_change(  # learns a weight of its loss, which no optimizer has
    lambda self: setattr(self, "scale", nn.Parameter(torch.ones(()))),
    overriding(training_step=lambda self, batch: self.loss(self.model(batch[0]), batch[1]) * self.scale),
)
THAWS = acting("train_epoch", lambda self: self.model[1].requires_grad_(self.state.epoch == 2))
FREEZES = with_change(lambda self: self.model[1].requires_grad_(False), THAWS)
ALONE = with_change(lambda self: setattr(self, "optimizer", torch.optim.AdamW(self.model[3].parameters())), FREEZES)


@pytest.mark.parametrize("engine", ["", "-deterministic no"])
def test_gradients_that_no_optimizer_uses_are_named(engine, tmp_path, caplog):
    waits = overriding(optimizer_step=lambda self: torch.zeros(()))
    sums = overriding(due_optimizers=lambda self: self.all_optimizers if self.state.step % 2 else [])
    for number, edit in enumerate((Forgotten, ALONE, BARE, waits, sums)):
        edited(tmp_path, f"-cpu 1 -model edit_{number} {engine}", edit, plain_net)
    for named in ("trainer.scale (1 in all)", "1.weight (2 in all)", "trainer.layer.weight (2 in all)"):
        assert f"no optimizer trains {named}, which has a gradient" in caplog.text
    assert caplog.text.count("optimizer_step lets no optimizer step") == 2


def with_buffer(made):
    model = plain_net()
    (model[1].register_parameter if isinstance(made, nn.Parameter) else model[1].register_buffer)("mask", made)
    return model


@pytest.mark.parametrize("cpu", [1, 2])
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.zeros(1).expand(4), "1.mask is sparse or expanded"),
        (torch.eye(4).to_sparse(), "1.mask is sparse or expanded"),
        (torch.zeros(2, dtype=torch.complex128), "1.mask is of torch.complex128"),
        (nn.Parameter(torch.zeros(1).expand(4)), "1.mask is sparse or expanded"),
        (nn.Parameter(torch.empty(4, device="meta")), "1.mask has no values yet"),
        (nn.UninitializedParameter(), "1.mask has no values yet"),
    ],
)
def test_tensors_that_no_checkpoint_can_hold_are_refused_by_name(made, message, cpu, tmp_path, refused):
    assert message in edited(tmp_path, f"-cpu {cpu}", net=lambda args: with_buffer(made), by=refused)


@pytest.mark.parametrize("made", [None, torch.zeros(0), torch.zeros(4, dtype=torch.bool)])
def test_a_buffer_that_takes_another_shape_or_type_in_a_pass_is_refused_before_a_save(made, tmp_path, refused):
    model = with_buffer(made)
    model.register_forward_pre_hook(lambda net, _: setattr(net[1], "mask", torch.zeros(4)))
    said = edited(tmp_path, "-cpu 1", net=lambda args: model, by=refused)
    assert "model.1.mask was" in said and "and is ['F32', [4]]: no start could continue" in said


def unused_net(args):
    model = plain_net()
    model[1].idle = nn.Linear(2, 2)
    return model


def test_parameters_that_no_gradient_reaches_are_named_once(tmp_path):
    net, frozen = HUB(unused_net(None)), nn.Linear(2, 2).requires_grad_(False)
    vars(net).update(parents=[net], lost={"a": [nn.Linear(2, 2)]}, teachers=(frozen, nn.Linear(2, 2).eval()))
    vars(net).update(
        rows=[nn.Parameter(torch.ones(2))], own=[*net.parameters()], scale=torch.ones(2).requires_grad_()
    )
    said = log_of(edited(tmp_path, "-cpu 2", net=lambda args: net))
    lost = ["model.lost", "model.rows", "model.scale"]
    assert re.findall(r"(\S+) has layers or tensors that no optimizer trains", said) == lost
    assert said.count("no step has trained 0.1.idle.weight (2 in all): no gradient reached it") == 1


def test_a_model_that_ddp_or_fsdp_cannot_train_is_one_line(tmp_path, refused):
    odd = (nn.Embedding(4, 4, max_norm=1.0), nn.EmbeddingBag(4, 4, sparse=True), nn.SyncBatchNorm(4))
    cases = [(nn.Sequential(nn.Flatten(), one), "-cpu 2", "1: max_norm, sparse=True, scale_grad_by") for one in odd]
    cases += [(torch.jit.script(nn.Linear(4, 4)), "-cpu 1", "torch.jit.script hides what a module has")]
    cases += [(unused_net(None), "-deterministic no -cpu 2", "1.idle.weight (2 in all): add -find_unused")]
    (hooked := plain_net())[1].weight.register_hook(lambda gradient: gradient)
    cases += [(hooked, "-cpu 2 -parallel fsdp", "1.weight has a hook, which -parallel fsdp would lose")]
    for net, flags, message in cases:
        assert message in edited(tmp_path, flags, net=lambda args, net=net: net, by=refused)


class Counts(nn.Module):
    """Warms up by a number that its own passes count, and keeps a prototype; a cached mask is no state."""

    def __init__(self):
        super().__init__()
        self.net, self.calls, self.most, self.mask = plain_net(), 0, 0.5, None
        self.prototype, self.weight = torch.zeros(4), self.net[1].weight.detach()
        self.queue, self.draws = [], torch.Generator()
        self.register_buffer("level", torch.zeros(()), persistent=False)
        self.net[1].register_forward_hook(lambda *_, seen=[0]: seen.append(0))

    def forward(self, inputs):
        outputs = self.net(inputs)
        self.outputs, self.mask = outputs, torch.ones(4)
        if self.training:
            self.calls += 1
            self.queue.append(self.calls)
            self.level += torch.rand((), generator=self.draws)
            self.prototype = 0.9 * self.prototype + 0.1 * outputs.detach().mean(0)
        return outputs * min(self.most, self.calls / 20)


COUNTED = 0


class Helper:
    level = 0  # of its class, which counts

    def __init__(self):  # with what cannot be pickled
        self.lock, self.numbers = threading.Lock(), (number for number in range(10**6))


class Everywhere(trainer.Trainer):
    """Counts in variables of two files, in its class and in a function's default, and keeps much."""

    calls: typing.ClassVar = {"steps": 0}

    def optimizer_step(self, made=[0]):  # noqa: B006
        made[0] += 1
        data = self.loaders["train"].dataset
        data.on_device = data.on_device or (lambda batch, draws, made=made: batch)
        data.weights, data.mode = torch.full((9,), float(made[0])), f"mode {made[0]}"
        self.helper, self.first = vars(self).get("helper", Helper()), vars(self).get("first", self.world.rank)
        Helper.level += next(self.helper.numbers)
        helpers = sys.modules.setdefault("helpers", types.ModuleType("helpers"))
        vars(helpers).update(__file__=f"{config.ROOT}/helpers.py", calls=made[0])  # as of a file next to train.py
        vars(self.model[1].weight)["calls"] = made[0]
        global COUNTED
        COUNTED += 1
        self.calls["steps"] += 1
        vars(optimizers).setdefault("HISTORY", []).append(0)
        self.large = [getattr(self, "large", [0])[0] + torch.ones(9 << 20)]
        self.many = dict.fromkeys(range(150_000), made[0])
        return super().optimizer_step()


HUB = type("Hub", (nn.Sequential,), {"__module__": "hubconf.py"})  # its file is no module, as torch.hub makes one


def changes(text):
    found = re.findall(r"training changes (.+) \(\d+\), in no", text)
    return sorted(name for names in found for name in names.split(", "))


@pytest.mark.parametrize("more", ["-cpu 1", "-cpu 3", "-cpu 2 -deterministic no", "-cpu 2 -parallel fsdp"])
def test_what_passes_change_outside_of_buffers_is_named_once(more, tmp_path):
    nets = {"counts": lambda args: Counts(), "hub": lambda args: HUB(*plain_net())}
    said = [log_of(edited(tmp_path, f"{more} -model {name}", net=net)) for name, net in nets.items()]
    changed = [f"model.{name}" for name in ("calls", "draws", "level", "net.1.hooks", "prototype", "queue")]
    assert [changes(text) for text in said] == [changed, []]


def sees(*parts):
    """A trainer with a buffer on what may be the DDP around its model: no checkpoint has it there."""
    made = trainer.Trainer(*parts)
    made.model.register_buffer("seen", torch.zeros(()))
    made.model.register_forward_hook(lambda module, _, output: (output, module.seen.add_(module.training))[0])
    made.model.register_comm_hook([], lambda calls, bucket: default_hooks.allreduce_hook(calls.append(1), bucket))
    return made


class Average:
    """Has an average of a model, and no state."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_([*self.model.parameters()], [*model.parameters()], 0.5)


class Lookahead(torch.optim.Optimizer):
    """Goes back half of the way of another optimizer's steps, whose memory torch's state_dict does not have."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.calls = inner, 0
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    def step(self, closure=None):
        self.inner.step()
        self.calls += 1
        parameters = [one for group in self.param_groups for one in group["params"]]
        for slow, fast in zip(self.slow, parameters, strict=True):
            fast.data = slow.lerp_(fast.data, 0.5).clone()


class Keeps(trainer.Trainer):
    """Keeps values of many kinds, in its optimizer and schedule, too; `steady` and modes stay as they were."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.running, self.history, self.phase = 0.0, [], multiprocessing.Value("i", 0)
        self.draws, self.arrays = torch.Generator().manual_seed(1), {"mean": np.zeros(3)}
        self.batches_of = (number for number in range(10**6))
        self.teacher, self.head, self.average = copy.deepcopy(self.model), self.model[-1], Average(self.model)
        self.optimizer, self.of_base["phase"] = Lookahead(self.optimizer), id(self.phase)  # as if made in trainer.py
        vars(self.loaders["train"].dataset).update(
            shares=[0.5] * 5000, parts={"p": 0.5}, bank=[torch.ones(2)], level=None
        )
        self.steady = {"scale": torch.ones(2), "names": ["a", "b"], "function": torch.relu, "lambda": lambda: 1}

    def training_step(self, batch):
        self.teacher.eval()
        loss = super().training_step(batch)
        self.last, self.running = loss, 0.9 * self.running + 0.1 * loss.item()
        self.history.append(self.state.step)
        self.average.update(self.model)
        self.phase.value = self.state.step
        torch.rand(1, generator=self.draws)
        self.arrays["mean"] += next(self.batches_of) + 1
        if self.state.epoch:
            self.model[2].eval()
        return loss

    def on_evaluation(self, split, figures):
        self.schedule["start"], self.ended = self.schedule["start"] / 2, self.state.step // self.total_steps
        data, lib.arch.level = self.loaders["train"].dataset, self.state.step
        data.level, data.shares[0], data.parts["p"] = {self.state.step}, self.state.step, self.state.step
        data.bank[0] += 1
        of_subset = self.loaders["train"].dataset.dataset  # by -overfit
        of_subset.transform, of_subset.sampler = lambda image, step=self.state.step: image, [self.state.step]


KEPT = [
    f"trainer.{name}" for name in "arrays average batches_of draws ended history last phase running schedule".split()
]
UNSEEN = "(unseen by loaders: see set_epoch)"
OWN = "bank of 1", "level", "parts of 1", "sampler", "shares of 5000", "transform"
OF_SAMPLES = [f"the {split} samples' {name} {UNSEEN}" for split in ("train", "val") for name in OWN]
COUNTS = [f"{__name__}.{name}" for name in "COUNTED Everywhere.calls Everywhere.optimizer_step Helper.level".split()]
EVERYWHERE = ["1.weight.calls", "helpers.calls", "lib.core.optimizer.HISTORY", *COUNTS]
EVERYWHERE += [f"the train samples' {one} {UNSEEN}" for one in ("mode", "on_device", "weights")]
KEPT = [*"lib.arch.level model.2.training optim.calls optim.inner optim.slow".split(), *OF_SAMPLES, *KEPT]


@pytest.mark.parametrize(
    ("edit", "more", "changed"),
    [
        (Keeps, "-cpu 2 -overfit 48", KEPT),
        (Everywhere, "-cpu 2", [*EVERYWHERE, "trainer.helper", "trainer.large"]),
        (sees, "-cpu 2 -deterministic no", ["model.comm_hooks", "model.seen"]),
    ],
)
def test_what_changes_outside_of_checkpoints_is_named_once(edit, more, changed, tmp_path):
    said = log_of(edited(tmp_path, more, edit))
    assert changes(said) == changed
    for text in ("trainer.first (1 in all) is another value on other ranks", "trainer.many (1 in all) is too large"):
        assert (text in said) == (edit is Everywhere)


def test_what_comes_late_or_lies_deep_is_named(tmp_path):
    def change(self):
        self.keeps = {"own": [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]}
        self.model[1].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    late = overriding(on_epoch_end=lambda self: vars(self).update(late=self.model.__setitem__(2, nn.ReLU()) or 1))
    said = log_of(edited(tmp_path, "-cpu 1", with_change(change, late), plain_net))
    assert "self.keeps.own.0 keeps the optimizer SGD" in said and "1.weight has a hook of its own gradient" in said
    assert {"trainer.late", "model.2.forward"} <= {*changes(said)}


def test_transforms_of_ones_own_are_found_in_those_of_a_library():
    own, function = Helper(), lambda image: image
    composed = v2.Compose([v2.Identity(), own, nn.Sequential(v2.Lambda(function)), torch.relu])
    assert replicas.own_parts(composed) == [own, function]


class Momentum(Distils):
    """Moves its teacher towards the model in each pass, from step 3 on, as on one process many do."""

    def training_step(self, batch):
        if self.state.step > 2:
            torch.manual_seed(self.world.rank)
            distributed.all_reduce_max([0.0], self.world)
        loss = super().training_step(batch)
        loss.register_hook(self.move)
        return loss

    def move(self, _):  # in the backward pass
        for mine, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mine.data = mine.data.lerp(new.data, 0.1 * (self.state.step > 2))


@pytest.mark.parametrize(("more", "count"), [("-cpu 1", 6), ("-cpu 2", 7), ("-cpu 2 -deterministic no", 6)])
def test_a_parameter_that_passes_change_is_named(more, count, tmp_path):
    said = [log_of(edited(tmp_path / edit.__name__, more, edit)) for edit in (Momentum, ema.Trainer)]
    assert len(re.findall(rf"training_step changes trainer.teacher.1.weight, .* \({count}\)", said[0])) == 1
    assert "training_step changes" not in said[1]


def test_a_layer_that_takes_its_first_values_again_after_a_resume_is_named(tmp_path):
    def fresh(args):
        model, first = plain_net(), []
        model.register_forward_pre_hook(lambda *_: None if first else first.append(model[1].weight.data.fill_(0.1)))
        return model

    edited(tmp_path, "-cpu 1 -limit_steps 3", net=fresh, wanted=75)
    log = log_of(edited(tmp_path, "-cpu 1", net=fresh))
    assert log.count("training_step changes model.1.weight (1)") == 1


class OwnMean(trainer.Trainer):
    mean = 1.0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


def center(self):
    """Return a mean over the samples that this rank's loader gives."""
    return torch.cat([batch[0] for _, batch in self.loaders["train"].epoch(0)]).mean(0)


DRAWS = with_change(lambda self: nn.init.normal_(self.model[1].weight))
CALIBRATES = acting("finish", lambda self, _: self.model[5].bias.data.add_(center(self).mean()))
KEEPS_CENTER = with_change(lambda self: setattr(self, "kept", nn.ParameterList([center(self)])))
PARTS = acting("after_step", lambda t: t.state.step == 6 and next(t.model.parameters()).data.add_(t.world.rank))
MOVES = with_change(  # moves a buffer by the rank's number
    lambda self: self.model.register_buffer("place", torch.zeros(())),
    overriding(on_epoch_end=lambda self: self.model.place.add_(self.world.rank)),
)
COUNTS_RANKS = acting("after_step", lambda self: setattr(self.state, "samples", self.world.rank))
PARTED = "copies of model.1.weight differ: rank 1, 2 and rank 0.* at step 8; at step 4 all were the same"


@pytest.mark.parametrize(
    ("edit", "more", "message"),
    [
        (OwnMean, "-cpu 2", "copies of self differ"),
        (DRAWS, "-cpu 2 -parallel fsdp", "DTensor random operators"),
        (KEEPS_CENTER, "-cpu 2 -deterministic no", "copies of trainer.kept.0 differ: .* at the start: of the"),
        (CALIBRATES, "-cpu 2", "copies of model.5.bias differ"),
        (COUNTS_RANKS, "-cpu 2", "copies of self.state differ"),
        (MOVES, "-cpu 2", "copies of model.place differ"),
        (PARTS, "-cpu 3", PARTED),
        (PARTS, "-cpu 3 -deterministic no", PARTED),
    ],
)
def test_what_differs_between_the_ranks_is_an_error_that_names_it(edit, more, message, tmp_path, capfd):
    folder = edited(tmp_path, more, edit, wanted=1)
    for said in (outcome(folder)["reason"], capfd.readouterr().err):
        assert re.search(message, said, re.S)


class Restarts(trainer.Trainer):
    """Draws a new head after an epoch without a validation, and has a module in DDP."""

    def __init__(self, *parts):
        super().__init__(*parts)
        side = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        wrapped = nn.parallel.DistributedDataParallel(side) if self.world.size > 1 else side
        self.sides = nn.ModuleDict({"one": wrapped})
        self.side_optimizer = torch.optim.SGD(side.parameters(), lr=0.1)

    def training_step(self, batch):
        return self.loss(self.sides["one"](self.model(batch[0])), batch[1])

    def on_epoch_end(self):
        if self.state.epoch == 1:
            self.model[5].reset_parameters()


def test_what_an_epochs_end_draws_and_an_inner_ddp_have_the_same_bits(tmp_path):
    flags = "-eval_every 3epochs -cpu"
    edited(tmp_path, f"{flags} 1 -model moved -limit_steps 4", Restarts, wanted=75)
    runs = ("1 -model of1", "3 -model of3", "1 -model moved")
    one, three, moved = (weights(edited(tmp_path, f"{flags} {more}", Restarts)) for more in runs)
    assert same_tensors(one, moved) and same_tensors(one, three)


OWN_BACKWARD = acting("training_step", lambda self, batch: self.model(batch[0]).square().mean().backward())
OWN_ZERO = acting("training_step", lambda self, batch: self.optimizer.zero_grad())
LATE = acting("train_epoch", lambda self: self.state.epoch == 1 and vars(self).update(teacher=nn.Linear(1, 1)))
NO_SYNC = overriding(training_step=lambda self, b: self.model.no_sync()(trainer.Trainer.training_step)(self, b))
PartCall = overriding(training_step=lambda self, batch: self.loss(state.unwrap(self.model)[:](batch[0]), batch[1]))
EXCHANGES = acting("evaluation_step", lambda *_: torch.distributed.all_reduce(torch.ones(2)))
OTHER_LOADER = overriding(on_epoch_end=lambda self: self.loaders.update(val=copy.copy(self.loaders["val"])))
PENALTY = lambda self, *parts: [trainer.Trainer.backward(self, *parts), self.model[1].weight.sum().backward()]  # noqa: E731
TWICE = overriding(backward=lambda self, *parts: [trainer.Trainer.backward(self, *parts) for _ in range(2)])
LOGS = overriding(evaluation_step=lambda self, *_: self.log_scalar("sure", 1.0))
RENAMES = overriding(after_step=lambda self: self.log_scalar("lr", 3.0))
HOOKED = with_change(lambda self: self.model[1].weight.register_hook(lambda gradient: gradient / 2))
SECOND_OPTIMIZER = with_change(lambda self: setattr(self, "later", torch.optim.SGD(self.model.parameters(), lr=0.1)))
FROZEN_IN_DDP = with_change(lambda self: state.unwrap(self.model)[1].requires_grad_(False))
NESTED = with_change(lambda self: setattr(self, "model", nn.parallel.DistributedDataParallel(self.model)))
STRAY = with_change(lambda self: setattr(self, "own", torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)))
LOSSES = (None, 0.5, torch.zeros(3), torch.zeros(()))  # none is a scalar tensor with a gradient
RETURNING = [overriding(training_step=lambda *_, loss=loss: loss) for loss in LOSSES]
NEEDED = ("metrics", "config", "engine", "stop", "is_loaded", "log")  # names of the trainer's own attributes
REPLACING = {name: with_change(lambda self, name=name: setattr(self, name, {"seen": 0})) for name in NEEDED}
ODD_GROUP = with_change(lambda self: self.optimizer.param_groups[0].update(odd=object()))
LATE_RATE = acting("after_step", lambda self: self.optimizer.param_groups[0].update(lr=1.0))
LISTED = with_change(lambda self: setattr(self, "optimizer", [self.optimizer]))
FIGURES = {  # what evaluation_step returns: what is said
    lambda self, net, batch, _: {"sure": net(batch[0]).mean()}: "'sure' of a batch of 6 samples is of shape ()",
    lambda *parts: {"sure": 0.5}: "is 0.5: give a tensor with a value for each, (B,), or Ratio(sum, count)",
    lambda self, net, batch, _: {"sure": net(batch[0]).sum(0)}: "'sure' of a batch of 6 samples is of shape (4,)",
    lambda *parts: {"sure": Ratio(torch.ones(4), 6)}: "metric 'sure' is made of 6: give numbers, or a Ratio",
    lambda self, model, batch, count: {"sure": Ratio(batch[1], batch[1] + 1)}: "metric 'sure' is made of tensor([",
    lambda *parts: {"a[0]": Ratio(1, 2)}: "metric 'a[0]' is made of 1",
    lambda *parts: 0.5: "evaluation_step returns 0.5: it must return a dict",
}
REFUSED = [  # flags and what is said
    (acting("train_epoch", DOUBLES), "-cpu 1", "1.weight (1 in all) has changed since step 4 was saved"),
    (OWN_BACKWARD, "-cpu 2", "training_step calls backward by itself"),
    (OWN_BACKWARD, "-cpu 2 -deterministic no", "training_step calls backward by itself"),
    (LOGS, "-cpu 1", "log_scalar('sure') in an evaluation: return it there"),
    (OWN_ZERO, "-cpu 2 -deterministic no", "training_step calls zero_grad by itself"),
    (NESTED, "-cpu 2 -deterministic no", "a DistributedDataParallel is in another"),
    (SECOND_OPTIMIZER, "-cpu 2", "two optimizers train the same parameter"),
    (STRAY, "-cpu 1", "trainer.own (SGD) trains a parameter that neither the model nor a module of the trainer has"),
    (ODD_GROUP, "-cpu 1", "optim.groups.0.odd is a object"),  # no file can hold it
    (LATE, "-cpu 1", "trainer.teacher was made or replaced after the start"),
    (OTHER_LOADER, "-cpu 1", "the loader of val was made or replaced after the start"),
    (TWICE, "-cpu 2", "two backward passes of one micro-batch: add up its losses"),
    (overriding(backward=PENALTY), "-cpu 2 -micro_batch 8", "a backward pass of another loss has set gradients"),
    (LATE_RATE, "-cpu 1", "something set the learning rate to"),
    (LISTED, "-cpu 1", "self.optimizer is a list, no torch.optim.Optimizer"),
    (OwnStep, "-cpu 1 -fp16", "-fp16: optimizer_step must call clip_gradients()"),
    (NO_SYNC, "-cpu 2 -deterministic no", "training_step calls the model within no_sync()"),
    (HOOKED, "-cpu 2 -parallel fsdp", "a parameter has a register_hook, which FSDP never calls"),
    (overriding(optimizer_step=lambda self: None), "-cpu 1", "optimizer_step returns None: it must return the norm"),
    (overriding(train_step=lambda self, batches: next(batches)), "-cpu 1", "ended without all its steps"),
    (with_change(lambda self: ConstantLR(self.optimizer)), "-cpu 1", "a schedule of torch sets the learning rate"),
    (EXCHANGES, "-cpu 2", "evaluation_step exchanges values, not on all"),
    (RENAMES, "-cpu 1", "log_scalar('lr'): the run itself logs train/lr"),
    (FROZEN_IN_DDP, "-cpu 2 -deterministic no", "no backward pass reached the parameter 1.weight"),
    (PartCall, "-cpu 2 -deterministic no", "call the whole model, or take -deterministic"),
    *((edit, "-cpu 1", "not the mean loss, a 0-d tensor") for edit in RETURNING),
    *((edit, "-cpu 1", f"self.{name} is a dict: the trainer needs") for name, edit in REPLACING.items()),
    *((overriding(evaluation_step=edit), "-cpu 1 -micro_batch 8", message) for edit, message in FIGURES.items()),
]


@pytest.mark.parametrize(("edit", "more", "message"), REFUSED)
def test_what_a_trainer_must_not_do_is_refused_in_one_line(edit, more, message, tmp_path, refused):
    assert message in edited(tmp_path, more, edit, plain_net, by=refused)


def test_what_no_manifest_can_hold_is_no_fault_of_the_disk(tmp_path):
    contents = trainer.Trainer.contents
    slips = {"Tensor is not JSON": lambda facts: facts.update(note=torch.ones(1))}
    slips["State has what JSON changes"] = lambda facts: facts["state"].update(sums={1: 2})
    for fault, change in slips.items():
        slip = overriding(contents=lambda self, change=change: [made := contents(self), change(made[1])][0])
        with pytest.raises(TypeError, match=fault):
            edited(tmp_path, "-cpu 1 -reset", slip)


OBSERVES = with_change(  # keeps what this rank has seen in an evaluation in a buffer
    lambda self: [setattr(self, "seen", nn.Module()), self.seen.register_buffer("last", torch.zeros(()))],
    acting("evaluation_step", lambda self, _, batch, count: self.seen.last.copy_(batch[0].mean())),
)


@pytest.mark.parametrize("engine", ["", "-deterministic no"])
def test_a_buffer_that_evaluations_change_is_rank_0s(engine, tmp_path):
    folder = edited(tmp_path, f"-cpu 2 {engine}", OBSERVES)
    assert tensors(folder / "checkpoints" / names(folder)[0])["trainer.seen.last"] != 0


def test_random_numbers_in_a_trainers_init_are_the_same_on_all_ranks_and_at_every_start(tmp_path):
    draws = with_change(lambda self: logging.getLogger("lib.trainer").info("drawn %r", torch.rand(()).item()))
    centers = with_change(lambda self: vars(self).update(center=center(self), zeros=torch.zeros(3)), draws)
    folder = edited(tmp_path, "-cpu 2 -limit_steps 3", centers, wanted=75)
    edited(tmp_path, "-cpu 1", centers)
    assert log_of(folder).count("trainer.center (64,) (1 in all) is another value on other ranks, or in an") == 2
    drawn = [re.findall(r"drawn (.+)", log_of(folder, rank)) for rank in (0, 1)]
    assert [len(numbers) for numbers in drawn] == [2, 1] and len({*drawn[0], *drawn[1]}) == 1


NO_OVERRIDE = with_change(  # has a schedule of torch's, and does not say so
    lambda self: setattr(self, "scheduler", StepLR(self.optimizer, 1)),
    overriding(on_epoch_end=lambda self: self.scheduler.step()),
)


def test_a_rate_that_something_else_sets_is_refused_and_a_removed_line_is_enough(tmp_path, refused):
    flags = "-cpu 1 -save_every 1steps"
    assert "set_learning_rate" in edited(tmp_path, flags, NO_OVERRIDE, by=refused)
    assert bits(edited(tmp_path, f"{flags} -reset")) == bits(edited(tmp_path, f"{flags} -model plain"))


class CollectsPredictions(trainer.Trainer):
    """Computes a figure from what this rank has seen."""

    def evaluation_step(self, model, batch, count):
        self.seen = [*getattr(self, "seen", []), *batch[1][: int(count)].tolist()]
        return super().evaluation_step(model, batch, count)

    def evaluate(self, split):
        self.seen = []
        return {**super().evaluate(split), "spread": float(np.std(self.seen))}


def test_figures_that_differ_between_the_ranks_are_refused_and_the_training_is_saved(tmp_path, refused):
    edited(tmp_path, "-cpu 1 -model alone", CollectsPredictions)
    line = edited(tmp_path, "-cpu 2 -model both", CollectsPredictions, by=refused)
    assert "the figure spread differs between the ranks" in line
    assert names(tmp_path / "both")[0].endswith("_step_4")


def test_a_model_that_get_model_compiles_has_its_own_names_and_signature(tmp_path):
    with plugins(arch={"compiled": lambda args: torch.compile(plain_net(), backend="eager"), "plain": plain_net}):
        for more in ("-cpu 1", "-cpu 2 -deterministic no"):
            both = [run(tmp_path, f"{FLAGS} -arch {n} {more} -model {n}{more[5]}") for n in ("plain", "compiled")]
            assert distance(*both) < ROUNDING
    around = type("Around", (nn.Sequential,), {"_orig_mod": property(lambda self: self[0])})  # as of a compiled part
    assert len(state.model_tensors(around(nn.Linear(2, 2), nn.Linear(2, 1)))) == 4


class Experts(nn.Module):
    """Gives a micro-batch to one of two experts, which its own data choose."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(64, 24), nn.Linear(24, 4)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, inputs):
        return self.head(self.experts[int(inputs.mean() > inputs.flatten()[0])](self.inner(inputs.flatten(1))))


class LayerDrop(Experts):
    """Leaves out its second block by a draw, while it trains."""

    def forward(self, inputs):
        hidden = self.experts[0](self.inner(inputs.flatten(1)))
        return self.head(hidden if self.training and torch.rand(()) < 0.5 else self.experts[1](hidden))


@pytest.mark.parametrize("model", [Experts, LayerDrop])
def test_blocks_that_a_micro_batch_skips_are_right_under_ddp_and_one_line_under_fsdp(model, tmp_path, refused):
    net, stock = lambda args: model(), "-deterministic no -cpu 2 -find_unused -model stock"
    alone = edited(tmp_path, "", net=net, by=same_bits_everywhere)
    if model is Experts:  # the other one draws
        assert distance(edited(tmp_path, stock, net=net), alone) < ROUNDING
    for more in ("", "-deterministic no"):
        said = edited(tmp_path, f"-cpu 2 -parallel fsdp -model sharded {more}", net=net, by=refused)
        assert "a micro-batch skips a block that another one calls (experts." in said


THAWS_UNDER_DDP = with_change(  # adds a layer that was frozen when DDP was built
    lambda self: setattr(self, "thawed", torch.optim.SGD(state.unwrap(self.model)[1].parameters(), lr=0.1)),
    acting("train_epoch", lambda self: state.unwrap(self.model)[1].requires_grad_(True)),
)
WHOLE_TEACHER = with_change(lambda self: self.teacher.requires_grad_(True), Distils)
OWN_OPTIMIZER = lambda self: setattr(self, "own", torch.optim.SGD(self.layer.parameters(), 0.1))  # noqa: E731


@pytest.mark.parametrize("edit", [with_change(OWN_OPTIMIZER, Forgotten), THAWS_UNDER_DDP, Distils, WHOLE_TEACHER])
def test_modules_and_layers_that_ddp_does_not_know_are_summed_and_a_copy_of_the_model_is_a_teacher(edit, tmp_path):
    frozen = lambda args: [net := plain_net(), net[1].requires_grad_(False)][0]  # noqa: E731
    net = frozen if edit is THAWS_UNDER_DDP else plain_net
    both, alone = (edited(tmp_path, f"-deterministic no -cpu {n} -model of{n}", edit, net) for n in (2, 1))
    assert distance(both, alone) < ROUNDING


def test_a_model_that_a_trainer_compiles_has_its_own_names(plain, tmp_path):
    compiles = with_change(lambda self: setattr(self, "model", torch.compile(self.model, backend="eager")))
    folder = edited(tmp_path, "-deterministic no -cpu 2", compiles)
    assert weights(folder).keys() == plain.keys() and changes(log_of(folder)) == []


class HookedDDP(nn.parallel.DistributedDataParallel):
    def __init__(self, *parts, **options):
        super().__init__(*parts, **options)
        self.register_comm_hook(None, debugging_hooks.noop_hook)


def test_a_communication_hook_takes_effect_or_is_refused(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(parallel, "DistributedDataParallel", HookedDDP)
    assert "DDP's communication hook has no effect in the exact engine" in refused(f"{FLAGS} -cpu 2")
    folder = run(tmp_path, f"{STOCK} -model hooked", wanted=1)  # without the sum
    assert "the copies of model.1.weight differ: rank 1 and rank 0" in outcome(folder)["reason"]


def test_an_order_that_is_another_on_a_rank_or_at_a_start_is_refused(tmp_path, monkeypatch, refused):
    run(tmp_path, f"{FLAGS} -limit_steps 4", wanted=75)
    sums = check_code.checksums()
    monkeypatch.setattr(check_code, "checksums", lambda: sums | {"lib/own.py": distributed.current_world().rank})
    assert "lib/own.py (1 in all) of rank 1 is not that of rank 0" in refused(f"{FLAGS} -cpu 2")
    monkeypatch.setattr(check_code, "checksums", lambda: dict.fromkeys(sums, 0))
    assert "has changed since the last start" in log_of(run(tmp_path, f"{FLAGS} -limit_steps 5", wanted=75))
    monkeypatch.setattr(plan, "order", lambda samples, *_: torch.arange(samples) + torch.distributed.get_rank())
    assert "the train samples of rank 1 are not those of rank 0" in refused(f"{FLAGS} -cpu 2")
    monkeypatch.setattr(plan, "order", lambda samples, *_: torch.arange(samples))
    assert "order digest was" in refused(FLAGS)


def test_an_order_of_ones_own_and_groups_by_name_are_the_same_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "decay_groups", lambda one, _: [{"params": [one.get_submodule("1").weight]}])
    monkeypatch.setattr(loader, "order", lambda samples, *_: torch.randperm(samples))
    with plugins(arch={"plain": plain_net}):
        alone = same_bits_everywhere(tmp_path, f"{FLAGS} -arch plain -workers 1", (3, 2), (7, 3))
        assert distance(alone, run(tmp_path, f"{STOCK} -arch plain -model stock")) < ROUNDING


def fetched_ahead(self, batches):
    """Take a step whose micro-batches are there before its first pass."""
    ahead = [next(batches)]
    while not ahead[-1][0].last:
        ahead.append(next(batches))
    trainer.Trainer.train_step(self, iter(ahead))


def test_draws_of_a_pass_and_of_an_epochs_start_depend_on_their_place_alone(tmp_path):
    draws = acting("train_epoch", lambda self: setattr(self.loss, "label_smoothing", float(torch.rand(()))))
    evaluates = acting("training_step", lambda self, _: self.evaluate("val") if self.micro_batch.first else None)
    edit = type("Ahead", (draws, evaluates), {"train_step": fetched_ahead})
    net = lambda args: nn.Sequential(nn.Dropout(0.3), plain_net())  # noqa: E731
    assert "torch's seed" not in log_of(edited(tmp_path, "-micro_batch 8", edit, net, by=same_bits_everywhere))


def balanced(net, _, outputs):
    """Give outputs that a kept number is a part of, and keep another one, which no loss has."""
    net.used, net.load = outputs.mean(), outputs.square().mean()
    return (outputs + net.used) * net.phase.real


def some_rows(self, batch):
    """Return the mean loss over the first sample and those of other classes than the first."""
    rows = torch.cat([torch.tensor([0]), batch[1].nonzero().flatten()])
    return nn.functional.cross_entropy(self.model(batch[0])[rows], batch[1][rows])


def test_a_mean_over_another_number_in_each_micro_batch_is_named(tmp_path):
    made = type("Some", (trainer.Trainer,), {"training_step": some_rows})
    assert log_of(edited(tmp_path, "-cpu 1 -micro_batch 8", made)).count("the loss has a mean over") == 1
    x, y = torch.randn(6, 3, requires_grad=True), torch.arange(6) % 3
    losses = nn.CrossEntropyLoss()(x, y), -2 * nn.MSELoss()(x, x.detach()) + x.mean(), x.abs().sum() / 7, x.max() / 9
    losses += nn.CrossEntropyLoss(reduction="sum")(x, y) / len(y), x.square().sum()
    assert [[*check_loss.sizes_of_means(one.grad_fn)] for one in losses] == [[6], [18, 18], [7], [], [6], []]


def test_a_kept_part_of_a_loss_is_named_and_complex_numbers_are_trained_averaged_and_saved(tmp_path):
    net = plain_net()
    net.register_parameter("phase", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    net.register_forward_hook(balanced)
    new = lambda args: copy.deepcopy(net)  # noqa: E731
    folder = edited(tmp_path, "-micro_batch 8", ema.Trainer, new, by=same_bits_everywhere)
    assert log_of(folder).count("model.load (1 in all) has a gradient, and is no part of the loss") == 1
    plain = edited(tmp_path, "-micro_batch 8 -cpu 1 -model plain", net=new)
    assert weights(folder)["phase"].is_complex() and distance(folder, plain) > 0
