"""Training has the same result on any number of processes, and after any interruption."""

import contextlib
import ctypes
import json
import math
import platform
import random
import resource

import numpy as np
import pytest
import saves
import torch
import yaml
from runs import distance, few, lines, norm_net, outcome, plugins, run, same_tensors, weights
from safetensors.torch import load_file
from saves import SMALL, bits
from sklearn.metrics import f1_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lib.core import optimizer
from lib.trainer import trainer
from lib.utils import preemption, runtime
from lib.utils.checkpoint import run_folder, shards, state
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World
from lib.utils.monitoring import logger
from lib.utils.monitoring.logger import tensorboard_tag

pytestmark = pytest.mark.usefixtures("small_plugins")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Uninterrupted runs, by their number of processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {size: run(folder, f"{SMALL} -cpu {size} -model on_{size}") for size in (1, 2, 3, 4)}


def test_any_number_of_processes_gives_the_same_bits(uninterrupted):
    """Includes dropout, BatchNorm, accumulation, and a last batch of 2 samples, fewer than there are ranks."""
    for size in (2, 3, 4):
        assert bits(uninterrupted[1]) == bits(uninterrupted[size])


def test_metrics_are_exact_when_ranks_have_different_numbers_of_samples(uninterrupted):
    outcomes = [outcome(folder)["test"] for folder in uninterrupted.values()]
    model, part = norm_net(type("Args", (), {"num_classes": 4})), few(None)["test"]
    model.load_state_dict(weights(uninterrupted[1]))
    outputs = model.eval()(part.tensors[0])
    truth = {
        "f1": f1_score(part.tensors[1], outputs.argmax(1), average="macro"),
        "accuracy": (outputs.argmax(1) == part.tensors[1]).double().mean().item(),
        "loss": nn.functional.cross_entropy(outputs, part.tensors[1]).item(),
    }
    assert outcomes[0] == pytest.approx(truth, abs=1e-6) and outcomes == outcomes[:1] * 4


def test_the_logged_loss_is_the_mean_over_the_global_batch(uninterrupted):
    """Each rank sees other samples, but the logged values are those of all samples."""
    means = [
        [line["train/loss_mean"] for line in lines(folder) if "train/loss_mean" in line][-1]
        for folder in uninterrupted.values()
    ]
    assert means == [means[0]] * 4
    assert [line["samples"] for line in lines(uninterrupted[4])][-1] == 150


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stopped_run_resumes_with_the_same_bits(uninterrupted, tmp_path, size):
    """Stop in the first epoch, at its end, and in the second."""
    flags = f"{SMALL} -cpu {size} -model on_{size}"
    for step in (2, 4, 6):
        result = outcome(saves.run_until(tmp_path, flags, step))
        assert (result["state"], result["step"]) == ("stopped", step)
    folder = run(tmp_path, flags)
    assert distance(folder, uninterrupted[size]) == 0.0
    steps = [line["step"] for line in lines(folder) if "train/loss" in line]
    assert steps == sorted(set(steps)), "metrics.jsonl has a step twice"


def test_a_run_resumes_with_the_same_bits_on_another_number_of_processes(uninterrupted, tmp_path):
    for step, size in ((2, 4), (5, 1), (8, 3)):
        saves.run_until(tmp_path, f"{SMALL} -cpu {size} -model moved", step)
    assert bits(run(tmp_path, f"{SMALL} -cpu 2 -model moved")) == bits(uninterrupted[1])


class Mixes(trainer.Trainer):
    """Mixes each micro-batch with itself, by a share drawn from NumPy and a shift drawn from Python."""

    def training_step(self, batch):
        inputs, targets = batch
        share, turn = np.random.beta(0.4, 0.4), random.randrange(1, 4)
        return share * self.loss(self.model(inputs), targets) + (1 - share) * self.loss(
            self.model(inputs.roll(turn, 0)), targets
        )


class Draws(nn.Module):
    """Scales its output by random numbers of Python and NumPy."""

    def __init__(self, args):
        super().__init__()
        self.net = norm_net(args)

    def forward(self, inputs):
        scale = random.uniform(0.5, 1) + np.random.uniform(0.5, 1) if self.training else 1.5
        return scale * self.net(inputs)


class DrawsSometimes(Draws):
    """Draws only for those micro-batches whose first value is above zero."""

    def forward(self, inputs):
        return super().forward(inputs) if inputs.flatten()[0] > 0 else 1.5 * self.net(inputs)


