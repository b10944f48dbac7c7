"""-weights of files that other programs saved, their names, formats and folders, and of torchvision (imagenet)."""

import argparse
import json
import os
import re

import pytest
import runs
import tiny_data
import torch
import torchvision
from command_line import usage_error
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from lib.utils.checkpoint.weights import load_into
from scripts import predict


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self, classes: int = 7):
        super().__init__()
        self.embed, self.inner = nn.Embedding(classes, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, classes, bias=False)
        self.head.weight = self.embed.weight

    def get_extra_state(self):
        return {"no": "tensor"}


class WithBackbone(nn.Module):
    """A model around another one."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)), nn.Linear(5, 2)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's tensors by name, tied ones under each name."""
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one).values(), tensors_of(other).values(), strict=True))


def save(tensors: object, path) -> str:
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return str(path)


def refusal(file, model=None) -> str:
    return usage_error(load_into, str(file), model or Tied())


@pytest.mark.parametrize("dropped", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_tied_weights_that_a_file_has_once_are_found_under_either_name(tmp_path, dropped, name):
    made, given = Tied(), Tied()
    tensors = {key: value for key, value in tensors_of(given).items() if key != dropped}
    assert load_into(save(tensors, tmp_path / name), made).endswith("3 tensors loaded") and same(made, given)


PREFIXES = "module. _orig_mod. model. backbone. module.model. _orig_mod.module.backbone. backbone.model. "
PREFIXES += "model._orig_mod.module. state_dict.module.net. student. params.ema. module.bert."


@pytest.mark.parametrize("prefix", PREFIXES.split())
def test_prefixes_in_any_order_are_left_out(tmp_path, prefix):
    names = ("encoder", "model", "head")  # of modules: the second is also that of a prefix
    for build in (Tied, WithBackbone, lambda: nn.ModuleDict({name: nn.Linear(4, 4) for name in names})):
        given, made = build(), build()
        tensors = {prefix + name: value for name, value in tensors_of(given).items()}
        said = load_into(save(tensors, tmp_path / "w.safetensors"), made)
        assert same(made, given) and f"; as {prefix}" in said and "not " not in said


def test_a_name_that_may_mean_two_tensors_is_not_taken(tmp_path):
    two = nn.ModuleDict({"encoder": nn.Linear(4, 4), "net": nn.Linear(4, 4)})
    deep = nn.ModuleDict({f"of {depth}": torchvision.ops.MLP(4, [4] * depth) for depth in (1, 9)})
    for given, made in ((nn.Linear(4, 4), two), (two, nn.Linear(4, 4)), (deep["of 9"], deep)):
        assert "not the weights of this model" in refusal(save(tensors_of(given), tmp_path / "w.pt"), made)


@pytest.mark.parametrize(("part", "prefix"), [(a, b) for a in ("backbone", "enc") for b in ("", "module.", "model.")])
def test_weights_of_a_backbone_go_into_the_backbone(tmp_path, part, prefix):
    given, made = WithBackbone().backbone, nn.ModuleDict({part: WithBackbone().backbone, "head": nn.Linear(5, 2)})
    tensors = {prefix + name: value for name, value in tensors_of(given).items()}
    tensors[f"{prefix}fc.weight"] = torch.ones(1000, 5)
    said = load_into(save(tensors, tmp_path / "w.pt"), made)
    assert same(made[part], given)
    assert "not loaded, as missing or of another shape: head.bias, head.weight; not used: " in said


@pytest.mark.parametrize("names", [["conv1.weight"], ["a.b", "c.d.e"], ["inner.scale"]])
def test_where_nothing_fits_a_name_of_each_side_is_shown(tmp_path, names):
    message = refusal(save({name: torch.ones(3, 2) for name in names}, tmp_path / "w.safetensors"))
    assert f"it has {', '.join(names)}, and lacks embed.weight, " in message


def test_values_that_cannot_be_the_models_are_refused(tmp_path):
    good, file = tensors_of(Tied()), tmp_path / "w.pt"
    two = {**good, "head.weight": good["head.weight"] + 1}
    assert "embed.weight and head.weight are one tensor here" in refusal(save(two, file))
    for kind in (torch.float8_e4m3fn, torch.int8):
        message = refusal(save({name: value.to(kind) for name, value in good.items()}, file))
        there = f"embed.weight ({kind} (7, 4) there, torch.float32 (7, 4) here)"
        assert f"{there}: save quantized weights as floats first" in message
    odd = {**good, "inner.bias": good["inner.bias"] * float("nan")}
    assert "inner.bias (1 in all) is not finite" in refusal(save(odd, file))


ADAM = {"state": {0: {"exp_avg": torch.ones(4, 4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
PROGRAMS = {  # prefix and name of the tensors, and what else is in the file
    "lightning": ("model.", "state_dict", {"optimizer_states": [ADAM], "callbacks": {"best": torch.ones(())}}),
    "timm": ("", "state_dict", {"arch": "vit", "optimizer": ADAM, "args": argparse.Namespace(model="vit", lr=0.1)}),
    "torch's tutorial": ("module.", "model_state_dict", {"loss": torch.ones(())}),
}
PROGRAMS["lightning"][2].update({"pytorch-lightning_version": "2.5.0", "hyper_parameters": {"lr": 0.1}})


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["w.ckpt", "w.safetensors.pt"])
def test_checkpoints_of_other_programs_are_read(tmp_path, program, name):
    given, made = WithBackbone(), WithBackbone()
    prefix, entry, others = PROGRAMS[program]
    tensors = {f"{prefix}{name}": value for name, value in tensors_of(given).items()}
    load_into(save({"epoch": 3, entry: tensors, **others}, tmp_path / name), made, whole=True)
    assert same(made, given)


@pytest.mark.parametrize(("ending", "write"), [("safetensors", save_file), ("bin", torch.save)])
def test_a_folder_of_shards_is_read_by_its_index(tmp_path, ending, write):
    given, made = Tied(), Tied()
    tensors = {name: value for name, value in tensors_of(given).items() if name != "head.weight"}
    files = {name: f"m-0000{n % 2 + 1}-of-00002.{ending}" for n, name in enumerate(tensors)}
    for file in {*files.values()}:
        write({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (tmp_path / f"{'pytorch_' * (ending == 'bin')}model.{ending}.index.json").write_text(json.dumps(index))
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    load_into(str(tmp_path), made, whole=True)
    assert same(made, given)
    load_into(str(next(tmp_path.glob("*.index.json"))), Tied(), whole=True)
    assert "it is one of 2 shards: give their folder" in refusal(tmp_path / f"m-00001-of-00002.{ending}")
    (tmp_path / f"m-00002-of-00002.{ending}").unlink()
    assert re.search(f"No such file.*m-00002-of-00002.{ending}", refusal(tmp_path))


def test_an_index_leads_to_no_file_outside_its_folder_and_a_folder_has_one_file_of_weights(tmp_path):
    wanted = "a run's folder with best or final weights, a file, or a folder with one weights file is needed"
    assert f"{wanted}; in this folder are none" in refusal(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("v.pt", "w.pt"):
        save(tensors_of(Tied()), tmp_path / name)
    assert f"{wanted}; in this folder are v.pt, w.pt" in refusal(tmp_path)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"head.weight": "../w.pt"}}))
    assert re.search("No such file.*model/w.pt", refusal(tmp_path / "model"))
    index.unlink()
    os.mkfifo(index)
    assert "not a regular file" in refusal(tmp_path / "model")
    (tmp_path / "config.json").write_text("{}")
    assert "config.json: cannot be read" in refusal(tmp_path / "config.json")


def no_network(*_, **__):
    raise OSError("no network")


def test_a_run_from_imagenet_weights_has_a_new_head_and_needs_the_file_only_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    file = tmp_path / "cache" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    pretrained = torchvision.models.resnet18().state_dict()
    torch.save(pretrained, file)
    tiny_data.make_folder(tmp_path / "photos")
    flags = f"-dataset folder -data {tmp_path}/photos -arch resnet -weights imagenet "
    flags += "-image_size 65 -batch_size 2 -epochs 2 -lr_start 1e-30 -lr_end 0 -weight_decay 0 -cpu 1 -model photos"
    folder = runs.run(tmp_path / "out", f"{flags} -limit_steps 1", wanted=75)
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "120 tensors loaded; not loaded, as missing or of another shape: fc.bias (" in log
    file.unlink()
    final = runs.weights(runs.run(tmp_path / "out", flags))
    assert final["fc.weight"].shape == (2, 512)
    trained = [name for name in final if not name.startswith("fc.") and not name.endswith(("mean", "var", "tracked"))]
    assert len(trained) == 60 and all((final[name] - pretrained[name]).abs().max() < 1e-20 for name in trained)
    runs.run(tmp_path / "out", f"{flags} -eval")
    assert json.loads((folder / "eval.json").read_text())["weights"] == str(folder / "best" / "weights.safetensors")
    assert set(predict.load(folder)([Image.new("RGB", (40, 30))])[0]) == {"ant", "bee"}


def test_imagenet_weights_that_cannot_be_loaded_are_reported_in_one_line(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    for words, reason in (("mlp", "module 'lib.arch.mlp' has no attribute"), ("resnet -dataset fake", "no network)")):
        message = refused(f"-arch {words} -weights imagenet -cpu 1")
        assert message.startswith(f"train.py: -weights imagenet: cannot be read ({reason}")
