"""A trainer's own modules and optimizers, including averaged weights, are saved and resumed exactly."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
import saves
import torch
from runs import distance, plugins, run, same_tensors, weights
from saves import SMALL, bits, names
from torch import nn

from lib.trainer import ema, trainer
from lib.utils.checkpoint import shards, state

pytestmark = pytest.mark.usefixtures("small_plugins")
SLOW = f"{SMALL} -lr_start 1e-4"  # rounding stays small
EMA = f"{SLOW} -trainer ema -ema_decay 0.5"


class WithCritic(trainer.Trainer):
    """Has states of many kinds: late, in lists and dicts, a scheduler, replaced buffers, parts of the model."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.critic = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.heads = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.other_optimizers = {str(n): torch.optim.Adam(head.parameters()) for n, head in enumerate(self.heads)}
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.other_optimizers["0"], [4, 8])
        self.own = Own()
        self.notes = nn.Module()
        self.notes.register_buffer("center", torch.zeros(4))
        self.notes.register_buffer("now", torch.tensor(0))
        self.head = self.model[-1]
        self.same_optimizer, self.saved_elsewhere = self.optimizer, [*self.model.children(), self.optimizer]

    def training_step(self, batch):
        self.notes.now.fill_(self.state.step)  # while a save in the background may still read it
        outputs = self.model(batch[0])
        loss = self.loss(self.heads[0](outputs) + self.heads[1](outputs) * self.own.scale, batch[1])
        return loss + self.critic(outputs.detach() - self.notes.center).square().mean()

    def due_optimizers(self):
        return [one for one in self.all_optimizers if self.state.step or one is not self.critic_optimizer]

    def optimizer_step(self):
        norm = super().optimizer_step()
        self.critic_optimizer.zero_grad()
        self.scheduler.step()
        self.own.count(self.state.step)
        self.notes.center = self.notes.center + self.head.bias.detach()
        return norm


class Own:
    """Keeps tensors, numbers and lists, by the field's protocol."""

    def __init__(self):
        self.scale, self.steps, self.odd = torch.ones(1, 1), [], {3: (1.5, None), "x": Counter("aab")}

    def count(self, step):
        self.scale, self.steps = self.scale * 1.01, [*self.steps, step]

    def state_dict(self):
        return {"scale": self.scale, "steps": self.steps, "odd": self.odd}

    def load_state_dict(self, state):
        assert repr(state["odd"]) == repr(self.odd)
        vars(self).update(state)


@pytest.fixture
def slow_writes(monkeypatch):
    """Slow down the writing of checkpoint files, and the swap of averaged weights even more."""
    real, swap = shards.write, ema.Trainer.swap
    monkeypatch.setattr(shards, "write", lambda *args: (time.sleep(0.03), real(*args))[1])
    monkeypatch.setattr(ema.Trainer, "swap", lambda *args, **back: (swap(*args, **back), time.sleep(0.05)))


def run_with_stops(out, flags, *limits):
    """The folder of a run that was stopped at each of these steps and resumed."""
    for limit in limits:
        run(out, f"{flags} -limit_steps {limit}", wanted=75)
    return run(out, flags)


def all_saved(folder):
    """All tensors of all checkpoints, by step: a stop makes one more of its step."""
    steps = {name.partition("_step_")[2]: name for name in names(folder)}
    found = {step: saves.tensors(folder / "checkpoints" / name) for step, name in steps.items()}
    return {f"{step} {tensor}": value for step, one in found.items() for tensor, value in one.items()}


