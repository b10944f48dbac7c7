"""A run of N steps, validations and saves at any interval, early stopping, and several validation sets."""

import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import saves
import torch
from command_line import refusal
from runs import distance, few, lines, outcome, run, same_tensors, weights
from saves import SMALL, bits
from truth import file_plugins

from lib import config
from lib.trainer import trainer
from lib.utils.checkpoint import manager
from lib.utils.distributed import World

# 4 steps an epoch: the run ends in the third epoch, after validations at steps 3, 6, 9 and 10.
STEPS = f"{SMALL.replace('-epochs 3', '-steps 10')} -eval_every 3steps"
LONG = SMALL.replace("-epochs 3", "-epochs 12 -log_every 1")


def two_sets(args):
    data = few(args)
    return {"train": data["train"], "val_clean": data["test"], "val": data["val"], "test": data["test"]}


class BadSteps(trainer.Trainer):
    def training_step(self, batch):
        return super().training_step(batch) * (math.nan if 5 <= self.state.step < 8 else 1)

    def after_step(self):
        self.checkpoints.finish()
        super().after_step()


class NotesEvaluations(trainer.Trainer):
    def on_evaluation(self, split, figures):
        self.log_scalar(f"{split}_loss", figures["loss"])

    def on_epoch_end(self):
        self.log_scalar("ended", self.state.epoch)


_plugins = file_plugins(dataset={"two_sets": two_sets}, trainer={"notes": NotesEvaluations, "bad_steps": BadSteps})


@pytest.fixture(scope="module")
def undisturbed(_plugins, tmp_path_factory):
    return run(tmp_path_factory.mktemp("steps"), f"{STEPS} -cpu 1")


def test_a_run_of_n_steps_ends_there_and_its_schedule_with_it(undisturbed):
    logged, result = lines(undisturbed), outcome(undisturbed)
    assert [line["step"] for line in logged if "val/loss" in line] == [3, 6, 9, 10]
    assert [line["step"] for line in logged if "train/loss" in line] == [4, 8, 10]
    assert logged[-1]["step"] == 10 and [line["train/lr"] for line in logged if "train/lr" in line][-1] == 1e-6
    assert (result["state"], result["step"], result["epoch"], result["evaluations"]) == ("finished", 10, 2, 4)
    usual = r"step 10/10  loss \S+  mean \S+  lr 1.0e-06  grad \S+  \S+ samples/s  data \d+ %  mem \S+ GB  left 00:00"
    assert re.search(usual, saves.log_of(undisturbed))
    assert config.parse_args(["-cfg", str(undisturbed / "config.yaml")], describe=False).steps == 10


@pytest.mark.parametrize(("stop", "cpu"), [(3, 2), (5, 3), (6, 1), (10, 2)])
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits_and_the_same_log(stop, cpu, undisturbed, tmp_path):
    """At the steps 3, 6 and 10 the stop comes before the validation, which is left to the next start."""
    folder = saves.run_until(tmp_path, f"{STEPS} -cpu 2 -save_every 2steps", stop)
    assert sum("val/loss" in line for line in lines(folder)) == (stop - 1) // 3
    run(tmp_path, f"{STEPS} -cpu {cpu} -save_every 2steps")
    assert bits(folder) == bits(undisturbed) and outcome(folder)["best"] == outcome(undisturbed)["best"]


def test_early_stopping_counts_validations(tmp_path):
    result = outcome(run(tmp_path, f"{STEPS} -cpu 1 -best loss:max -stop_after 2"))
    assert (result["step"], result["evaluations"], result["best"]["step"]) == (9, 3, 3), "the loss falls"
    assert result["reason"].startswith("-stop_after 2")


@pytest.fixture(scope="module")
def full_run(small_plugins, tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), f"{LONG} -cpu 1 -best loss -save_every 1epoch -keep_last 99")


def expected_stop(folder, metric: str, sign: int, patience: int) -> tuple[int, int]:
    """The first epoch that the next `patience` epochs do not improve on, and the last of these, where it stops."""
    scores = [sign * line[f"val/{metric}"] for line in lines(folder) if f"val/{metric}" in line]
    best = next(epoch for epoch, score in enumerate(scores, 1) if score == max(scores[: epoch + patience]))
    return best, best + patience


def test_a_run_stops_early_and_is_finished_on_any_number_of_processes(full_run, tmp_path):
    best, last = expected_stop(full_run, "accuracy", 1, 2)
    assert 2 < last < 10, "the test needs epochs before and after the stop"
    flags = f"{LONG} -stop_after 2"
    for step, size in ((6, 1), (4 * last - 1, 2)):
        saves.run_until(tmp_path, f"{flags} -cpu {size}", step)
    folder = run(tmp_path, f"{flags} -cpu 1")
    result = outcome(folder)
    found = result["state"], result["epoch"], result["step"], result["best"]["epoch"]
    assert found == ("finished", last, 4 * last, best)
    assert result["reason"] == f"-stop_after 2: nothing better since epoch {best}" and result["test"]
    log = saves.log_of(folder)
    assert f"early:       {result['reason']}" in log and f"step {4 * last}/48" in log
    at_last = saves.tensors(full_run / "checkpoints" / saves.at_step(full_run, 4 * last))
    assert all(torch.equal(tensor, at_last[f"model.{name}"]) for name, tensor in weights(folder).items())
    rates, all_rates = ([line["train/lr"] for line in lines(one) if "train/lr" in line] for one in (folder, full_run))
    assert rates == all_rates[: 4 * last], "the schedule is that of all epochs"