@pytest.mark.parametrize("flags", ["-trainer mixes", "-arch draws", "-arch sometimes"])
def test_random_numbers_of_python_and_numpy_in_a_trainer_or_model_are_the_same_after_a_resume(flags, tmp_path):
    flags = f"{SMALL} {flags}"
    with plugins(trainer={"mixes": Mixes}, arch={"draws": Draws, "sometimes": DrawsSometimes}):
        whole = run(tmp_path, f"{flags} -cpu 2 -model whole")
        saves.run_until(tmp_path, f"{flags} -cpu 2 -model parts", 6)
        np.random.seed(9)
        random.seed(9)
        assert distance(run(tmp_path, f"{flags} -cpu 2 -model parts"), whole) == 0.0
        assert distance(run(tmp_path, f"{flags} -cpu 1 -model alone"), whole) < 1e-4


def test_batch_per_gpu_is_saved_as_the_global_batch_size(tmp_path):
    flags = SMALL.replace("-batch_size 16 -micro_batch 4", "-batch_per_gpu 8")
    saves.run_until(tmp_path, f"{flags} -cpu 2 -model share", 3)
    folder = run(tmp_path, f"{flags} -cpu 1 -model share")
    saved_config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved_config["batch_size"], saved_config["micro_batch"]) == (16, 8)
    assert bits(folder) == bits(run(tmp_path, f"{flags} -cpu 2 -model whole"))


def test_one_line_says_how_many_processes_have_no_micro_batch(tmp_path):
    flags = SMALL.replace("-micro_batch 4", "-micro_batch 8") + " -log_every 1 -model"
    folder, single = (run(tmp_path, f"{flags} on_{size} -cpu {size}") for size in (4, 1))
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "2 of 4 processes idle: lower -micro_batch (and -allow_change it)" in log
    assert bits(folder) == bits(single)


@pytest.mark.parametrize("sizes", ["-batch_size 2 -micro_batch 2", "-batch_size 11 -micro_batch 4"])
def test_a_batch_may_be_smaller_than_the_number_of_processes_and_no_multiple_of_the_micro_batch(sizes, tmp_path):
    flags = SMALL.replace("-batch_size 16 -micro_batch 4", sizes)
    one, three = (run(tmp_path, f"{flags} -cpu {size} -model on_{size}") for size in (1, 3))
    assert bits(one) == bits(three)


def test_the_micro_batch_is_a_share_of_the_batch_also_of_a_prime_one(tmp_path):
    folder = run(tmp_path, f"{SMALL.replace('-batch_size 16 -micro_batch 4', '-batch_size 7 -drop_last')} -cpu 2")
    assert yaml.safe_load((folder / "config.yaml").read_text())["micro_batch"] == 4


def test_the_learning_rate_is_scaled_to_the_batch_only_by_lr_batch(tmp_path):
    """In steps of 16 samples: four of warm-up, then from -lr_start down to -lr_end, both times the scale."""
    flags = f"{SMALL} -cpu 1 -epochs 2 -lr_warmup 1 -lr_end 1e-4 -log_every 1"
    for given, peak in (("", 1e-3), ("-lr_batch 16", 1e-3), ("-lr_batch 4", 4e-3), ("-lr_batch 64", 2.5e-4)):
        folder = run(tmp_path, f"{flags} {given} -model scaled{given.replace(' ', '_')}")
        rates = [line["train/lr"] for line in lines(folder) if "train/lr" in line]
        assert len(rates) == 8 and rates[:5] == pytest.approx([peak * part for part in (0.2, 0.4, 0.6, 0.8, 1.0)])
        assert rates[-1] == pytest.approx(peak / 10)


def test_lr_scale_of_a_parameter_group_scales_its_learning_rate(tmp_path, monkeypatch):
    plain = run(tmp_path, f"{SMALL} -lr_start 0.004 -lr_end 0.0004 -model plain")
    groups = optimizer.decay_groups
    scaled = [{"lr_scale": 0.5}, {"lr_scale": 0.5}]
    monkeypatch.setattr(optimizer, "decay_groups", lambda *of: [a | b for a, b in zip(groups(*of), scaled)])
    assert distance(run(tmp_path, f"{SMALL} -lr_start 0.008 -lr_end 0.0008 -model scaled"), plain) == 0.0
    assert distance(run(tmp_path, f"{SMALL} -lr_start 0.004 -lr_end 0.0004 -model half"), plain) > 0


