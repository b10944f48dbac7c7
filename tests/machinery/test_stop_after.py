"""-stop_after: the run that ends by it is finished, and every start decides alike."""

import signal

import pytest
import saves
import torch
from runs import distance, lines, outcome, run, weights
from runs import plugins as runs_plugins
from safetensors.torch import load_file
from saves import PLUGINS, SMALL

WORDS = SMALL.replace("-epochs 3", "-epochs 12 -log_every 1")


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    with runs_plugins(**PLUGINS):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of all epochs."""
    return run(tmp_path_factory.mktemp("whole"), f"{WORDS} -cpu 1 -best loss -save_every 1epoch -keep_last 99")


def expected(folder, metric: str, sign: int, patience: int) -> tuple[int, int]:
    """The epoch of the best figure and that of the stop, from the figures of all epochs."""
    best, best_epoch = None, 0
    for line in lines(folder):
        if f"val/{metric}" in line:
            score = sign * line[f"val/{metric}"]
            if best is None or score > best:
                best, best_epoch = score, line["epoch"]
            if line["epoch"] - best_epoch >= patience:
                return best_epoch, line["epoch"]
    raise AssertionError("it gets better to the end")


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_ends_early_by_its_figures_and_is_finished_on_any_number_of_processes(
    whole, tmp_path, monkeypatch, size
):
    best, last = expected(whole, "accuracy", 1, 2)
    assert 2 < last < 10, "the test needs room on both sides"
    words = f"{WORDS} -cpu {size} -stop_after 2"
    for step in (6, 4 * last - 1):
        with monkeypatch.context() as patch:
            saves.stop_at(patch, step)
            run(tmp_path, words, wanted=75)
    folder = run(tmp_path, words)
    ended = outcome(folder)
    assert (ended["state"], ended["epoch"], ended["step"], ended["best"]["epoch"]) == (
        "finished",
        last,
        4 * last,
        best,
    )
    assert ended["reason"] == f"-stop_after 2: nothing better since epoch {best}" and ended["test"]
    log = saves.log_of(folder)
    assert f"early:       {ended['reason']}" in log and f"step {4 * last}/48" in log
    at_last = saves.tensors(
        next(one for one in (whole / "checkpoints").iterdir() if one.name.endswith(f"_{4 * last}"))
    )
    assert all(torch.equal(tensor, at_last[f"model.{name}"]) for name, tensor in weights(folder).items())
    figures = [line for line in lines(whole) if line["step"] <= 4 * last and "train/lr" in line]
    assert [line["train/lr"] for line in lines(folder) if "train/lr" in line] == [
        line["train/lr"] for line in figures
    ]


def test_the_same_command_trains_no_more_and_a_larger_number_goes_on(whole, tmp_path):
    words = f"{WORDS} -cpu 1 -best loss"
    folder = run(tmp_path, f"{words} -stop_after 1")
    early, logged = outcome(folder), lines(folder)
    assert early["epoch"] == expected(whole, "loss", -1, 1)[1] < 12
    final = load_file(folder / "final" / "weights.safetensors")
    run(tmp_path, f"{words} -stop_after 1")
    assert (
        lines(folder) == logged
        and outcome(folder)["test"] == early["test"]
        and weights(folder).keys() == final.keys()
    )
    assert all(torch.equal(weights(folder)[name], tensor) for name, tensor in final.items())
    run(tmp_path, f"{words} -stop_after 99")
    ended = outcome(folder)
    assert (ended["state"], ended["epoch"], ended["reason"]) == ("finished", 12, None)
    assert distance(folder, whole) == 0.0 and ended["best"] == outcome(whole)["best"]


def test_another_runs_past_does_not_count(whole, tmp_path):
    """Its best weights are not here: there is nothing to be worse than before the first evaluation."""
    first = run(tmp_path, f"{WORDS} -cpu 1 -model first -limit_steps 22", wanted=75)
    folder = run(tmp_path, f"{WORDS} -cpu 1 -model second -resume {first} -stop_after 2")
    assert outcome(folder)["epoch"] > 6


def test_without_a_val_split_it_is_refused(tmp_path, capfd):
    with runs_plugins(dataset={"trained": lambda args: PLUGINS["dataset"]["few"](args)["train"]}):
        said = saves.refused(tmp_path, f"{SMALL} -dataset trained -stop_after 2", capfd)
    assert "-stop_after 2: there is no val split to choose by" in said


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_run_ends_early_at_the_same_bits(start, size):
    words = ("-epochs", 40, "-lr_start", 0.01, "-stop_after", 2)
    undisturbed = start("undisturbed", *words, cpu=size)
    assert undisturbed.wait() == 0
    last = undisturbed.outcome()
    assert last["reason"].startswith("-stop_after 2: nothing better since epoch ") and 2 < last["epoch"] < 40
    for step in (25, last["step"] - 5):
        killed = start(
            "killed",
            *words,
            "-save_every",
            "7steps",
            cpu=size,
            fault={"do": "send_signal", "signal": "SIGKILL", "step": step, "rank": 0},
        )
        assert killed.wait() in (-signal.SIGKILL, 1)
    again = start("killed", *words, "-save_every", "7steps", cpu=size)
    assert again.wait() == 0
    assert again.weights() == undisturbed.weights()
    assert {name: again.outcome()[name] for name in ("state", "epoch", "step", "best", "reason", "test")} == {
        name: last[name] for name in ("state", "epoch", "step", "best", "reason", "test")
    }