def test_the_same_command_does_not_train_further_and_a_larger_stop_after_does(full_run, tmp_path):
    flags = f"{LONG} -cpu 1 -best loss"
    folder = run(tmp_path, f"{flags} -stop_after 1")
    early, logged, last = outcome(folder), lines(folder), weights(folder)
    assert early["epoch"] == expected_stop(full_run, "loss", -1, 1)[1] < 12
    run(tmp_path, f"{flags} -stop_after 1")
    assert lines(folder) == logged and outcome(folder)["test"] == early["test"]
    assert same_tensors(weights(folder), last)
    run(tmp_path, f"{flags} -stop_after 99")
    result = outcome(folder)
    assert (result["state"], result["epoch"], result["reason"]) == ("finished", 12, None)
    assert distance(folder, full_run) == 0.0 and result["best"] == outcome(full_run)["best"]


def test_each_validation_set_has_its_figures_and_best_may_go_by_any(tmp_path):
    folder = run(tmp_path, f"{SMALL} -dataset two_sets -trainer notes -log_every 1 -best val_clean/loss -cpu 2")
    logged = lines(folder)
    clean, val = ([line[tag] for line in logged if tag in line] for tag in ("val_clean/loss", "val/loss"))
    assert len(clean) == len(val) == 3 and clean != val
    assert clean[-1] == pytest.approx(outcome(folder)["test"]["loss"], abs=1e-6), "the same samples"
    best = outcome(folder)["best"]
    assert (best["metric"], best["value"]) == ("val_clean/loss", min(clean))
    for split, losses in (("val", val), ("val_clean", clean)):
        assert [line[f"train/{split}_loss"] for line in logged if f"train/{split}_loss" in line] == losses
    assert [line["train/ended"] for line in logged if "train/ended" in line] == [1, 2, 3]


@pytest.mark.parametrize(("more", "least"), [("", 12), ("-eval_every 1steps", 7)])
def test_saves_by_minutes_come_when_all_ranks_have_voted(more, least, tmp_path, monkeypatch):
    """Also where a validation, which votes, too, lies between a step's vote and its save."""
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: -math.inf, time=lambda: 0.0))  # long ago
    monkeypatch.setattr(saves.preemption, "ASK_EVERY_S", 0.0)
    assert len(saves.steps(run(tmp_path, f"{SMALL} -cpu 2 {more} -save_every 5minutes -keep_last 99"))) >= least


def test_automatic_saves_come_as_often_as_they_are_cheap_and_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(saves.preemption, "ASK_EVERY_S", 0.0)
    few = run(tmp_path / "few", f"{SMALL} -cpu 2 -keep_last 99")  # too short for more than one an epoch
    monkeypatch.setattr(manager, "LEAST_S", 0.0)
    monkeypatch.setattr(manager, "SHARE", 1e9)
    many = run(tmp_path / "many", f"{SMALL} -cpu 2 -keep_last 99")
    monkeypatch.setattr(manager, "SHARE", 1e-9)  # saves cost too much, from the second on
    dear = run(tmp_path / "dear", f"{SMALL} -cpu 2 -keep_last 99")
    found = [saves.steps(folder) for folder in (few, many, dear)]
    assert found[0] == [12, 8, 4] and {*found[0]} < {*found[1]} and found[2] == [12, 8, 4, 1], found
    assert same_tensors(weights(few), weights(many)) and same_tensors(weights(few), weights(dear))


def test_automatic_saves_wait_while_gradients_are_not_finite_and_longer_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "LEAST_S", 0.0)
    monkeypatch.setattr(manager, "SHARE", 1e9)
    folder = run(tmp_path, f"{SMALL} -trainer bad_steps -cpu 1 -keep_last 99")
    assert saves.steps(folder) == [12, 11, 10, 9, 8, 5, 4, 3, 2, 1], "each but the bad ones in mid-epoch"
    monkeypatch.undo()
    failed = manager.Checkpoints(tmp_path, World())
    failed.failures, failed.saved_at = 1, time.monotonic() - 59
    assert not failed.is_late()


@pytest.mark.parametrize(("flags", "stop", "batch"), [(SMALL, 5, 32), (SMALL, 6, 8), (STEPS, 6, 8), (STEPS, 1, 48)])
def test_another_batch_in_mid_epoch_brings_no_validation_twice_and_each_step_counts(flags, stop, batch, tmp_path):
    run(tmp_path, f"{flags} -cpu 1 -limit_steps {stop}", wanted=75)
    result = outcome(run(tmp_path, f"{flags} -cpu 1 -batch_size {batch} -allow_change batch_size"))
    assert result["state"] == "finished" and result["evaluations"] == (3 if flags == SMALL else 4)
    assert result["epoch"] == 3 if flags == SMALL else result["step"] == 10


def test_a_run_that_is_to_end_where_it_already_is_begins_with_its_last_validation(tmp_path):
    flags = f"{STEPS} -cpu 1 -best loss:max"
    run(tmp_path, f"{flags} -limit_steps 8", wanted=75)
    result = outcome(run(tmp_path, f"{flags.replace('-steps 10', '-steps 7')} -allow_change steps"))
    assert (result["state"], result["step"], result["evaluations"]) == ("finished", 8, 3)
    assert result["test"] != result["test_best"] and result["best"]["evaluation"] == 1, "the loss falls"


def test_steps_and_epochs_exclude_each_other_and_the_command_line_wins_over_a_file(tmp_path):
    for flags in ("-epochs 3 -steps 10", "-resume one -weights other"):
        assert "exclude each other" in refusal(flags)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"steps": 10, "weights": "x"}))
    args = config.parse_args(["-cfg", str(file), "-epochs", "3", "-eval"])
    assert (args.steps, args.epochs, args.weights) == (None, 3, None), "-eval takes the run's own weights"
