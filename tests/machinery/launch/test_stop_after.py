"""-stop_after: a run that it ends is finished, and every start decides the same."""

import pytest
import saves
import torch
from runs import distance, lines, outcome, run, same_tensors, weights
from safetensors.torch import load_file
from saves import SMALL

pytestmark = pytest.mark.usefixtures("small_plugins")
FLAGS = SMALL.replace("-epochs 3", "-epochs 12 -log_every 1")


@pytest.fixture(scope="module")
def full_run(small_plugins, tmp_path_factory):
    """A run of all epochs."""
    return run(tmp_path_factory.mktemp("whole"), f"{FLAGS} -cpu 1 -best loss -save_every 1epoch -keep_last 99")


def expected_stop(folder, metric: str, sign: int, patience: int) -> tuple[int, int]:
    """The epoch of the best value and that of the stop, from the metrics of all epochs."""
    best, best_epoch = None, 0
    for line in lines(folder):
        if f"val/{metric}" in line:
            score = sign * line[f"val/{metric}"]
            if best is None or score > best:
                best, best_epoch = score, line["epoch"]
            if line["epoch"] - best_epoch >= patience:
                return best_epoch, line["epoch"]
    raise AssertionError("the metric improves until the end")


def test_a_run_stops_early_and_is_finished_on_any_number_of_processes(full_run, tmp_path, monkeypatch):
    best, last = expected_stop(full_run, "accuracy", 1, 2)
    assert 2 < last < 10, "the test needs epochs before and after the stop"
    flags = f"{FLAGS} -stop_after 2"
    for step, size in ((6, 1), (4 * last - 1, 2)):
        with monkeypatch.context() as patch:
            saves.stop_at(patch, step)
            run(tmp_path, f"{flags} -cpu {size}", wanted=75)
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
    flags = f"{FLAGS} -cpu 1 -best loss"
    folder = run(tmp_path, f"{flags} -stop_after 1")
    early, logged = outcome(folder), lines(folder)
    assert early["epoch"] == expected_stop(full_run, "loss", -1, 1)[1] < 12
    final = load_file(folder / "final" / "weights.safetensors")
    run(tmp_path, f"{flags} -stop_after 1")
    assert lines(folder) == logged and outcome(folder)["test"] == early["test"]
    assert same_tensors(weights(folder), final)
    run(tmp_path, f"{flags} -stop_after 99")
    result = outcome(folder)
    assert (result["state"], result["epoch"], result["reason"]) == ("finished", 12, None)
    assert distance(folder, full_run) == 0.0 and result["best"] == outcome(full_run)["best"]
