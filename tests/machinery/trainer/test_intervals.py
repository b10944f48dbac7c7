"""A run of N steps, validations and saves at any interval, and several validation sets."""

import json
import math
from types import SimpleNamespace

import pytest
import saves
from runs import few, lines, outcome, plugins, run
from saves import SMALL, bits

from lib import config
from lib.trainer import trainer
from lib.utils.checkpoint import manager
from lib.utils.errors import UsageError
from lib.utils.monitoring import metrics

# 4 steps an epoch: the run ends in the third epoch, after validations at steps 3, 6, 9 and 10.
STEPS = f"{SMALL.replace('-epochs 3', '-steps 10')} -eval_every 3steps"


@pytest.fixture(scope="module", autouse=True)
def _plugins(small_plugins):
    with plugins(dataset={"two_sets": two_sets}, trainer={"notes": NotesEvaluations}):
        yield


def two_sets(args):
    data = few(args)
    return {"train": data["train"], "val_clean": data["test"], "val": data["val"], "test": data["test"]}


class NotesEvaluations(trainer.Trainer):
    def on_evaluation(self, split, figures):
        self.log_scalar(f"{split}_loss", figures["loss"])

    def on_epoch_end(self):
        self.log_scalar("ended", self.state.epoch)


@pytest.fixture(scope="module")
def undisturbed(_plugins, tmp_path_factory):
    return run(tmp_path_factory.mktemp("steps"), f"{STEPS} -cpu 1")


def test_a_run_of_n_steps_ends_there_and_its_schedule_with_it(undisturbed):
    logged, result = lines(undisturbed), outcome(undisturbed)
    assert [line["step"] for line in logged if "val/loss" in line] == [3, 6, 9, 10]
    assert [line["step"] for line in logged if "train/loss" in line] == [4, 8, 10]
    assert logged[-1]["step"] == 10 and [line["train/lr"] for line in logged if "train/lr" in line][-1] == 1e-6
    assert (result["state"], result["step"], result["epoch"], result["evaluations"]) == ("finished", 10, 2, 4)
    saved = config.parse_args(["-cfg", str(undisturbed / "config.yaml")], describe=False)
    assert saved.steps == 10


@pytest.mark.parametrize(("stop", "cpu"), [(3, 2), (5, 3), (6, 1), (10, 2)])
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits_and_the_same_log(
    stop, cpu, undisturbed, tmp_path, monkeypatch
):
    """At the steps 3, 6 and 10 the stop comes before the validation, which is left to the next start."""
    with monkeypatch.context() as patch:
        saves.stop_at(patch, stop)
        folder = run(tmp_path, f"{STEPS} -cpu 2 -save_every 2steps", wanted=75)
        assert sum("val/loss" in line for line in lines(folder)) == (stop - 1) // 3
    run(tmp_path, f"{STEPS} -cpu {cpu} -save_every 2steps")
    assert bits(folder) == bits(undisturbed)
    assert outcome(folder)["best"] == outcome(undisturbed)["best"]


def test_early_stopping_counts_validations(tmp_path):
    folder = run(tmp_path, f"{STEPS} -cpu 1 -best loss:max -stop_after 2")
    result = outcome(folder)
    assert (result["step"], result["evaluations"], result["best"]["step"]) == (9, 3, 3), "the loss falls"
    assert result["reason"].startswith("-stop_after 2")


@pytest.mark.parametrize("metric", ["val_clean/loss", "loss"])
def test_each_validation_set_has_its_figures_and_best_may_go_by_any(metric, tmp_path):
    folder = run(tmp_path, f"{SMALL} -dataset two_sets -trainer notes -log_every 1 -best {metric} -cpu 2")
    logged = lines(folder)
    tags = "val_clean/loss", "val/loss"
    clean, val = ([line[tag] for line in logged if tag in line] for tag in tags)
    assert len(clean) == len(val) == 3 and clean != val
    assert clean[-1] == pytest.approx(outcome(folder)["test"]["loss"], abs=1e-6), "the same samples"
    best = outcome(folder)["best"]
    assert best["metric"] == metric.partition(":")[0]
    if metric == "val_clean/loss":
        assert best["value"] == min(clean)
    for split, losses in (("val", val), ("val_clean", clean)):
        assert [line[f"train/{split}_loss"] for line in logged if f"train/{split}_loss" in line] == losses[:2]
    assert [line["train/ended"] for line in logged if "train/ended" in line] == [1, 2]


@pytest.mark.parametrize(("more", "least"), [("", 12), ("-eval_every 1steps", 7)])
def test_saves_by_minutes_come_when_all_ranks_have_voted(more, least, tmp_path, monkeypatch):
    """Also where a validation, which votes, too, lies between a step's vote and its save."""
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: -math.inf))  # when the last save began
    monkeypatch.setattr(saves.preemption, "ASK_EVERY_S", 0.0)
    folder = run(tmp_path, f"{SMALL} -cpu 2 {more} -save_every 5minutes -keep_last 99")
    assert len(saves.steps(folder)) >= least


@pytest.mark.parametrize(("stop", "batch"), [(5, 32), (1, 48), (6, 8)])
def test_another_batch_in_mid_epoch_brings_no_validation_twice(stop, batch, tmp_path):
    run(tmp_path, f"{SMALL} -cpu 1 -limit_steps {stop}", wanted=75)
    folder = run(tmp_path, f"{SMALL} -cpu 1 -batch_size {batch} -allow_change batch_size")
    assert (outcome(folder)["evaluations"], outcome(folder)["epoch"]) == (3, 3)


@pytest.mark.parametrize("batch", [8, 48])
def test_under_steps_each_step_counts_whatever_its_batch(batch, tmp_path):
    run(tmp_path, f"{STEPS} -cpu 1 -limit_steps 6", wanted=75)
    folder = run(tmp_path, f"{STEPS} -cpu 1 -batch_size {batch} -allow_change batch_size")
    result = outcome(folder)
    assert (result["state"], result["step"], result["evaluations"]) == ("finished", 10, 4)


def test_a_run_that_is_to_end_where_it_already_is_begins_with_its_last_validation(tmp_path):
    flags = f"{STEPS} -cpu 1 -best loss:max"
    run(tmp_path, f"{flags} -limit_steps 8", wanted=75)
    folder = run(tmp_path, f"{flags.replace('-steps 10', '-steps 7')} -allow_change steps")
    result = outcome(folder)
    assert (result["state"], result["step"], result["evaluations"]) == ("finished", 8, 3)
    assert result["test"] != result["test_best"] and result["best"]["evaluation"] == 1, "the loss falls"


def test_a_set_whose_loss_is_nan_is_never_the_best_and_others_may_be():
    figures = {"val/loss": math.nan, "val/f1": 0.9, "val_a/loss": 1.0, "val_a/f1": 0.5, "loss": math.nan, "f1": 0.9}
    assert metrics.new_best(None, figures, "f1", 1) is None
    assert metrics.new_best(None, figures, "val_a/f1", 1)["value"] == 0.5
    assert metrics.new_best(None, {**figures, "val_a/loss": math.nan}, "val_a/f1", 1) is None


def test_steps_and_epochs_exclude_each_other_and_the_command_line_wins_over_a_file(tmp_path):
    with pytest.raises(UsageError, match="-epochs and -steps exclude each other"):
        config.parse_args(["-epochs", "3", "-steps", "10"])
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"steps": 10, "weights": "x"}))
    args = config.parse_args(["-cfg", str(file), "-epochs", "3", "-eval"])
    assert (args.steps, args.epochs, args.weights) == (None, 3, None), "-eval takes the run's own weights"