def test_accumulated_micro_batches_give_the_weights_of_one_large_batch(tmp_path):
    """Without dropout and BatchNorm, micro-batches change nothing but the rounding."""
    flags = (
        "-dataset few -arch mlp -mlp_width 32 -image_size 8 -num_classes 4 -batch_size 16 -epochs 2 -clip_grad 0.5"
    )
    whole = run(tmp_path, f"{flags} -model whole")
    for micro in (8, 2):
        assert distance(whole, run(tmp_path, f"{flags} -micro_batch {micro} -model cut_{micro}")) < 1e-6


def test_a_run_from_the_config_yaml_of_another_has_the_same_weights(tmp_path, uninterrupted):
    folder = run(tmp_path, f"-cfg {uninterrupted[2] / 'config.yaml'} -model again")
    assert distance(folder, uninterrupted[2]) == 0.0


def test_a_finished_run_is_not_trained_again(uninterrupted):
    before = weights(uninterrupted[1])
    folder = run(uninterrupted[1].parent, f"{SMALL} -cpu 1 -model on_1")
    assert same_tensors(before, weights(folder))
    assert outcome(folder)["state"] == "finished"


def test_the_size_of_a_manifest_does_not_grow_with_the_epochs(uninterrupted):
    folders = run_folder.list_checkpoints(uninterrupted[1] / "checkpoints")
    states = [state.read_manifest(folder)["state"] for folder in folders]
    assert [(state["epoch"], state["sums"], state["unlogged"]) for state in states] == [(3, {}, {}), (2, {}, {})]


