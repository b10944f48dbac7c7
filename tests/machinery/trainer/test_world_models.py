"""-weights imagenet: what torchvision has for a model."""

import json

import pytest
import runs
import tiny_data
import torch
import torchvision
from PIL import Image

from scripts import predict


def no_network(*_, **__):
    raise OSError("no network")


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """A fake cache of torch.hub with weights for ResNet-18, and photos of two classes."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    file = tmp_path / "cache" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    torch.manual_seed(5)
    torch.save(torchvision.models.resnet18().state_dict(), file)
    tiny_data.make_folder(tmp_path / "photos")
    return file


def test_a_run_from_imagenet_weights_has_a_new_head_and_needs_the_file_only_once(imagenet, tmp_path):
    flags = f"-dataset folder -data {tmp_path}/photos -arch resnet -weights imagenet "
    flags += "-image_size 65 -batch_size 2 -epochs 2 -lr_start 1e-30 -lr_end 0 -weight_decay 0 -cpu 1 -model photos"
    folder = runs.run(tmp_path / "out", f"{flags} -limit_steps 1", wanted=75)
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "120 tensors loaded; not loaded, as missing or of another shape: fc.bias (" in log
    pretrained = torch.load(imagenet, weights_only=True)
    imagenet.unlink()
    final = runs.weights(runs.run(tmp_path / "out", flags))
    assert final["fc.weight"].shape == (2, 512)
    trained = [name for name in final if not name.startswith("fc.") and not name.endswith(("mean", "var", "tracked"))]
    assert len(trained) == 60 and all((final[name] - pretrained[name]).abs().max() < 1e-20 for name in trained)
    runs.run(tmp_path / "out", f"{flags} -eval")
    assert json.loads((folder / "eval.json").read_text())["weights"] == str(folder / "best" / "weights.safetensors")
    assert set(predict.load(folder)([Image.new("RGB", (40, 30))])[0]) == {"ant", "bee"}


def test_imagenet_weights_that_cannot_be_loaded_are_reported_in_one_line(tmp_path, monkeypatch, refused):
    message = refused("-arch mlp -weights imagenet -cpu 1")
    assert message.startswith("train.py: -weights imagenet: cannot be read (module 'lib.arch.mlp' has no attribute")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    message = refused("-dataset fake -arch resnet -weights imagenet -cpu 1")
    assert message.startswith("train.py: -weights imagenet: cannot be read (no network)")
