"""The dataset text: which bytes a sample holds, what is held out, and that a run resumes."""

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import run, same, weights
from torch.nn import functional

from lib import config
from lib.core import loss
from lib.dataset import text
from lib.utils.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    """Files of 0 to 2,999 bytes, and hidden ones that are not to be read."""
    draw = np.random.default_rng(0)
    for number, size in enumerate([700, 0, 2999, 1, 1500, 800, 0]):
        (tmp_path / "some" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "some" / f"{number % 3}" / f"{number}.txt").write_bytes(draw.bytes(size))
    (tmp_path / "some" / ".git").mkdir()
    (tmp_path / "some" / ".git" / "config").write_bytes(b"not text")
    return tmp_path / "some"


def test_files_are_one_row_of_bytes(folder):
    files = text.files_of(args_of("-text_from", str(folder)))
    whole = b"".join(file.read_bytes() for file in files)
    assert text.read(files).tobytes() == whole and len(whole) == 6000 and files == sorted(files)
    assert text.read(files[-1:]).tobytes() == files[-1].read_bytes()


@pytest.mark.parametrize("samples", [0, 1, 7, 1000])
def test_samples_lie_in_their_stretch_and_held_out_text_is_never_trained_on(folder, samples):
    parts = text.get_dataset(args_of("-text_from", str(folder), "-text_length", "16", "-text_samples", str(samples)))
    length = len(parts["train"].text)
    wholes = {"train": (0, length * 9 // 10), "val": (length * 9 // 10, length * 19 // 20),
              "test": (length * 19 // 20, length)}  # fmt: skip
    for name, (low, high) in wholes.items():
        begins = [parts[name].begin(index) for index in range(len(parts[name]))]
        assert low <= begins[0] and begins[-1] + 16 < high and begins == sorted(begins)
        limit = {"train": samples, "val": -(-samples // 16), "test": -(-samples // 16)}[name] or len(begins)
        assert len(begins) == min(limit, (high - low - 16) // 16)
        inputs, targets = parts[name].__getitems__([0, len(begins) - 1])
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert bytes(inputs[1].tolist()) == parts[name].text[begins[-1] : begins[-1] + 16].tobytes()


def test_training_samples_are_a_function_of_seed_and_index(folder):
    def begins(*words):
        part = text.get_dataset(args_of("-text_from", str(folder), "-text_length", "16", *words))["train"]
        return [part.begin(index) for index in range(len(part))]

    assert begins() == begins() != begins("-seed", "1")
    assert len({begin % 16 for begin in begins()}) > 8  # anywhere, not at multiples


def test_without_data_it_is_the_library_of_this_python(tmp_path):
    args = config.parse_args(["-dataset", "text", "-data", str(tmp_path)])
    files = text.files_of(args)
    assert Path(argparse.__file__) in files and not [file for file in files if "site-packages" in file.parts]
    assert sum(file.stat().st_size for file in files) > 5e6 and (args.arch, args.num_classes) == ("gpt", 256)
    (tmp_path / "text").write_bytes(b"own text " * 300)
    assert text.files_of(config.parse_args(["-dataset", "text", "-data", str(tmp_path)])) == [tmp_path / "text"]


def test_a_text_that_is_missing_or_short_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(UsageError, match=f"-text_from .*{name}: no such file"):
            text.get_dataset(args_of("-text_from", str(tmp_path / name)))
    (tmp_path / "short").write_bytes(b"x" * 500)
    with pytest.raises(UsageError, match="-text_length 128: 5120 bytes of text are needed, 500 are there"):
        text.get_dataset(args_of("-text_from", str(tmp_path / "short")))
    with pytest.raises(UsageError, match="-num_classes 255"):
        text.get_dataset(args_of("-text_from", str(tmp_path / "short"), "-num_classes", "255"))


def test_a_run_on_text_resumes_to_the_bit(folder, tmp_path):
    words = f"-dataset text -text_from {folder} -text_length 16 -text_samples 40 -batch_size 8 -cpu 1 -log_every 1 "
    words += "-gpt_depth 1 -gpt_width 16 -gpt_heads 2 -gpt_dropout 0.1"
    once = run(tmp_path / "out", f"{words} -model once")
    run(tmp_path / "out", f"{words} -model twice -limit_steps 2", wanted=75)
    twice = run(tmp_path / "out", f"{words} -model twice")
    assert same(weights(once), weights(twice))


def test_bits_per_byte_is_the_code_length_of_the_targets():
    """Without label smoothing, the same over any shares of a batch; the loss takes classes in the last dimension."""
    smoothed = loss.get_loss(config.parse_args(["-label_smoothing", "0.1"]))
    logits, targets = torch.randn(6, 9, 256), torch.randint(256, (6, 9))
    wanted = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean() / math.log(2)
    sums = [loss.metric_sums(smoothed, logits[part], targets[part]) for part in (slice(0, 1), slice(1, 6))]
    assert sum(one["bits_per_byte"] for one in sums) / 6 == pytest.approx(wanted.item(), rel=1e-6)
    truth = functional.cross_entropy(logits.permute(0, 2, 1), targets, label_smoothing=0.1)
    assert smoothed(logits, targets) == pytest.approx(truth.item(), rel=1e-6)
    assert smoothed(logits.permute(0, 2, 1), targets) == pytest.approx(truth.item(), rel=1e-6)  # torch's own order


def args_of(*words):
    return config.parse_args(["-dataset", "text", *words])
