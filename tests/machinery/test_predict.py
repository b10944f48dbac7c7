"""scripts/predict.py and lib/predict.py: a run's answers to files are those of its evaluation, without its data."""

import csv
import json
import logging
import shutil
import sys
import types

import numpy as np
import pytest
import tiny_data
import torch
from PIL import Image
from runs import few, lines, plugins, run
from safetensors.torch import load_file
from torch import nn

from lib import config, predict
from lib.arch import gpt
from lib.dataset import cifar10
from scripts import predict as script

PHOTOS = "-dataset folder -arch convnet -image_size 16 -cpu 1 -epochs 4 -batch_size 8 -lr_start 0.01"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noisy images, light and dark and between: a few of the val ones are taken for others."""
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
def trained(photos, tmp_path_factory):
    """A run on these images, from which its training images were taken away afterwards."""
    return run(tmp_path_factory.mktemp("out"), f"{PHOTOS} -data {photos} -model photos")


def said(capsys, *words) -> str:
    capsys.readouterr()
    logging.disable(logging.INFO)  # a run in this process has set it up
    try:
        assert script.main([str(word) for word in words]) == 0
    finally:
        logging.disable(logging.NOTSET)
    return capsys.readouterr().out


def refused(capsys, *words) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        script.main([str(word) for word in words])
    text = capsys.readouterr().err
    assert end.value.code == 2 and text.startswith("predict.py: ") and len(text.splitlines()) == 1
    return text


def test_answers_to_the_val_images_are_as_good_as_the_runs_evaluation(photos, trained, tmp_path, capsys, monkeypatch):
    run(trained.parent, f"{PHOTOS} -data {photos} -model photos -eval")
    accuracy = json.loads((trained / "eval.json").read_text())["val"]["accuracy"]
    moved = shutil.copytree(photos / "val", tmp_path / "val")
    hidden = photos.rename(photos.parent / "away")  # as on another machine
    monkeypatch.setattr(script, "BATCH", 7)
    try:
        said(capsys, trained, moved, "-device", "cpu", "-o", tmp_path / "answers.csv")
        said(capsys, trained, moved, "-device", "cpu", "-o", tmp_path / "answers.json")
        table = said(capsys, trained, moved / "dark" / "3.png", "-device", "cpu")
    finally:
        hidden.rename(photos)
    rows = list(csv.DictReader((tmp_path / "answers.csv").open()))
    right = sum(f"/{row['class']}/" in row["file"] for row in rows)
    assert len(rows) == 60 and right / 60 == pytest.approx(accuracy, abs=1e-9) and 0.34 < accuracy < 1
    for row in rows:
        shares = {name: float(row[name]) for name in ("dark", "grey", "light")}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert float(row["probability"]) == shares[row["class"]] == max(shares.values())
    others = json.loads((tmp_path / "answers.json").read_text())
    assert [{name: str(value) for name, value in one.items()} for one in others] == rows
    first = next(row for row in rows if row["file"].endswith("dark/3.png"))
    assert table.startswith(first["file"]) and f"{first['class']} {float(first['probability']):.4f}" in table


def test_the_function_for_notebooks_says_the_same(trained, photos, capsys):
    files = sorted((photos / "val" / "grey").iterdir())[:2]
    answers = predict.load(trained)([Image.open(file) for file in files])
    printed = json.loads(said(capsys, trained, *files, "-format", "json", "-device", "cpu"))
    for answer, one in zip(answers, printed, strict=True):
        assert answer == pytest.approx({name: one[name] for name in ("dark", "grey", "light")}, abs=1e-6)


def test_the_best_weights_are_taken_and_else_the_final_ones(trained, photos, tmp_path, capsys):
    file = photos / "val" / "dark" / "0.png"
    copy = shutil.copytree(trained, tmp_path / "copy")
    best = said(capsys, copy, file, "-device", "cpu")
    (copy / "best").rename(copy / "other")
    shutil.copytree(copy / "other", copy / "best")
    assert said(capsys, copy, file, "-device", "cpu") == best
    shutil.rmtree(copy / "best")
    assert said(capsys, copy, file, "-device", "cpu")
    shutil.rmtree(copy / "final")
    assert "no best or final weights yet" in refused(capsys, copy, file)
    assert "config.yaml" in refused(capsys, tmp_path, file)


def test_digits_are_read_from_images_of_any_size(tmp_path, capsys):
    folder = run(tmp_path, "-cpu 1 -epochs 3 -model digits")
    with np.load("data/digits.npz") as arrays:
        chosen = np.flatnonzero(arrays["split"] == "val")
        images, labels = arrays["images"][chosen], arrays["labels"][chosen]
    for number, (image, label) in enumerate(zip(images, labels)):
        pixels = np.round(image / 16 * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{label}_{number}.png")
    printed = json.loads(said(capsys, folder, tmp_path, "-format", "json", "-device", "cpu"))
    right = sum(one["file"].rpartition("/")[2].split("_")[0] == one["class"] for one in printed)
    accuracy = max(line["val/accuracy"] for line in lines(folder) if "val/accuracy" in line)
    assert len(printed) == len(labels) and right / len(labels) == pytest.approx(accuracy, abs=0.006)


def test_a_text_is_followed_by_its_next_byte(tmp_path, capsys):
    (tmp_path / "text").write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
    words = f"-dataset tokens -data {tmp_path / 'text'} -tokens_length 16 -tokens_samples 512"
    folder = run(tmp_path, f"{words} -gpt_depth 1 -gpt_width 32 -gpt_heads 2 -cpu 1 -epochs 2 -model letters")
    (tmp_path / "text").rename(tmp_path / "away")
    file = tmp_path / "start.txt"
    file.write_text("xyz\nabcdefghij" * 9)
    printed = json.loads(said(capsys, folder, file, "-text", "mno", "-format", "json", "-device", "cpu"))
    assert [one["class"] for one in printed] == ["k", "p"] and printed[0]["probability"] == printed[0]["k"] > 0.1
    assert "\\n" in printed[0] and sum(value for value in list(printed[0].values())[3:]) == pytest.approx(1, abs=1e-4)
    answer = predict.load(folder)
    assert answer(["mno", "abcdefgh"]) == [*answer(["mno"]), *answer(["abcdefgh"])], "texts of other lengths"
    assert "an empty text" in refused(capsys, folder, "-text", "")
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    assert "takes no images" in refused(capsys, folder, tmp_path / "image.png")


def test_a_text_becomes_tokens_by_the_tokenizer_of_the_data(tmp_path, capsys, monkeypatch):
    tiny_data.make_tokens(tmp_path)
    words = f"-dataset tokens -data {tmp_path} -tokens_length 16 -gpt_depth 1 -gpt_width 16 -gpt_heads 2 -model x"
    folder = run(tmp_path, f"{words} -cpu 1 -epochs 1")
    assert f"-data {tmp_path}: no tokenizer.json there" in refused(capsys, folder, "-text", "1 2")

    class Tokenizer:
        """Stands for the package's, which is optional: a token is a number."""

        from_file = classmethod(lambda cls, file: cls())

        def encode(self, text, add_special_tokens):
            return types.SimpleNamespace(ids=[int(word) for word in text.split()])

    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    text = " ".join(str(number) for number in range(40))
    (tmp_path / "text").write_text(text)
    printed = json.loads(said(capsys, folder, tmp_path / "text", "-text", text, "-format", "json", "-device", "cpu"))
    model = gpt.get_model(config.parse_args(words.split())).eval()
    model.load_state_dict(load_file(folder / "best" / "weights.safetensors"))
    wanted = model(torch.arange(24, 40)[None])[0, -1].softmax(0).tolist()
    for one in printed:
        assert [one[str(number)] for number in range(50)] == pytest.approx(wanted, abs=1e-6)


