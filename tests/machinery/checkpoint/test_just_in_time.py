"""Processes are killed at every place of a run: those left save the last whole step, and no bit differs after it."""

import contextlib
import os
import signal
from typing import ClassVar

import pytest
import torch
from disk import fail_writes
from runs import lines, norm_net, outcome, plugins, run, same_tensors, weights
from saves import PLUGINS, SMALL, at_step, bits, change_manifest, kept, log_of, steps, tensors

from lib.launch import local
from lib.trainer import ema, trainer
from lib.utils import distributed
from lib.utils.checkpoint import run_folder
from lib.utils.checkpoint.state import read_manifest
from lib.utils.data.loader import Loader

FLAGS = f"{SMALL} -trainer deadly -log_every 2 -eval_every 3steps -save_every 3steps"


class Deadly(trainer.Trainer):
    """Ranks kill themselves at a place of a step: {rank: (place, step)}."""

    deaths: ClassVar[dict[int, tuple[str, int]]] = {}

    def __init__(self, *parts):
        super().__init__(*parts)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)  # but among what an optimizer trains
        self.optimizer.add_param_group({"params": [*self.frozen.parameters()]})

    def reach(self, place):
        if self.deaths.get(self.world.rank) == (place, self.state.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch):
        self.reach("pass")
        return [super().training_step(batch), self.reach("backward")][0]

    def optimizer_step(self):
        self.reach("update")
        return super().optimizer_step()

    def log(self):
        if self.state.step == 7:
            self.checkpoints.finish()  # that of step 6 is there
        if self.checks.steps:
            self.reach("vote")
        super().log()

    def evaluation_step(self, model, batch, count):
        self.reach("evaluation")
        return super().evaluation_step(model, batch, count)

    def on_evaluation(self, split, figures):
        self.reach("evaluated")

    def on_epoch_end(self):
        self.reach("epoch end")
        distributed.all_reduce_max([0.0], self.world)  # as a trainer of its own may do

    def contents(self):
        self.reach("save")
        return super().contents()


class AveragesLate(Deadly):
    """It changes what a checkpoint has after a step's vote, or before an exchange, in which a peer may be lost."""

    def optimizer_step(self):
        self.state.best, _ = {"metric": "half", "epoch": 1, "evaluation": 1}, self.reach("half")
        distributed.all_reduce_max([0.0], self.world)
        return super().optimizer_step()

    def after_step(self):
        super().after_step()
        self.state.best = {"metric": "late", "epoch": 1, "evaluation": 1}


class DeadlySwap(Deadly):
    """It evaluates other weights, and has no `finally`."""

    @contextlib.contextmanager
    def evaluated_weights(self):
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
            yield
            for parameter, values in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(values)


class Counting(Deadly):
    """It counts passes, and has a state."""

    passes = 0

    def training_step(self, batch):
        self.passes += 1
        return super().training_step(batch)

    state_dict = lambda self: {"passes": self.passes}  # noqa: E731
    load_state_dict = lambda self, state: vars(self).update(state)  # noqa: E731


