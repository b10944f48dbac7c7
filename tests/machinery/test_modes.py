"""-debug, -eval and -overfit: they find out why, and leave the run alone."""

import json

import pytest
import torch
from runs import few, lines, norm_net, outcome, plugins, run
from torch import nn

import train
from lib.core import modes
from lib.trainer.trainer import Trainer
from lib.utils.data import tensors
from lib.utils.data.tensors import Tensors

WORDS = "-dataset few -arch norm_net -image_size 8 -num_classes 4 -batch_size 16 -epochs 3 -log_every 1 -model looked"


class Sick(nn.Module):
    """A network that gives what is not finite: at once, or only in its gradient."""

    def __init__(self, where):
        super().__init__()
        self.body, self.head, self.where = nn.Sequential(nn.Linear(64, 4), nn.Identity()), nn.Linear(4, 4), where

    def forward(self, inputs):
        hidden = self.body(inputs.flatten(1))
        if self.where == "output":
            return self.head(hidden / 0)
        return self.head(hidden) * (1 + (hidden * 0).abs().sqrt().sum())  # infinite: the square root's slope at 0


def sick_samples(args):
    data = few(args)
    inputs, labels = data["train"].tensors
    inputs[17, 3] = torch.nan
    return {**data, "train": Tensors(inputs, labels)}


@pytest.fixture
def parts():
    archs = {"dead": "output", "steep": "gradient"}
    archs = {"norm_net": norm_net, **{name: lambda args, where=where: Sick(where) for name, where in archs.items()}}
    with plugins(arch=archs, dataset={"few": few, "sick": sick_samples}):
        yield


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-arch dead", r"the first bad tensor: the output of head \(Linear\), tensor 0: 64 of 64 values"),
        ("-dataset sick -batch_size 50", r"in the batch of the samples .*, the tensor 0: 1 of 3200 values"),
    ],
)
def test_debug_names_the_first_bad_tensor(parts, tmp_path, words, message):
    with pytest.raises(modes.BadTensor, match=message):  # here, in this process, whatever -cpu says
        train.main([*f"{WORDS} {words} -debug -cpu 2 -out {tmp_path / 'out'}".split()])
    assert not list(tmp_path.iterdir())


def test_a_tensor_of_a_batch_is_named_by_its_place_however_deep():
    batch = {"pair": (torch.zeros(1), [torch.ones(2)]), "number": 3, "row": torch.zeros(4)}
    assert [(name, len(part)) for name, part in tensors.named_tensors(batch)] == [
        ("pair.0", 1),
        ("pair.1.0", 2),
        ("row", 4),
    ]
    assert [name for name, _ in tensors.named_tensors(torch.zeros(3))] == ["0"] and tensors.named_tensors(
        "text"
    ) == []


def test_debug_finds_a_gradient_that_is_not_finite(parts, tmp_path):
    with pytest.raises(RuntimeError, match=r"Function 'AbsBackward0' returned nan"):
        train.main([*f"{WORDS} -arch steep -debug -out {tmp_path / 'out'}".split()])


def test_debug_takes_what_the_scale_of_fp16_makes_infinite_for_no_fault(parts, tmp_path, monkeypatch):
    """A gradient of 1: times the scale of 65,536 it is no half-precision number."""
    step = Trainer.training_step
    monkeypatch.setattr(Trainer, "training_step", lambda self, batch: step(self, batch) + self.model(batch[0]).sum())
    run(tmp_path, f"{WORDS} -fp16 -limit_steps 2", wanted=75)
    assert lines(tmp_path / "looked")[-1]["train/bad_steps"]
    run(tmp_path, f"{WORDS} -fp16 -debug -model other")


def test_debug_goes_on_from_the_newest_checkpoint_and_leaves_it(parts, tmp_path, capfd):
    folder = run(tmp_path, f"{WORDS} -limit_steps 5", wanted=75)
    before = snapshot(tmp_path)
    capfd.readouterr()
    run(tmp_path, f"{WORDS} -debug -limit_steps 2")
    said = capfd.readouterr().out
    assert "step 6  loss" in said and "step 7  loss" in said and "no bad tensor in 2 steps" in said
    assert snapshot(tmp_path) == before
    run(tmp_path, f"{WORDS} -debug")
    assert "no bad tensor in 3 steps" in capfd.readouterr().out, "an epoch has four"
    assert folder.exists()


def test_eval_gives_the_figures_of_the_best_weights_on_any_launcher(parts, tmp_path, monkeypatch, capfd):
    folder = run(tmp_path, WORDS)
    best = outcome(folder)["best"]
    (wanted,) = [line for line in lines(folder) if "val/loss" in line and line["epoch"] == best["epoch"]]
    (folder / "STOP").touch()  # it has stopped a run, and has nothing to say to who evaluates it
    before = snapshot(tmp_path)
    for words in ("-cpu 1", "-cpu 2 -epochs 99", "torchrun"):
        with monkeypatch.context() as patch:
            for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items() if words == "torchrun" else ():
                patch.setenv(name, value)
            run(tmp_path, f"{WORDS} -eval {words.replace('torchrun', '')}")
        found = json.loads((folder / "eval.json").read_text())
        for name in ("accuracy", "loss"):
            assert found["val"][name] == pytest.approx(wanted[f"val/{name}"], abs=1e-6)
        assert f"val  accuracy {found['val']['accuracy']:.4f}" in capfd.readouterr().out
        (folder / "eval.json").unlink()
    assert snapshot(tmp_path) == before

    weights = folder / "final" / "weights.safetensors"
    run(tmp_path, f"{WORDS.replace('looked', 'other')} -eval -weights {weights}")
    assert json.loads((tmp_path / "other" / "eval.json").read_text())["weights"] == str(weights)
    with plugins(arch={"norm_net": lambda args: nn.Sequential(norm_net(args), nn.Linear(4, 4))}):
        for words, message in ((f"-weights {weights}", "none of its"), ("-model nothing", "neither best nor final")):
            assert train.main([*f"{WORDS} -eval {words} -out {tmp_path}".split()]) == 2
            assert message in capfd.readouterr().err


def test_eval_refuses_weights_that_leave_a_part_as_it_came(parts, tmp_path, capfd):
    folder = run(tmp_path, f"{WORDS} -epochs 1")

    def larger(args):
        net = norm_net(args)
        net.more = nn.Identity()
        net.more.register_buffer("scale", torch.ones(3))
        return net

    with plugins(arch={"norm_net": larger}):
        assert train.main([*f"{WORDS} -eval -out {tmp_path}".split()]) == 2
    assert "more.scale is missing" in capfd.readouterr().err and not (folder / "eval.json").exists()


def test_overfit_trains_and_evaluates_on_the_same_samples(parts, tmp_path):
    words = "-dataset few -arch mlp -image_size 8 -num_classes 4 -batch_size 16 -epochs 30 -lr_start 0.01 -overfit 12"
    folder = run(tmp_path, words)
    assert folder.name == "few_mlp_overfit"
    assert lines(folder)[-1]["samples"] == 30 * 12
    assert [line["val/accuracy"] for line in lines(folder) if "val/accuracy" in line][-1] == 1.0
    assert train.main([*f"{words} -overfit 13 -out {tmp_path}".split()]) == 2, "not on top of another"
