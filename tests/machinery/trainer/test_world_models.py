"""-arch torchvision: each of its models by name, and -weights imagenet."""

import json
import sys

import pytest
import runs
import tiny_data
import torch
import torchvision
from PIL import Image

from lib import config, predict
from lib.arch import torchvision as plugin
from lib.config import plugins
from lib.utils.errors import UsageError

FAMILIES = {
    torchvision.models.get_model_builder(name).__module__: name
    for name in torchvision.models.list_models(module=torchvision.models)
    if name.endswith("400mf") or not name.startswith("regnet")  # the smallest, as its constructor reads values
}


def args_of(*flags):
    return config.parse_args(["-arch", "torchvision", "-channels", "3", "-image_size", "224", *flags])


def test_a_plugin_with_the_name_of_a_package_does_not_hide_the_package():
    module = plugins.load("arch", "torchvision")
    assert module.__name__ == "lib.arch.torchvision" and sys.modules["torchvision"] is not module
    assert plugin.models is torchvision.models


@pytest.mark.parametrize("name", FAMILIES.values())
def test_a_torchvision_classifier_of_each_family_has_one_output_for_each_class(name):
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = plugin.get_model(args_of("-torchvision_name", name, "-num_classes", "7"))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)


def test_wrong_model_names_and_sizes_are_refused_in_one_line():
    def refused(*flags, function=plugin.get_model):
        with pytest.raises(UsageError) as caught:
            function(args_of(*flags))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "-torchvision_name resnet_50: Unknown model" in refused("-torchvision_name", "resnet_50")
    vit = ("-torchvision_name", "vit_b_16", "-image_size")
    assert "-image_size 30 -torchvision_name vit_b_16: Input shape indivisible" in refused(*vit, "30")
    assert "expected value 224 but got 32" in refused(*vit, "32", function=plugin.get_weights)
    maxvit = ("-torchvision_name", "maxvit_t", "-image_size", "50")
    assert "-image_size 50 -torchvision_name maxvit_t" in refused(*maxvit)


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
    flags = f"-dataset folder -data {tmp_path}/photos -arch torchvision -torchvision_name resnet18 -weights imagenet "
    flags += "-image_size 64 -batch_size 2 -epochs 2 -lr_start 1e-30 -lr_end 0 -weight_decay 0 -cpu 1 -model photos"
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
    message = refused("-dataset fake -arch torchvision -weights imagenet -cpu 1")
    assert message.startswith("train.py: -weights imagenet: cannot be read (no network)")
