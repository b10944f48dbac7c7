"""-debug, -eval and -overfit do their work and do not change the run."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from command_line import tree
from items import Items
from runs import few, lines, norm_net, outcome, plugins, run
from saves import log_of
from torch import nn
from torch.nn import functional

import train
from lib.trainer.trainer import Trainer
from lib.utils.data.tensors import Tensors

FLAGS = "-dataset few -arch norm_net -image_size 8 -num_classes 4 -batch_size 16 -epochs 3 -log_every 1 -model run"


class NotFinite(nn.Module):
    """A network whose output is not finite, or only whose gradient is not."""

    def __init__(self, where):
        super().__init__()
        self.body, self.head, self.where = nn.Sequential(nn.Linear(64, 4), nn.Identity()), nn.Linear(4, 4), where

    def forward(self, inputs):
        hidden = self.body(inputs.flatten(1))
        if self.where == "output":
            return self.head(hidden / 0)
        return self.head(hidden) * (1 + (hidden * 0).abs().sqrt().sum())  # whose slope at 0 is infinite


def samples_with_nan(args):
    data = few(args)
    inputs, labels = data["train"].tensors
    inputs[17, 3] = torch.nan
    return {**data, "train": Tensors(inputs, labels)}


@pytest.fixture
def parts():
    archs = {"dead": lambda args: NotFinite("output"), "steep": lambda args: NotFinite("gradient")}
    with plugins(arch={**archs, "norm_net": norm_net}, dataset={"few": few, "sick": samples_with_nan}):
        yield


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-arch dead", r"first bad tensor: the output of head \(Linear\), tensor 0: 64 of 64 values"),
        ("-arch steep", r"Function 'AbsBackward0' returned nan"),
        ("-dataset sick -batch_size 50", r"in the batch of the samples .*, the tensor 0: 1 of 3200 values"),
    ],
)
def test_debug_names_the_first_bad_tensor_or_gradient(parts, tmp_path, flags, message):
    with pytest.raises(RuntimeError, match=message):  # raised in this process, whatever -cpu is
        train.main([*f"{FLAGS} {flags} -debug -cpu 2 -out {tmp_path / 'out'}".split()])
    assert not list(tmp_path.iterdir())


def test_debug_does_not_report_an_overflow_caused_by_the_scale_of_fp16(parts, tmp_path, monkeypatch):
    """A gradient of 1 times the scale of 65,536 overflows in half precision."""
    step = Trainer.training_step
    monkeypatch.setattr(Trainer, "training_step", lambda self, batch: step(self, batch) + self.model(batch[0]).sum())
    run(tmp_path, f"{FLAGS} -fp16 -limit_steps 2", wanted=75)
    assert lines(tmp_path / "run")[-1]["train/bad_steps"]
    run(tmp_path, f"{FLAGS} -fp16 -debug -model other")


def test_debug_starts_from_the_newest_checkpoint_and_does_not_change_the_run(parts, tmp_path, capfd):
    run(tmp_path, f"{FLAGS} -limit_steps 5", wanted=75)
    before = tree(tmp_path)
    capfd.readouterr()
    run(tmp_path, f"{FLAGS} -debug -limit_steps 2")
    output = capfd.readouterr().out
    assert "step 6  loss" in output and "step 7  loss" in output and "no bad tensor in 2 steps" in output
    run(tmp_path, f"{FLAGS} -debug")
    assert "no bad tensor in 3 steps" in capfd.readouterr().out, "an epoch has four"
    assert tree(tmp_path) == before


def test_eval_gives_the_metrics_of_the_best_weights_with_any_launcher(parts, tmp_path, monkeypatch, capfd, refused):
    folder = run(tmp_path, FLAGS)
    epoch = outcome(folder)["best"]["epoch"]
    (wanted,) = [line for line in lines(folder) if "val/loss" in line and line["epoch"] == epoch]
    (folder / "STOP").touch()  # a file that stops training, but not an evaluation
    before = tree(tmp_path)
    for flags in ("-cpu 1", "-cpu 2 -epochs 99", "torchrun"):
        with monkeypatch.context() as patch:
            for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items() if flags == "torchrun" else ():
                patch.setenv(name, value)
            run(tmp_path, f"{FLAGS} -eval {flags.replace('torchrun', '')}")
        found = json.loads((folder / "eval.json").read_text())
        assert all(found["val"][one] == pytest.approx(wanted[f"val/{one}"], abs=1e-6) for one in ("accuracy", "loss"))
        assert f"val  accuracy {found['val']['accuracy']:.4f}" in capfd.readouterr().out
        counts = torch.tensor(found["confusion"]["val"])  # of each class, by answer
        assert counts.trace() / counts.sum() == pytest.approx(found["val"]["accuracy"])
        (folder / "eval.json").unlink()
    assert tree(tmp_path) == before

    weights = folder / "final" / "weights.safetensors"
    run(tmp_path, f"{FLAGS.replace('-model run', '-model other')} -eval -weights {weights}")
    assert json.loads((tmp_path / "other" / "eval.json").read_text())["weights"] == str(weights)
    with plugins(arch={"norm_net": lambda args: norm_net(args).append(nn.BatchNorm1d(4, affine=False))}):
        messages = {f"-weights {weights}": "lacks 6.", "": "lacks 6.", "-model nothing": "neither best nor final"}
        for flags, message in messages.items():
            assert message in refused(f"{FLAGS} -eval {flags}")
    with plugins(arch={"norm_net": lambda args: norm_net(args)[:5]}):
        assert "another model than that of these weights: it has no 5.bias" in refused(f"{FLAGS} -eval")
    assert not (folder / "eval.json").exists()


def test_eval_names_weights_for_other_classes(parts, tmp_path, capfd):
    def named(*classes):
        return lambda args: {split: Tensors(*part.tensors, classes=classes) for split, part in few(args).items()}

    with plugins(dataset={"cats": named("cat", "dog"), "apes": named("ape", "cat")}):
        folder = run(tmp_path, FLAGS.replace("few", "cats"))
        run(tmp_path, f"{FLAGS.replace('few', 'apes').replace('-model run', '-model other')} -eval -weights {folder}")
    assert "its classes are ['cat', 'dog'], and here they are ['ape', 'cat']" in capfd.readouterr().out


def test_overfit_trains_and_evaluates_on_the_same_samples(parts, tmp_path):
    flags = "-dataset few -arch mlp -image_size 8 -num_classes 4 -batch_size 16 -epochs 30 -lr_start 0.01 -overfit 12"
    folder = run(tmp_path, flags)
    assert folder.name == "few_mlp_overfit" and lines(folder)[-1]["samples"] == 30 * 12
    assert [line["val/accuracy"] for line in lines(folder) if "val/accuracy" in line][-1] == 1.0
    assert train.main([*f"{flags} -overfit 13 -out {tmp_path}".split()]) == 2, "it cannot resume with other samples"


class Dice(nn.Module):
    """A network whose answers are drawn, also in evaluation: dropout that stays on, and noise of every generator."""

    def __init__(self, args):
        super().__init__()
        self.net = norm_net(args)

    def forward(self, inputs):
        outputs = functional.dropout(self.net(inputs), 0.3, training=True)
        return outputs + torch.randn_like(outputs) + random.random() + np.random.random()


def drawing(args):
    """Draws from the generators each time that a sample is read, in this process or another one."""
    add_noise = lambda inputs, label: (inputs + torch.rand(()), label)  # noqa: E731
    drawn = lambda part: Items([partial(add_noise, *part[index]) for index in range(len(part))])  # noqa: E731
    return {name: drawn(part) for name, part in few(args).items()}


@pytest.mark.parametrize("dataset", ["few", "drawing"])
def test_a_model_that_draws_in_evaluation_has_the_same_figures_everywhere(dataset, tmp_path, monkeypatch):
    """On any number of processes, with loader processes, after a stop at an epoch's last step, and in -eval."""
    flags = f"{FLAGS.removesuffix(' -model run')} -dataset {dataset} -micro_batch 4 -best loss -lr_schedule constant"
    with plugins(arch={"norm_net": Dice}, dataset={"few": few, "drawing": drawing}):
        one = run(tmp_path, f"{flags} -cpu 1 -model one")
        two = run(tmp_path, f"{flags} -cpu 2 -workers 1 -model two")
        for limit in (4, 8):
            run(tmp_path, f"{flags} -cpu 3 -model stopped -limit_steps {limit}", wanted=75)
        stopped = run(tmp_path, f"{flags} -cpu 1 -model stopped")
        figures = [[line for line in lines(folder) if "val/loss" in line] for folder in (one, two, stopped)]
        assert figures[0] == figures[1] == figures[2] and len(figures[0]) == 3
        assert outcome(one)["test"] == outcome(two)["test"] == outcome(stopped)["test"]
        assert len({line["val/loss"] for line in figures[0]}) == 3
        assert "differ each time" not in log_of(one), "the global generators are seeded"
        for folder, cpu in ((one, 2), (two, 1)):
            train.main([*f"{flags} -eval -cpu {cpu} -model {folder.name} -out {tmp_path}".split()])
            assert json.loads((folder / "eval.json").read_text())["val"]["loss"] == outcome(folder)["best"]["value"]