def test_whatever_has_a_state_resumes_exactly(tmp_path, request):
    flags = f"{SLOW} -trainer pair -save_every 1steps -keep_last 99 -model"
    with plugins(trainer={"pair": WithCritic}):
        whole = run(tmp_path, f"{flags} whole -cpu 3")
        single = run(tmp_path, f"{flags} alone -cpu 1")
        request.getfixturevalue("slow_writes")
        part = run_with_stops(tmp_path, f"{flags} part -cpu 3", 1, 5)
    truth = saves.tensors(whole / "checkpoints" / names(whole)[0])
    assert same_tensors(all_saved(part), all_saved(whole)) and len(names(whole)) == 12
    assert bits(whole) == bits(single)
    manifests = [state.read_manifest(folder / "checkpoints" / names(folder)[0]) for folder in (whole, part)]
    one, other = (manifest["states"] for manifest in manifests)
    assert one == other and {"trainer.scheduler", "trainer.own", "trainer.other_optimizers.1", "optim"} < one.keys()
    own = [name.split(".")[1] for name in truth if not name.startswith(("model.", "optim."))]
    assert {*own} == {"critic", "critic_optimizer", "heads", "other_optimizers", "notes", "own"}
    assert len(own) == 8 + 8 * 3 + 3, "nothing is saved twice: parameters, three values of Adam for each, and others"
    assert truth["trainer.notes.center"].abs().sum() > 0
    assert truth["trainer.critic_optimizer.trainer.critic.0.bias.step"] == 11


def test_resuming_with_a_trainer_that_has_other_modules_is_refused(tmp_path, refused):
    flags = f"{SMALL} -cpu 1 -trainer pair"
    with plugins(trainer={"pair": trainer.Trainer}):
        run(tmp_path, f"{flags} -limit_steps 5", wanted=75)
    with plugins(trainer={"pair": WithCritic}):
        assert "optimizer or trainer: trainer.critic.0.bias was None" in refused(flags)


@pytest.fixture(scope="module")
def averaged(small_plugins, tmp_path_factory):
    """A run with averaged weights and a checkpoint of each step."""
    return run(tmp_path_factory.mktemp("averaged"), f"{EMA} -cpu 2 -save_every 1steps -keep_last 99")


def test_averaged_weights_are_the_moving_average_after_each_step(averaged):
    expected = {}
    by_step = dict(zip(saves.steps(averaged), names(averaged), strict=True))
    for step in range(1, 13):
        tensors = saves.tensors(averaged / "checkpoints" / by_step[step])
        decay = min(0.5, (step - 1) / (step + 8))
        now = {name: tensors[name].double() for name in tensors if name.startswith("model.")}
        expected = {name: decay * expected.get(name, value) + (1 - decay) * value for name, value in now.items()}
        for name in expected:
            kept = tensors.get(f"trainer.average.{name.removeprefix('model.').replace('.', '/')}")
            assert (kept is None) == (name == "model.2.num_batches_tracked")
            assert kept is None or torch.allclose(kept.double(), expected[name], rtol=1e-5, atol=1e-7), (step, name)
    final = weights(averaged)
    for name in {*final} - {"2.num_batches_tracked"}:
        assert torch.allclose(final[name].double(), expected[f"model.{name}"], rtol=1e-5, atol=1e-7), name
    assert not torch.equal(final["5.weight"], tensors["model.5.weight"])


def test_an_exchange_with_averages_is_undone_where_weights_share_memory():
    weight, averages = torch.randn(3, 3), [torch.zeros(3, 3), torch.zeros(3, 3)]
    kept, both = weight.clone(), SimpleNamespace(local_tensors=lambda: (averages, [weight, weight.t()]))
    assert [(ema.Trainer.swap(both, back), torch.equal(weight, kept))[1] for back in (False, True)] == [False, True]


@pytest.mark.parametrize("flags", ["-cpu 2 -save_every 1steps -keep_last 99", "-cpu 2 -parallel fsdp"])
def test_averaged_weights_resume_exactly_also_on_another_number_of_processes(averaged, slow_writes, flags, tmp_path):
    folder = run_with_stops(tmp_path, f"{EMA} {flags}", 5)
    run(tmp_path, f"{EMA} {flags} -model moved -limit_steps 7", wanted=75)
    moved = run(tmp_path, f"{EMA} -cpu 1 -model moved")
    if "fsdp" in flags:  # its optimizer rounds differently
        assert max(distance(folder, averaged), distance(moved, averaged)) < 1e-5
    else:
        assert same_tensors(all_saved(folder), all_saved(averaged)) and bits(folder) == bits(moved) == bits(averaged)
