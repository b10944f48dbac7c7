"""scripts/export.py writes the run's model, from best, final or a checkpoint."""

import json
import re
import types

import numpy as np
import pytest
import tiny_data
import torch
from command_line import parsed, usage_error
from PIL import ExifTags, Image, ImageOps
from processes import python
from runs import run, same_tensors
from safetensors.torch import load_file

from lib import config
from lib.config import plugins
from lib.utils.checkpoint import run_folder
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError
from scripts import export, predict, preprocessing

TOKENS = "-dataset tokens -tokens_length 16 -tokens_samples 64 -arch gpt -gpt_depth 1 -gpt_width 16"
SMALL = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
LARGE = torch.randint(256, (3, 1, 20, 31), dtype=torch.uint8)
CASES = {  # flags of the run, and of the export; inputs, and what the run's model gets of them
    "images": ("", "", torch.rand(5, 1, 8, 8), lambda images: images),
    "rows of any length": (TOKENS, "", torch.randint(256, (5, 9)), lambda rows: rows),
    "without the data": (f"{TOKENS} -data tests", "-shape 16", torch.randint(256, (5, 9)), lambda rows: rows),
    "bytes": ("-dataset fake -arch convnet -image_size 8", "-pixels", SMALL, Pixels((0.5,), (0.29,)).normalize),
    "images of any size": ("", "-resize", LARGE, lambda images: preprocessing.resize(images, None, 8) / 255),
    "three images": ("", "-fixed 3", torch.rand(3, 1, 8, 8), lambda images: images),
}
LOAD = """
import sys, torch
facts = {"metadata.json": ""}
program = torch.export.load(sys.argv[1], extra_files=facts).module()
torch.save([program(torch.load(sys.argv[2])), facts["metadata.json"]], sys.argv[2])
"""


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A short run on two processes. Its average is that of the last step alone."""
    flags = f"-cpu 2 -epochs 2 -convnet_width 8 -trainer ema -ema_decay 0 -model small -data {config.ROOT / 'data'}"
    return run(tmp_path_factory.mktemp("export"), flags)


def run_export(*args):
    if "-format" in args:  # after torch.export (2.15) no process may be forked that trains
        python("scripts/export.py", *args)
    else:
        assert export.main([*map(str, args)]) == 0


def model_of(trained_run) -> torch.nn.Module:
    args = parsed(["-cfg", str(trained_run / "config.yaml")])
    model = plugins.load("arch", args.arch).get_model(args).eval()
    model.load_state_dict(load_file(trained_run / "final" / "weights.safetensors"))
    return model


def test_every_source_gives_its_weights(trained_run, tmp_path, capsys):
    last, first = run_folder.list_checkpoints(trained_run / "checkpoints")
    final = load_file(trained_run / "final" / "weights.safetensors")
    for source in ("final", last, first):
        run_export(trained_run, "-from", source, "-o", tmp_path / "out.safetensors")
        assert same_tensors(load_file(tmp_path / "out.safetensors"), final) == (source != first)
    run_export(trained_run)
    small, best = (load_file(trained_run / file) for file in ("small.safetensors", "best/weights.safetensors"))
    assert same_tensors(small, best)
    run_export(trained_run, "-o", trained_run / "small.pt", "-from", "final")
    assert same_tensors(torch.load(trained_run / "small.pt", weights_only=True), final)
    assert capsys.readouterr().err.count("not exported are trainer.average") == 2, "of the two checkpoints"


def test_torchexport_gives_the_same_outputs_for_any_batch_size(trained_run, tmp_path):
    run_export(trained_run, "-format", "torchexport", "-from", "final")
    images, file = torch.rand(7, 1, 8, 8), tmp_path / "images.pt"
    torch.save(images, file)
    python("-c", LOAD, trained_run / "small.pt2", file)
    outputs, facts = torch.load(file)
    torch.testing.assert_close(outputs, model_of(trained_run)(images))
    assert json.loads(facts)["image_size"] == 8


@pytest.mark.slow
def test_onnx_classifies_a_turned_photo_as_the_page_says(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs uv pip install --group export")
    tiny_data.make_folder(tmp_path)
    folder = run(tmp_path, f"-dataset folder -data {tmp_path} -arch mlp -image_size 16 -cpu 1 -epochs 9 -model small")
    run_export(folder, "-format", "onnx", "-resize")
    image, exif = Image.linear_gradient("L").resize((90, 60)).convert("RGB"), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(tmp_path / "photo.jpg", exif=exif)
    [snippet] = re.findall(r"```python\n(photo = .*?)```", (config.ROOT / "docs" / "resume.md").read_text(), re.S)
    snippet = snippet.replace("out/folder_resnet/folder_resnet.onnx", str(folder / "small.onnx"))
    names = {"onnxruntime": onnxruntime, "Image": Image, "ImageOps": ImageOps, "np": np}
    exec(snippet.replace("photo.jpg", str(tmp_path / "photo.jpg")), names)
    wanted, lying = predict.load(folder)([Image.open(tmp_path / "photo.jpg"), image])
    ant = torch.from_numpy(names["logits"]).softmax(1)[0, 0].item()
    assert ant == pytest.approx(wanted["ant"], abs=0.01) and 10 * abs(ant - wanted["ant"]) < abs(ant - lying["ant"])
    assert names["session"].get_modelmeta().custom_metadata_map["upright"] == "true"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_onnx_takes_tokens_and_images_of_bytes(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs uv pip install --group export")
    flags, more, inputs, prepare = CASES[case]
    folder = run(tmp_path, f"{flags} -cpu 2 -model small -epochs 1")
    run_export(folder, "-format", "onnx", "-from", "final", *more.split())
    session = onnxruntime.InferenceSession(folder / "small.onnx")
    [outputs] = session.run(None, {"input": inputs.numpy()})
    np.testing.assert_allclose(outputs, model_of(folder)(prepare(inputs)).detach(), rtol=1e-3, atol=1e-3)
    facts = {name: json.loads(fact) for name, fact in session.get_modelmeta().custom_metadata_map.items()}
    sizes = ", ".join(map(str, session.get_inputs()[0].shape))
    assert facts["run"] == "small" and facts["input"] == f"{str(inputs.dtype).removeprefix('torch.')} ({sizes})"
    assert ("3" in sizes.split(",")[0]) == ("-fixed" in more) and sizes.endswith("width") == ("-resize" in more)


def test_an_export_that_differs_from_the_model_is_refused_with_what_to_do(trained_run, script_error, monkeypatch):
    model = torch.nn.Linear(4, 2)
    made = export.Exportable(model, torch.zeros(2, 4), {0: "batch"}, {})
    export.check(made, model)
    export.check(export.Exportable(lambda x: (x, None), torch.zeros(2, 4), {}, {}), lambda x: (x, None))
    answer = types.SimpleNamespace(logits=torch.ones(2), cache=object())
    assert export.has_other_parts(answer) and not export.has_other_parts({"logits": torch.ones(2), "loss": None})
    assert torch.equal(export.Outputs(torch.nn.Identity())(answer), torch.ones(2))
    entries = {"features": torch.ones(2), "pair": [torch.ones(3)], "logits": torch.zeros(2)}
    assert export.facts_on_output(entries) == {"output": "logits"} and not export.facts_on_output(torch.ones(2))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, output_names, **more: output_names)
    found = export.export_onnx(export.NamedOutputs(lambda _: entries), (None,), None)
    assert found == ["output", "output_features", "output_pair.0"]
    norm = torch.nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(UsageError, match=r"the model takes no inputs of \(1, 4\) \(ValueError: .*-fixed N"):
        export.check(export.Exportable(norm, torch.zeros(2, 4), {0: "batch"}, {}), norm)
    with pytest.raises(UsageError, match="returns no tensor"):
        export.check(export.Exportable(lambda x: None, torch.zeros(2, 4), {}, {}), lambda x: None)
    only_two = {"takes no inputs of": lambda x: model(x.view(2, 4)), "other shapes": lambda x: model(x)[:2]}
    only_two["other values"] = lambda x: model(x) + (0 if len(x) == 2 else 0.1)
    for fault, wrong in only_two.items():
        assert re.search(f"what was exported .*{fault}.*-fixed N", usage_error(export.check, made, wrong))
        export.check(export.Exportable(model, torch.zeros(2, 4), {}, {}), wrong)
    with pytest.raises(UsageError, match=r"cannot be exported .ValueError: no more.; -fixed N"):
        export.exported(lambda *_: exec("raise RuntimeError from ValueError('no\\nmore')"), made)
    assert ".onnx is the ending of -format onnx" in script_error(export, trained_run, "-o=x.onnx", "-format=torch")
    assert "-pixels is for -format onnx" in script_error(export, trained_run, "-pixels")
    infinite = torch.tensor([1.0, -torch.inf])
    assert export.is_close(infinite, infinite) and not export.is_close(infinite + 0.1, infinite)
    assert not export.is_close(torch.tensor([True]), torch.tensor([False]))
