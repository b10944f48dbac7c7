"""What a trainer keeps beside the model, weights averaged over steps among them: saved, and gone on with exactly."""

import json
import time

import pytest
import saves
import torch
from runs import distance, outcome, plugins, run, same, weights
from saves import SMALL, log_of, names
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lib.trainer import trainer
from lib.trainer.ema import Average
from lib.utils import copies
from lib.utils.state import unwrap

pytestmark = pytest.mark.usefixtures("small_plugins")
SLOW = f"{SMALL} -lr_start 1e-4"  # rounding stays small
EMA = f"{SLOW} -trainer ema -ema_decay 0.5"


class Pair(trainer.Trainer):
    """Keeps a critic with an optimizer of its own, a tensor that each step replaces, and a part of the model."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.critic = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.critic = DistributedDataParallel(self.critic) if self.world.size > 1 else self.critic
        self.notes = nn.Module()
        self.notes.register_buffer("center", torch.zeros(4))
        self.notes.register_buffer("now", torch.tensor(0))
        self.head = unwrap(self.model)[-1]

    def training_step(self, batch):
        self.notes.now.fill_(self.state.step)  # beside a save that may not be through with it
        outputs = self.model(batch[0])
        return self.loss(outputs, batch[1]) + self.critic(outputs.detach() - self.notes.center).square().mean()

    def step(self, samples):
        super().step(samples)
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()
        self.notes.center = self.notes.center + self.head.bias.detach()


class Stray(trainer.Trainer):
    """An optimizer of what no module has."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.second = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)


def held(folder, name=None):
    """All tensors of a checkpoint of a run, or else of the last one."""
    return saves.tensors(folder / "checkpoints" / (name or names(folder)[0]))


def test_a_second_model_and_optimizer_go_on_exactly(tmp_path, monkeypatch):
    words = f"{SLOW} -trainer pair -save_every 1steps -keep_last 99 -model"
    with plugins(trainer={"pair": Pair, "stray": Stray}):
        whole = run(tmp_path, f"{words} whole -cpu 2")
        real = copies.Copies._make
        monkeypatch.setattr(copies.Copies, "_make", lambda *words: (time.sleep(0.03), real(*words)))
        part = run(tmp_path, f"{words} part -cpu 2 -limit_steps 5", wanted=75)
        run(tmp_path, f"{words} part -cpu 2")
        monkeypatch.setattr(copies.Copies, "_make", real)
        alone = run(tmp_path, f"{words} alone -cpu 1 -limit_steps 7", wanted=75)
        run(tmp_path, f"{words} alone -cpu 2")
    truth, other = held(whole), held(alone)
    assert all(same(held(part, name), held(whole, name)) for name in names(whole)) and len(names(whole)) == 13
    assert all((truth[name] - other[name]).abs().max() < 1e-5 for name in truth if truth[name].is_floating_point())
    own = {name for name in truth if not name.startswith(("model.", "optim."))}
    critic = {f"trainer.critic.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    memory = {
        f"trainer.critic_optimizer.{name}.{word}" for name in critic for word in ("step", "exp_avg", "exp_avg_sq")
    }
    assert own == critic | memory | {"trainer.notes.center", "trainer.notes.now"}, (
        "what is the model's is not there twice"
    )
    assert (
        truth["trainer.notes.center"].abs().sum() > 0
        and truth["trainer.critic_optimizer.trainer.critic.0.bias.step"] == 12
    )


def test_an_optimizer_of_what_no_checkpoint_would_hold_is_refused(tmp_path, capfd):
    with plugins(trainer={"stray": Stray}):
        run(tmp_path, f"{SMALL} -cpu 1 -trainer stray", wanted=2)
    told = capfd.readouterr().err.splitlines()[-1]
    assert "trainer.second (SGD) trains what neither the model nor a module that the trainer keeps has" in told


@pytest.fixture(scope="module")
def averaged(small_plugins, tmp_path_factory):
    """A run with weights averaged over its steps, a checkpoint of each."""
    return run(tmp_path_factory.mktemp("averaged"), f"{EMA} -cpu 2 -save_every 1steps -keep_last 99")


def test_the_average_is_that_of_the_weights_after_each_step(averaged):
    expected = {}
    by_step = {int(name.split("_")[1]): name for name in names(averaged)}
    for step in range(1, 13):
        tensors = saves.tensors(averaged / "checkpoints" / by_step[step])
        decay = min(0.5, (step - 1) / (step + 8))
        now = {name: tensors[name].double() for name in tensors if name.startswith("model.")}
        expected = {name: decay * expected.get(name, value) + (1 - decay) * value for name, value in now.items()}
        for name in expected:
            kept = tensors.get(f"trainer.average.held.{name.removeprefix('model.').replace('.', '/')}")
            assert (kept is None) == (name == "model.2.num_batches_tracked")
            assert kept is None or torch.allclose(kept.double(), expected[name], rtol=1e-5, atol=1e-7), (step, name)
    final = weights(averaged)
    for name in {*final} - {"2.num_batches_tracked"}:
        assert torch.allclose(final[name].double(), expected[f"model.{name}"], rtol=1e-5, atol=1e-7), name
    assert not torch.equal(final["5.weight"], tensors["model.5.weight"])


@pytest.mark.parametrize("words", ["-cpu 2", "-cpu 2 -parallel fsdp"])
def test_averaged_weights_go_on_exactly_and_are_the_same_on_other_processes(averaged, words, tmp_path):
    run(tmp_path, f"{EMA} {words} -limit_steps 5", wanted=75)
    folder = run(tmp_path, f"{EMA} {words}")
    if words == "-cpu 2":
        assert same(held(folder), held(averaged)) and same(weights(folder), weights(averaged))
    assert distance(folder, averaged) < 1e-5
    moved = run(tmp_path, f"{EMA} {words} -model moved -limit_steps 7", wanted=75)
    run(tmp_path, f"{EMA} -cpu 1 -model moved")
    assert distance(moved, averaged) < 1e-5


def test_evaluations_are_of_the_averaged_weights(averaged, tmp_path):
    run(averaged.parent, f"{EMA} -cpu 1 -eval -weights {averaged / 'final' / 'weights.safetensors'}")
    told = json.loads((averaged / "eval.json").read_text())
    assert told["test"]["loss"] == pytest.approx(outcome(averaged)["test"]["loss"], rel=1e-5)


def test_a_run_takes_up_another_trainer_where_that_is_allowed(tmp_path):
    folder = run(tmp_path, f"{SMALL} -cpu 2 -limit_steps 5", wanted=75)
    run(tmp_path, f"{SMALL} -cpu 2 -trainer ema -allow_change trainer -limit_steps 9", wanted=75)
    assert "its trainer is another one: this one begins without memory" in log_of(folder)
    assert held(folder)["trainer.average.steps"] == 4
    run(tmp_path, f"{SMALL} -cpu 2 -allow_change trainer")
    assert not [name for name in held(folder) if name.startswith("trainer.")]


def test_an_average_is_swapped_in_and_out_without_a_trace():
    tensors = {"a.b": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    average = Average(tensors, decay=0.9)
    average.swap(tensors)
    assert tensors["a.b"].tolist() == [1.0, 2.0], "there is no average yet"
    average.update({"a.b": torch.tensor([5.0, 6.0])})
    for values in ([5.0, 6.0], [1.0, 2.0]):
        average.swap(tensors)
        assert tensors["a.b"].tolist() == values and tensors["count"] == 3