def counting_net(args):
    """It counts passes, in a buffer."""
    model = norm_net(args)
    model.register_buffer("passes", torch.zeros((), dtype=torch.int64))
    model.register_forward_pre_hook(lambda module, _: setattr(module, "passes", module.passes + 1))
    return model


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A run of three processes that nobody kills, with a checkpoint of each step."""
    trainers = {"deadly": Deadly, "counting": Counting, "swap": DeadlySwap, "late": AveragesLate}
    with plugins(dataset=PLUGINS["dataset"], arch={**PLUGINS["arch"], "counting": counting_net}, trainer=trainers):
        yield run(tmp_path_factory.mktemp("truth"), f"{FLAGS} -cpu 3 -save_every 1steps -keep_last 99")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(local, "SHUTDOWN_S", 0.3)


def killed(patch, out, deaths, size=3, more=""):
    with patch.context() as now:
        now.setattr(Deadly, "deaths", deaths)
        return run(out, f"{FLAGS} -cpu {size} {more}", wanted=1)


def test_a_run_with_restarts_starts_again_by_itself_and_has_the_same_bits(truth, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Deadly, "deaths", {1: ("vote", 5)})
    folder = run(tmp_path, f"{FLAGS} -cpu 3 -reset -restarts 1")  # -reset is done once
    assert same_tensors(weights(folder), weights(truth)) and outcome(folder)["best"] == outcome(truth)["best"]
    assert "starting again: 1 of -restarts 1" in capfd.readouterr().err
    monkeypatch.setattr(Deadly, "deaths", {0: ("vote", 5)})  # alone: nobody saves that step, and it dies each time
    run(tmp_path, f"{FLAGS} -cpu 1 -model one -restarts 2", wanted=1)
    assert "starting again: 2 of -restarts 2" in capfd.readouterr().err


PLACES = {
    "in a pass": ({1: ("backward", 7)}, 7),
    "rank 0 in a pass": ({0: ("pass", 7)}, 7),
    "after the exchange": ({2: ("update", 6)}, 7),
    "rank 0 after the exchange": ({0: ("update", 6)}, 7),
    "before a vote": ({1: ("vote", 7)}, 7),
    "rank 0 before a log line": ({0: ("vote", 8)}, 8),
    "in an evaluation": ({2: ("evaluation", 6)}, 6),
    "rank 0 in an evaluation": ({0: ("evaluation", 6)}, 6),
    "rank 0 with the best weights": ({0: ("evaluated", 6)}, 6),
    "in a save": ({1: ("save", 9)}, 9),
    "rank 0 in a save": ({0: ("save", 9)}, 9),
    "two at once": ({0: ("pass", 7), 1: ("pass", 7)}, 7),
    "and one of those left in its save": ({1: ("pass", 7), 0: ("save", 7)}, 7),
}


@pytest.mark.parametrize(
    "place", [pytest.param(one, marks=[] if one == "in an evaluation" else pytest.mark.slow) for one in PLACES]
)
def test_a_killed_process_costs_no_step_and_no_bit(place, truth, tmp_path, monkeypatch, capfd):
    deaths, step = PLACES[place]
    folder = killed(monkeypatch, tmp_path, deaths)
    assert steps(folder)[0] == step
    made, wanted = (one / "checkpoints" / at_step(one, step) for one in (folder, truth))  # truth saves on purpose
    one, other = read_manifest(made), read_manifest(wanted)
    assert all(one["state"][name] == other["state"][name] for name in ("step", "samples", "grad_norm"))
    assert one["states"] == other["states"] and same_tensors(tensors(made), tensors(wanted))
    assert f"step {step} is saved; resume: python train.py -cfg {folder}/config.yaml" in capfd.readouterr().err
    assert outcome(folder)["lost_peer"]
    run(tmp_path, f"{FLAGS} -cpu 3")
    assert bits(folder) == bits(truth)


def test_a_process_that_is_lost_in_its_first_step_leaves_nothing(truth, tmp_path, monkeypatch, capfd):
    assert not steps(killed(monkeypatch, tmp_path, {1: ("pass", 0)}))
    assert "is saved" not in capfd.readouterr().err
    assert steps(killed(monkeypatch, tmp_path, {1: ("epoch end", 8)}))[0] == 6, "an epoch's end is done again"


@pytest.mark.parametrize(
    "more", ["-keep_every 1", "-trainer ema -ema_decay 0.9 -train_metrics", "-trainer swap", "-deterministic no"]
)
def test_milestones_averages_and_metrics_are_those_of_a_run_that_nobody_killed(more, truth, tmp_path, monkeypatch):
    monkeypatch.setattr(ema, "Trainer", type("DeadlyAverage", (Deadly, ema.Trainer), {}))
    calm = run(tmp_path / "calm", f"{FLAGS} -cpu 2 {more}")
    place, step = {"-keep": ("save", 8), "-dete": ("backward", 7)}.get(more[:5], ("evaluation", 6))
    folder = killed(monkeypatch, tmp_path, {1: (place, step)}, size=2, more=more)
    assert steps(folder)[0] == step
    run(tmp_path, f"{FLAGS} -cpu 2 {more}")
    assert bits(folder) == bits(calm) and kept(folder) == kept(calm)


def test_what_one_rank_alone_has_counted_since_the_last_line_is_null(truth, tmp_path, monkeypatch):
    folder = killed(monkeypatch, tmp_path, {1: ("pass", 7)}, more="-train_metrics")
    run(tmp_path, f"{FLAGS} -cpu 3 -train_metrics")
    [line] = [line for line in lines(folder) if line["step"] == 8 and "train/loss" in line]
    [wanted] = [line for line in lines(truth) if line["step"] == 8 and "train/loss" in line]
    assert line["train/loss"] == wanted["train/loss"] and line["train/accuracy"] is None


@pytest.mark.parametrize(
    ("more", "place", "reason"),
    [
        ("-deterministic no", "pass", "rank 0's statistics"),
        ("-parallel fsdp", "pass", "it lacks a part"),
        ("-arch counting", "pass", "a counter, a queue or a teacher"),
        ("-trainer counting", "pass", "a counter, a queue or a teacher"),
        ("-trainer late", "half", ""),  # the update is not over
        ("-trainer late", "vote", ""),  # after_step is not over
    ],
)
def test_where_a_part_may_be_lacking_the_last_save_counts(more, place, reason, truth, tmp_path, monkeypatch):
    folder = killed(monkeypatch, tmp_path, {int("deter" not in more): (place, 7)}, size=2, more=more)
    assert steps(folder)[0] == 6 and reason in log_of(folder, int("deter" in more))


def test_where_the_disk_is_full_the_reason_of_the_end_is_still_the_lost_process(truth, tmp_path, monkeypatch):
    fail_writes(monkeypatch, lambda rank, step: step == 7)
    folder = killed(monkeypatch, tmp_path, {1: ("pass", 7)})
    assert steps(folder)[0] == 6 and outcome(folder)["lost_peer"]
    assert "does not save the last whole step" in log_of(folder) and "No space left" in log_of(folder)


def test_a_folder_that_another_launch_has_begun_is_left_alone(truth, tmp_path, monkeypatch):
    real = run_folder.take_over

    def begun(folder, launch):
        run_folder.write_outcome(folder, distributed.World(launch="another"), "running")
        return real(folder, launch)

    monkeypatch.setattr(run_folder, "take_over", begun)
    folder = killed(monkeypatch, tmp_path, {1: ("pass", 7)})
    assert steps(folder)[0] == 6 and outcome(folder)["launch"] == "another"
    assert "another start has the run's folder" in log_of(folder)


def test_a_newer_checkpoint_that_is_damaged_is_no_reason_not_to_save(truth, tmp_path, monkeypatch):
    folder = run(tmp_path, f"{FLAGS} -cpu 2 -limit_steps 8", wanted=75)
    [shard] = (folder / "checkpoints" / at_step(folder, 8)).glob("*.safetensors")
    shard.write_bytes(b"")
    killed(monkeypatch, tmp_path, {1: ("pass", 7)}, size=2)
    assert steps(folder)[0] == 7


def test_a_checkpoint_without_the_newest_field_of_the_state_is_resumed(truth, tmp_path):
    folder = run(tmp_path, f"{FLAGS} -cpu 1 -limit_steps 7", wanted=75)
    change_manifest(folder / "checkpoints" / at_step(folder, 7), lambda made: made["state"].pop("grad_norm") < 0)
    run(tmp_path, f"{FLAGS} -cpu 1")
    assert "resuming from" in log_of(folder) and "step 7" in log_of(folder)


def test_only_data_that_cannot_be_read_cost_a_single_process_no_step(truth, tmp_path, monkeypatch):
    def reach(self, place):
        if (place, self.state.step) == ("pass", 7):
            raise ConnectionResetError("of a data set's server")

    def epoch(self, number, first=0):
        for micro_batch, batch in real(self, number, first):
            if self.shuffle and (number, micro_batch.step) == (1, 3):
                raise ConnectionResetError("of a data set's server")
            yield micro_batch, batch

    real = Loader.epoch
    for owner, name, fault, step in ((Deadly, "reach", reach, 6), (Loader, "epoch", epoch, 7)):
        with monkeypatch.context() as patch, pytest.raises(ConnectionResetError):
            patch.setattr(owner, name, fault)
            run(tmp_path, f"{FLAGS} -cpu 1")
        assert steps(tmp_path / "few_norm_net")[0] == step
    assert same_tensors(weights(run(tmp_path, f"{FLAGS} -cpu 1")), weights(truth))