def test_a_regression_gives_its_outputs(tmp_path, capsys):
    def get_dataset(args):
        return {part: few(args)[part] for part in ("train", "val")}

    def get_model(args):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    with plugins(dataset={"few": get_dataset}, arch={"line": get_model}):
        words = "-dataset few -arch line -num_classes 4 -batch_size 8 -epochs 1 -cpu 1"
        folder = run(tmp_path, f"{words} -model x")
        file = tmp_path / "x.png"
        Image.new("L", (8, 8), 255).save(file)
        assert "no get_transform(args)" in refused(capsys, folder, file)
        sys.modules["lib.dataset.few"].get_transform = lambda args: lambda image: torch.ones(1, 8, 8)
        file_of_flags = folder / "config.yaml"
        file_of_flags.write_text(file_of_flags.read_text().replace("loss: cross_entropy", "loss: mse"))
        rows = said(capsys, folder, file, "-format", "csv", "-device", "cpu").splitlines()
        assert rows[0] == "file,0,1,2,3"
        assert sum(float(value) for value in rows[1].split(",")[1:]) != pytest.approx(1, abs=1e-3)


def test_what_cannot_be_read_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert "broken.png: not a readable image" in refused(capsys, trained, tmp_path / "broken.png")
    assert "nothing.png" in refused(capsys, trained, tmp_path / "nothing.png")
    assert "takes no texts" in refused(capsys, trained, "-text", "day", "-device", "cpu")
    assert "nothing to predict" in refused(capsys, trained)
    assert f"{tmp_path} is no run's folder: it has no config.yaml" in refused(capsys, tmp_path, tmp_path)
    assert "-device nowhere" in refused(capsys, trained, tmp_path, "-device", "nowhere")


def test_cifar10_takes_an_image_as_its_own_evaluation_does():
    pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    (wanted,) = cifar10.Pixels(cifar10.MEAN, cifar10.STD)((pixels[None],), torch.zeros(1, 8))
    assert torch.equal(cifar10.get_transform(None)(image), wanted[0])