def test_reset_moves_the_old_run_away_once_for_each_job(tmp_path, monkeypatch):
    flags = f"{SMALL} -epochs 1 -model fresh"
    folder = run(tmp_path, flags)
    (folder / "note").write_text("mine")
    run(tmp_path, f"{flags} -reset")
    old = list((tmp_path / ".old").iterdir())
    assert len(old) == 1 and (old[0] / "note").read_text() == "mine" and not (folder / "note").exists()
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "notebook"}.items():
        monkeypatch.setenv(name, value)  # a shell or notebook in an allocation: each command is a run of its own
    for _ in range(2):
        run(tmp_path, f"{flags} -reset")
    assert len(list((tmp_path / ".old").iterdir())) == 3
    for name, value in {"TORCHELASTIC_RUN_ID": "77.0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as the launchers set it for each start of a job
    for _ in range(2):
        run(tmp_path, f"{flags} -reset")
    assert len(list((tmp_path / ".old").iterdir())) == 4


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_that_is_not_finite_is_skipped_and_counted(tmp_path, size):
    with plugins(dataset={"poisoned": dataset_with_nan}):
        flags = SMALL.replace("-dataset few", "-dataset poisoned")
        folder = run(tmp_path, f"{flags} -cpu {size} -model skips")
    assert all(torch.isfinite(value).all() for value in weights(folder).values())
    assert [line["train/bad_steps"] for line in lines(folder) if "train/bad_steps" in line][-1] == 3


def test_mixed_precision_keeps_finite_weights_in_full_precision(tmp_path):
    for precision in ("-bf16", "-fp16"):
        folder = run(tmp_path, f"{SMALL} {precision} -model half{precision}")
        assert all(value.dtype != torch.bfloat16 for value in weights(folder).values())
        assert all(torch.isfinite(value).all() for value in weights(folder).values())


def test_best_and_final_weights_can_be_loaded_into_the_model(uninterrupted):
    for kind in ("best", "final"):
        model = norm_net(type("Args", (), {"num_classes": 4}))
        model.load_state_dict(load_file(uninterrupted[1] / kind / "weights.safetensors"))


def test_every_optimizer_and_loss_trains(tmp_path):
    for name in ("sgd", "adam", "adamw"):
        run(tmp_path, f"{SMALL} -epochs 1 -optimizer {name} -model {name}")
    with plugins(dataset={"numbers": lambda args: Tensors(torch.randn(64, 16), torch.randn(64, 3))}):
        for name in ("mse", "l1", "huber"):
            flags = f"-channels 1 -image_size 4 -num_classes 3 -mlp_width 8 -epochs 1 -loss {name}"
            run(tmp_path, f"-dataset numbers -arch mlp {flags} -model {name}")


def test_a_run_that_stops_during_an_evaluation_repeats_only_the_evaluation(tmp_path, monkeypatch, uninterrupted):
    """The training is saved; the next start begins with its evaluation."""
    with monkeypatch.context() as patch:
        real = trainer.Trainer.evaluate

        def evaluate(self, split):
            self.stop.request_stop("a test")
            return real(self, split)

        patch.setattr(trainer.Trainer, "evaluate", evaluate)
        patch.setattr(preemption, "MOST_STEPS", 1)
        folder = run(tmp_path, f"{SMALL} -cpu 2 -model on_2", wanted=75)
    result = outcome(folder)
    assert (result["epoch"], result["step"], result["evaluations"]) == (1, 4, 0)
    folder = run(tmp_path, f"{SMALL} -cpu 2 -model on_2")
    assert distance(folder, uninterrupted[2]) == 0.0
    assert sum("val/loss" in line for line in lines(folder)) == 3


@pytest.mark.parametrize(("split", "epoch"), [("val", 1), ("test", 3)])
def test_a_run_that_ends_between_an_evaluation_and_its_save_logs_the_metrics_only_once(
    tmp_path, monkeypatch, split, epoch
):
    """The run ends when it logs the evaluation; its newest checkpoint is that of the epoch's last step, before it."""
    real = logger.Logger.log_evaluation

    def evaluated(self, state, which, figures):
        real(self, state, which, figures)
        if (which, state.epoch) == (split, epoch):
            raise MemoryError("killed")

    flags = f"{SMALL} -save_every 1steps"
    with monkeypatch.context() as patch:
        patch.setattr(logger.Logger, "log_evaluation", evaluated)
        with pytest.raises(MemoryError, match="killed"):
            run(tmp_path, flags)
    folder = run(tmp_path, flags)
    run(tmp_path, flags)  # a finished run, evaluated again
    logged = lines(folder)
    assert [line["epoch"] for line in logged if "val/loss" in line] == [1, 2, 3]
    assert sum("test/loss" in line for line in logged) == 1
    assert [line["step"] for line in logged if "train/loss" in line] == [4, 8, 12]
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for name, wanted in (("train", [4, 8, 12]), ("val", [4, 8, 12]), ("test", [12])):
        assert [point.step for point in board.Scalars(tensorboard_tag(f"{name}/loss"))] == wanted


def test_a_stop_on_the_very_last_step_leaves_its_evaluation_to_the_next_start(tmp_path, uninterrupted):
    saves.run_until(tmp_path, f"{SMALL} -cpu 2 -model last", 12)
    assert distance(run(tmp_path, f"{SMALL} -cpu 2 -model last"), uninterrupted[2]) == 0.0


class Masked(nn.Module):
    """Adds a mask with -inf that hides a number from the softmax, as a causal mask does. The mask is a buffer."""

    def __init__(self, args):
        super().__init__()
        self.net = norm_net(args)
        self.register_buffer("mask", torch.tensor([0.1, -math.inf, 0.3, 0.7]))

    def forward(self, inputs):
        outputs = self.net(inputs)
        return outputs + (outputs + self.mask).softmax(-1)


def test_a_buffer_with_infinity_stays_as_it_is_when_processes_have_unequal_shares(tmp_path):
    with plugins(arch={"masked": Masked}):
        folders = [run(tmp_path, f"{SMALL} -arch masked -cpu {cpu} -model on_{cpu}") for cpu in (1, 3)]
    assert not any("train/bad_steps" in line for folder in folders for line in lines(folder))
    one, other = map(weights, folders)
    masks = one.pop("mask"), other.pop("mask")
    assert all(torch.equal(mask, torch.tensor([0.1, -math.inf, 0.3, 0.7])) for mask in masks)
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


# Stops between two log lines


def dataset_with_nan(args):
    parts = few(args)
    parts["train"].tensors[0][11] = math.nan
    return parts


def never_finite_dataset(args):
    return Tensors(torch.full((40, 64), math.inf), torch.zeros(40, dtype=torch.int64))


class Spread(trainer.Trainer):
    """Logs a metric of its own."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.metrics.update({"squares": loss.detach().nan_to_num().square()})
        return loss


def logged_lines(folder) -> list[str]:
    """The log lines of metrics.jsonl, without speeds."""
    return [
        json.dumps({name: value for name, value in line.items() if not name.startswith("perf/")})
        for line in lines(folder)
    ]


@pytest.mark.parametrize("cpu", [1, 2])
def test_a_stop_between_two_log_lines_does_not_change_the_log_lines(cpu, tmp_path):
    flags = (
        f"{SMALL} -cpu {cpu} -epochs 2 -dataset poisoned -trainer spread -batch_size 4 -micro_batch 2 -log_every 5"
    )
    with plugins(dataset={"poisoned": dataset_with_nan}, trainer={"spread": Spread}):
        whole = run(tmp_path, f"{flags} -model whole")
        for limit in (3, 4, 12, 19):
            run(tmp_path, f"{flags} -model parts -limit_steps {limit} -save_every 1steps", wanted=75)
        parts = run(tmp_path, f"{flags} -model parts")
    assert logged_lines(parts) == logged_lines(whole)
    assert '"train/bad_steps": 2' in next(line for line in logged_lines(whole)[::-1] if "train/" in line)


@pytest.mark.parametrize("stop", [None, 4])
def test_too_many_bad_steps_in_a_row_end_the_run_and_are_counted_across_a_stop(stop, tmp_path):
    flags = f"{SMALL} -cpu 1 -dataset hopeless -epochs 9 -log_every 5 -model bad"
    with plugins(dataset={"hopeless": never_finite_dataset}):
        if stop:
            run(tmp_path, f"{flags} -limit_steps {stop}", wanted=75)
        with pytest.raises(RuntimeError, match=r"10 steps in a row.* step 9; -debug names the first bad tensor"):
            run(tmp_path, flags)
    result = outcome(tmp_path / "bad")
    assert result["state"] == "failed" and "-max_bad_steps" in result["reason"]


# Runs without a finite result


def test_a_run_without_any_finite_step_fails_at_each_start_and_writes_no_weights(tmp_path):
    def never_finite(args):
        return {name: never_finite_dataset(args) for name in ("train", "val", "test")}

    with plugins(dataset={"never": never_finite}):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"none of the 6 steps had a finite gradient.*-lr_start"):
                run(tmp_path, f"{SMALL} -cpu 1 -dataset never -epochs 2 -model nan")
    result = outcome(tmp_path / "nan")
    assert result["state"] == "failed" and "RuntimeError: none of the 6 steps" in result["reason"]
    assert not (tmp_path / "nan" / "best").exists() and not (tmp_path / "nan" / "final").exists()


class BadAtFirst(trainer.Trainer):
    """Has three bad steps at the beginning."""

    def training_step(self, batch):
        return super().training_step(batch) * (math.nan if self.state.step < 3 else 1.0)


def test_a_few_bad_steps_before_a_change_of_the_batch_size_do_not_fail_the_run(tmp_path):
    flags = f"{SMALL} -cpu 1 -trainer early -epochs 1 -micro_batch 4"
    with plugins(trainer={"early": BadAtFirst}):
        run(tmp_path, f"{flags} -batch_size 4 -limit_steps 6", wanted=75)
        run(tmp_path, f"{flags} -batch_size 20 -allow_change batch_size")


class EndsInNan(trainer.Trainer):
    """Writes NaN into a weight in the last step."""

    def optimizer_step(self):
        norm = super().optimizer_step()
        if self.state.step == self.total_steps - 1:
            shards.local_part(next(self.model.parameters()))[-1:] = math.nan  # with fsdp, this rank's part
        return norm


@pytest.mark.parametrize("flags", ["-cpu 1", "-cpu 2 -parallel fsdp"])
def test_weights_that_are_not_finite_are_written_neither_to_best_nor_to_final(flags, tmp_path):
    flags = f"{SMALL} {flags} -trainer breaks -epochs 1 -model breaks"
    with plugins(trainer={"breaks": EndsInNan}):
        with contextlib.suppress(RuntimeError):  # raised here if this is the only process
            run(tmp_path, flags, wanted=1)
        assert "1.weight (1 in all) is not finite" in outcome(tmp_path / "breaks")["reason"]
        assert not (tmp_path / "breaks" / "best").exists() and not (tmp_path / "breaks" / "final").exists()
        run(tmp_path, f"{flags} -reset -allow_change nan")


@pytest.mark.parametrize(("name", "size"), [("trainer", 2), ("ema", 1)])
def test_best_and_final_weights_are_both_tested_and_the_final_ones_stay(tmp_path, monkeypatch, name, size):
    """The best weights are those of epoch 2: later evaluations are made worse."""
    monkeypatch.setattr(
        trainer.metrics,
        "new_best",
        lambda best, figures, metric, number: (
            {"metric": "loss", "value": 0.5, "score": -0.5, "evaluation": 2} if number == 2 else None
        ),
    )
    folder = run(tmp_path, f"{SMALL} -cpu {size} -trainer {name}")
    model, part, found = norm_net(type("Args", (), {"num_classes": 4})).eval(), few(None)["test"], outcome(folder)
    for place, split in (("best", "test_best"), ("final", "test")):
        model.load_state_dict(load_file(folder / place / "weights.safetensors"))
        truth = nn.functional.cross_entropy(model(part.tensors[0]), part.tensors[1]).item()
        assert found[split]["loss"] == pytest.approx(truth, abs=1e-6)
        assert sum(f"{split}/loss" in line for line in lines(folder)) == 1
    assert found["test"]["loss"] != found["test_best"]["loss"]
    log = saves.log_of(folder)
    assert "(best weights: val loss 0.5000 in epoch 2)" in log.partition("finished:")[2].splitlines()[0]
    assert log.index("finished:") < log.index("final:       test ") < log.index("best/weights.safetensors")
    saved = saves.tensors(folder / "checkpoints" / saves.names(folder)[0])
    if name == "trainer":
        assert same_tensors({key: saved[f"model.{key}"] for key in weights(folder)}, weights(folder))
    (folder / "best" / "weights.safetensors").unlink()
    run(tmp_path, f"{SMALL} -cpu {size} -trainer {name}")
    assert "the best weights are lost: " in saves.log_of(folder) and "test_best" not in outcome(folder)
    assert outcome(folder)["test"] == found["test"]


def test_weights_that_are_best_and_final_are_tested_once(uninterrupted):
    for folder in (uninterrupted[1], uninterrupted[2]):
        last, found = saves.log_of(folder).partition("finished:")[2], outcome(folder)
        is_best = found["best"]["epoch"] == found["epoch"]
        assert ("test_best" in found) != is_best
        assert ("INFO final:" in last) != is_best


def drawn_dataset(args):
    """Draws its samples from the generators that everybody uses."""
    inputs, labels = torch.randn(40, 64), torch.from_numpy(np.random.randint(0, 4, 40))
    return {"train": Tensors(inputs, labels), "val": Tensors(inputs[:9] + random.random(), labels[:9])}


def few_and_draws(args):
    torch.rand(3)
    return few(args)


def test_a_dataset_that_draws_has_the_same_samples_at_each_start_and_does_not_change_other_draws(
    tmp_path, uninterrupted
):
    with plugins(dataset={"drawn": drawn_dataset, "few_and_draws": few_and_draws}):
        one, two = (run(tmp_path, f"{SMALL} -dataset drawn -cpu {cpu} -model on_{cpu}") for cpu in (1, 2))
        run(tmp_path, f"{SMALL} -dataset drawn -cpu 2 -model on_1")
        usual = run(tmp_path, f"{SMALL} -dataset few_and_draws -cpu 1 -model usual")
    assert distance(one, two) == 0.0 == distance(usual, uninterrupted[1])


def test_a_dataset_that_differs_from_process_to_process_is_refused(tmp_path, capfd):
    def drawn(args):
        inputs = np.random.default_rng().random((40, 64), np.float32)
        return {"train": Tensors(torch.from_numpy(inputs), torch.arange(40) % 4)}

    with plugins(dataset={"drawn": drawn}):
        run(tmp_path, f"{SMALL} -dataset drawn -cpu 2", wanted=2)
    assert "the train samples of rank 1 are not those of rank 0" in capfd.readouterr().err


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_stays_with_the_process():
    ctypes.CDLL(None).mallopt(-3, 99_999)  # M_MMAP_THRESHOLD: now each tensor is the system's memory
    faults = []
    for turn in range(4):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        [torch.ones(1 << 18) for _ in range(36)]
        if turn == 0:
            runtime.configure_kernels(World(), deterministic=False)
    assert faults[3] - faults[2] < (faults[1] - faults[0]) / 9
