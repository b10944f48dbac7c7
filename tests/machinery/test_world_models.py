"""-arch torchvision and -arch timm: each of their models by name, and -weights imagenet."""

import json
import sys

import pytest
import runs
import tiny_data
import torch
import torchvision
from cluster import require_package
from PIL import Image

from lib import config, predict
from lib.arch import timm as timm_plugin
from lib.arch import torchvision as plugin
from lib.config import plugins
from lib.utils.errors import UsageError

NAMES = torchvision.models.list_models(module=torchvision.models)
TIMM = require_package("timm", "world")


def args_of(*flags, arch="torchvision"):
    return config.parse_args(["-arch", arch, "-channels", "3", "-image_size", "224", *flags])


def test_a_plugin_with_the_name_of_a_package_does_not_hide_the_package():
    for name in ("torchvision", "timm"):
        module = plugins.load("arch", name)
        assert module.__name__ == f"lib.arch.{name}" and sys.modules.get(name) is not module
    assert plugin.models is torchvision.models


@pytest.mark.parametrize("name", NAMES)
def test_each_torchvision_classification_model_has_one_output_for_each_class(name):
    if name.startswith("regnet") and not name.endswith("400mf"):
        pytest.skip("its constructor reads values of tensors, and it is large")
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = plugin.get_model(args_of("-torchvision_name", name, "-num_classes", "7"))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)


def test_wrong_model_names_and_sizes_are_refused_in_one_line(tmp_path, monkeypatch):
    def refused(*flags, function=plugin.get_model):
        with pytest.raises(UsageError) as caught:
            function(args_of(*flags))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "do you mean resnet50" in refused("-torchvision_name", "resnet_50")
    assert "-torchvision_name raft_large: torchvision has no such" in refused("-torchvision_name", "raft_large")
    assert "-channels 1: torchvision's models take 3" in refused("-channels", "1")
    vit = ("-torchvision_name", "vit_b_16", "-image_size")
    assert "-image_size 30 -torchvision_name vit_b_16: Input shape indivisible" in refused(*vit, "30")
    assert "expected value 224 but got 32" in refused(*vit, "32", function=plugin.get_weights)
    assert "-image_size 50 -torchvision_name maxvit_t" in refused(
        "-torchvision_name", "maxvit_t", "-image_size", "50"
    )

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    with pytest.raises(OSError, match=f"no network: put https://download.pytorch.org/models/{file.name} at {file}"):
        plugin.get_weights(args_of("-torchvision_name", "resnet18"))


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


SLOW = [pytest.param(flags, marks=pytest.mark.slow) for flags in ("-cpu 2", "-cpu 2 -parallel fsdp")]


@pytest.mark.parametrize("more", ["-cpu 1", *SLOW])
def test_a_run_from_imagenet_weights_has_a_new_head_and_needs_the_file_only_once(imagenet, more, tmp_path):
    flags = f"-dataset folder -data {tmp_path}/photos -arch torchvision -torchvision_name resnet18 -weights imagenet "
    flags += f"-image_size 64 -batch_size 2 -epochs 2 -lr_start 1e-30 -lr_end 0 -weight_decay 0 {more} -model photos"
    folder = runs.run(tmp_path / "out", f"{flags} -limit_steps 1", wanted=75)
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "120 tensors loaded; not loaded, as missing or of another shape: fc.bias, fc.weight" in log
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
    assert (
        message
        == "train.py: -weights imagenet: cannot be read (module 'lib.arch.mlp' has no attribute 'get_weights')"
    )
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    message = refused("-dataset fake -arch torchvision -weights imagenet -cpu 1")
    assert message.startswith("train.py: -weights imagenet: cannot be read (no network: put https://download")


def test_a_missing_timm_is_reported_in_one_line(monkeypatch, tmp_path, refused):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "-arch timm: the package timm is not installed" in refused("-dataset fake -arch timm -cpu 1")


@TIMM
def test_timm_models_take_the_images_and_have_one_output_for_each_class():
    for name, channels, size in (("resnet18", 1, 32), ("vit_tiny_patch16_224", 3, 64), ("convnext_atto", 4, 64)):
        flags = ("-timm_name", name, "-channels", str(channels), "-image_size", str(size), "-num_classes", "7")
        model = timm_plugin.get_model(args_of(*flags, arch="timm"))
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)
    with pytest.raises(UsageError, match=r"-timm_name resnet_18: timm has no such model .*resnet18"):
        timm_plugin.get_model(args_of("-timm_name", "resnet_18", arch="timm"))


@TIMM
def test_timm_weights_are_read_from_a_file_and_the_file_is_named_if_there_is_no_network(tmp_path, monkeypatch):
    import timm
    from safetensors.torch import save_file

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    args = args_of("-timm_name", "resnet18", "-channels", "1", "-num_classes", "2", arch="timm")
    file = tmp_path / "hub" / "checkpoints" / "resnet18.a1_in1k.safetensors"
    named = f"no network: put https://huggingface.co/timm/resnet18.a1_in1k/resolve/main/model.safetensors at {file}"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=named):
        patch.setattr(timm.models._builder, "load_state_dict_from_hf", no_network)
        timm_plugin.get_weights(args)
    file.parent.mkdir(parents=True)
    truth = timm.create_model("resnet18").state_dict()
    save_file(truth, file)
    found = timm_plugin.get_weights(args)
    assert torch.equal(found["layer1.0.conv1.weight"], truth["layer1.0.conv1.weight"])
    assert found["conv1.weight"].shape == (64, 1, 7, 7), "the weights are adapted to the number of channels"
