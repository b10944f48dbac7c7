"""scripts/predict.py: predictions for files equal those of the run's evaluation."""

import csv
import json
import logging
import os
import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from command_line import usage_error
from PIL import Image
from runs import few, plugins, run
from safetensors.torch import save_file

from lib import config
from scripts import export, predict

PHOTOS = "-dataset folder -arch convnet -image_size 16 -cpu 1 -epochs 4 -batch_size 8 -lr_start 0.01"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noisy images of three brightnesses; a few val images are classified wrongly."""
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 20)):
        for name, light in (("dark", 100), ("grey", 120), ("light", 140)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(draw.normal(light, 30, (20, 24, 1)) + draw.normal(0, 20), 0, 255).astype(np.uint8)
                Image.fromarray(pixels.repeat(3, 2)).save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained_run(photos, tmp_path_factory):
    return run(tmp_path_factory.mktemp("out"), f"{PHOTOS} -data {photos} -model photos")


def predictions(capsys, *args) -> str:
    capsys.readouterr()
    logging.disable(logging.INFO)  # a run in this process has enabled it
    try:
        assert predict.main([str(arg) for arg in args]) == 0
    finally:
        logging.disable(logging.NOTSET)
    return "".join(capsys.readouterr())


def test_val_images_are_predicted_as_in_the_evaluation(photos, trained_run, tmp_path, capsys, caplog, monkeypatch):
    run(trained_run.parent, f"{PHOTOS} -data {photos} -model photos -eval")
    accuracy = json.loads((trained_run / "eval.json").read_text())["val"]["accuracy"]
    moved = shutil.copytree(photos / "val", tmp_path / "val")
    hidden = photos.rename(photos.parent / "away")  # on another machine they do not exist
    monkeypatch.setattr(predict, "BATCH", 7)
    try:
        said = predictions(capsys, trained_run, moved, "-device", "cpu", "-o", tmp_path / "answers.csv")
        predictions(capsys, trained_run, moved, "-device", "cpu", "-o", tmp_path / "answers.JSON")
        table = predictions(capsys, trained_run, moved / "dark" / "3.png", "-device", "cpu")
    finally:
        hidden.rename(photos)
    rows = list(csv.DictReader((tmp_path / "answers.csv").open()))
    right = sum(row["class"] == row["folder"] for row in rows)
    wrong = next(row for row in rows if row["class"] != row["folder"])
    assert said.count(".png") == 5 and f"of another class\n  {wrong['file']}  {wrong['class']} " in said
    assert f"\npredict.py: {60 - right} of 60 images lie in" in said
    assert len(rows) == 60 and right / 60 == pytest.approx(accuracy, abs=1e-9) and 0.34 < accuracy < 1
    for row in rows:
        shares = {name: float(row[name]) for name in ("dark", "grey", "light")}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5) and f"/{row['folder']}/" in row["file"]
        assert float(row["probability"]) == shares[row["class"]] == max(shares.values())
    others = json.loads((tmp_path / "answers.JSON").read_text())
    assert [{name: str(value) for name, value in one.items()} for one in others] == rows
    first = next(row for row in rows if row["file"].endswith("dark/3.png"))
    assert table.startswith(first["file"]) and f"{first['class']} {float(first['probability']):.4f}" in table
    [values] = predict.load(trained_run)([Image.open(moved / "dark" / "3.png")])  # the function for notebooks
    assert values == pytest.approx({name: float(first[name]) for name in values}, abs=1e-6)
    model = predict.load_model(trained_run)
    assert not model.training and not any(one.requires_grad for one in model.parameters())
    other = shutil.copytree(trained_run, tmp_path / "other")
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("dark", "dusk"))
    predict.load_model(trained_run, source=other / "best" / "weights.safetensors")
    assert "its classes are ['dusk', 'grey', 'light'], and here they are ['dark'" in caplog.text
    image = torch.randn(3, 16, 16)  # a tensor is taken as the model gets it
    (other / "config.yaml").write_text((other / "config.yaml").read_text().partition("about:")[0])
    assert [*predict.load(other)([image])[0]] == ["0", "1", "2"]
    shares = predict.load(trained_run)([image])[0].values()
    assert model(image[None]).softmax(1)[0].tolist() == pytest.approx([*shares], abs=1e-6)


def test_the_prediction_for_a_text_is_its_next_byte(tmp_path, capsys, caplog, script_error, monkeypatch):
    (tmp_path / "text").write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
    flags = f"-dataset tokens -data {tmp_path / 'text'} -tokens_length 16 -tokens_samples 512 -trainer ema"
    folder = run(tmp_path, f"{flags} -gpt_depth 1 -gpt_width 32 -gpt_heads 2 -cpu 1 -epochs 2 -model letters")
    (tmp_path / "text").rename(tmp_path / "away")
    (file := tmp_path / "start.txt").write_text("xyz\nabcdefghij" * 9)
    printed = json.loads(predictions(capsys, folder, file, "-text", "mno", "-format", "json", "-device", "cpu"))
    assert [one["class"] for one in printed] == ["k", "p"] and printed[0]["probability"] == printed[0]["k"] > 0.1
    assert "\\n" in printed[0] and sum(value for value in list(printed[0].values())[3:]) == pytest.approx(1, abs=1e-4)
    (line,) = predictions(capsys, folder, "-text", "mno" * 99, "-device", "cpu").splitlines()
    assert line.startswith("mnomno") and ".. " in line and len(line) < 120
    answer = predict.load(folder)
    assert answer(["mno", "abcdefgh"]) == [*answer(["mno"]), *answer(["abcdefgh"]), *answer([])], "of other lengths"
    assert "-o x.tsv: give it the ending .csv, .json or .txt" in script_error(predict, folder, "-o", "x.tsv")
    assert "an empty text" in script_error(predict, folder, "-text", "")
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    for step in ("a training_step", "an evaluation_step"):
        monkeypatch.setattr(f"lib.trainer.ema.Trainer.{step.split()[1]}", None)
        assert predict.main([str(folder), str(tmp_path / "image.png"), "-device", "cpu"]) == 1
        printed, said = capsys.readouterr()
        assert "takes no images" in printed and f"softmax of the outputs; -trainer ema has {step} of its own" in said
    options = types.SimpleNamespace(run=folder, shape=[16], fixed=None, pixels=False, resize=False, format="onnx")
    export.prepared(options, export.read(folder / "final" / "weights.safetensors"))
    predict.load(folder)
    note = "-trainer ema has an evaluation_step of its own: what it does to inputs is missing here, and its loss may"
    assert note in said and f"export.py: {note}" in capsys.readouterr().err and note in caplog.text


def test_every_file_gets_its_row_whatever_becomes_of_the_others(trained_run, tmp_path, capsys):
    (folder := tmp_path / "new").mkdir()
    light = Image.new("RGB", (4000, 3000), (140, 140, 140))
    light.save(folder / "a.jpg")
    (folder / "b.jpg").write_bytes((folder / "a.jpg").read_bytes()[:5000])
    Image.new("1", (20000, 15000)).save(folder / "c.png")  # 300 megapixels
    for size, name in (((16000, 12500), "d.jpg"), ((1, 50000), "e.png"), ((9, 9), os.fsdecode(b"g\xff\x1b.jpg"))):
        light.resize(size).save(folder / name)  # the first has 200 megapixels, and is read at an eighth
    (folder / "f.png").write_bytes(b"no image")
    (folder / "._a.jpg").write_bytes(b"debris")
    files = [folder, tmp_path / "a\nb" / "missing.png", tmp_path / "note.txt"]
    (tmp_path / "note.txt").write_text("a text")
    for form, given in (("csv", files), ("json", files[1:]), ("table", files[1:])):
        command = [trained_run, *given, "-device", "cpu", "-format", form, "-o", tmp_path / f"x.{form}"]
        assert predict.main([str(one) for one in command]) == 1
    said = capsys.readouterr().err
    assert "5 of 9 files could not be predicted" in said and said.count("2 of 2 files") == 2
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    faults = {row["file"].rpartition("/")[2]: row["error"] for row in rows}
    assert list(faults) == [*"a.jpg b.jpg c.png d.jpg e.png f.png g\\udcff\\x1b.jpg missing.png note.txt".split()]
    assert [name for name, fault in faults.items() if not fault] == ["a.jpg", "d.jpg", "e.png", "g\\udcff\\x1b.jpg"]
    assert "truncated" in faults["b.jpg"] and "300000000 pixels" in faults["c.png"]
    assert "no such file" in faults["missing.png"]
    assert re.match(r"a file .txt is not read \(read are .jpg .* takes no text \(AttributeError", faults["note.txt"])
    assert [row["class"] for row in rows if not row["error"]] == ["light"] * 4
    assert len(json.loads((tmp_path / "x.json").read_text())) == 2 == (tmp_path / "x.table").read_text().count("\n")
    [row] = predict.answers(lambda image: image.size[5] / 0, None, [folder / "a.jpg"])
    assert row.fault == "get_transform fails: IndexError: tuple index out of range"
    assert [type(predict.read_text(one)) for one in (tmp_path / "note.txt", folder / "b.jpg")] == [str, bytes]


def test_outputs_of_a_shape_that_no_row_can_show_are_one_line():
    mse, classes = (config.parse_args(["-loss", name, "-num_classes", "3"]) for name in ("mse", "cross_entropy"))
    for args, shape, width in ((mse, (2,), 1), (mse, (2, 5), 5), (classes, (2, 3), 3), (classes, (2, 7, 3), 3)):
        assert predict.one_row_each(torch.ones(shape), 2, args).shape == (2, width)
    for args, shape in ((classes, (2,)), (classes, (2, 1)), (classes, (2, 3, 7)), (mse, (2, 3, 4, 4)), (mse, (1, 3))):
        error = f"-arch convnet gives outputs {shape} for 2 samples"
        assert error in usage_error(predict.one_row_each, torch.ones(shape), 2, args)


def test_a_model_gets_its_input_by_the_name_that_it_has_in_training(tmp_path, monkeypatch, script_error):
    class Late(torch.nn.Linear):
        def __init__(self, *shape):
            super().__init__(*shape)
            self.register_buffer("mask", torch.rand(64), persistent=False)  # in no file: as -seed draws it

        def forward(self, prior=None, image=None):
            return super().forward(image * self.mask) if prior is None else prior[:, :4]

    rows = [{"image": image, "label": label} for image, label in few(None)["train"]]
    with plugins(arch={"late": lambda args: Late(64, 4)}, dataset={"rows": lambda args: {"train": rows}}):
        folder = run(tmp_path, "-arch late -dataset rows -num_classes 4 -cpu 1 -epochs 1")
        dataset, images = sys.modules["lib.dataset.rows"], torch.ones(1, 64)
        dataset.get_transform = lambda args: None
        wanted = predict.load_model(folder)(image=images)
        assert [*predict.load(folder)([images[0]])[0].values()] == pytest.approx(wanted.softmax(1)[0].tolist())
        options = types.SimpleNamespace(run=folder, shape=None, fixed=None, pixels=False, resize=False, format="onnx")
        file = folder / "final" / "weights.safetensors"
        assert torch.equal(export.prepared(options, export.read(file)).model(images), wanted)
        torch.manual_seed(5)  # of the caller's generator
        assert torch.equal(*(predict.load_model(folder).mask for _ in range(2))) and torch.initial_seed() == 5
        monkeypatch.setattr(dataset, "get_dataset", lambda args: [])
        assert "forward takes its input as prior or image, and the data" in script_error(predict, folder)
        monkeypatch.setattr(Late, "forward", lambda self, image, more=None: None)
        more = [{**row, "more": 0} for row in rows]
        for get, message in ((lambda args: {"train": more}, "also gets more"), (None, "optional more: .* be read")):
            monkeypatch.setattr(dataset, "get_dataset", get)
            with pytest.warns(UserWarning, match=message):
                predict.load(folder)
        monkeypatch.setattr(Late, "forward", lambda self, image, labels: None)
        assert "forward needs labels, and here it has one input" in script_error(predict, folder)
    with plugins(arch={"late": lambda args: torch.nn.Linear(9, 9)}, dataset={"rows": None}):
        assert script_error(predict, folder).startswith(f"predict.py: {file}: not the weights of this model")
    with plugins(arch={"late": lambda args: torch.nn.Linear(64, 4, bias=False)}, dataset={"rows": None}):
        assert "late is another model than that of these weights: it has no bias" in script_error(predict, folder)
    with plugins(arch={"late": lambda args: torch.nn.Linear(64, 4)}, dataset={"rows": None}):
        for prefix, source in (("", None), ("_orig_mod.", "final"), ("inner.", file)):  # the last as of a wrapper
            save_file({f"{prefix}{name}": one for name, one in torch.nn.Linear(64, 4).state_dict().items()}, file)
            predict.load_model(folder, source=source)
        assert re.search("-trainer trainer has trained .*: inner.* is .* here", script_error(predict, folder))
