"""The dataset tokens: the tokens of a sample, the held-out text, a run that resumes; and the model of tokens."""

import argparse
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import runs
import tiny_data
import torch
from torch.nn import functional

from lib import config
from lib.core import loss
from lib.dataset import tokens
from lib.utils.errors import UsageError
from scripts import token_files

SMALL = "-tokens_length 16 -batch_size 8 -micro_batch 4 -log_every 1 "
SMALL += "-gpt_depth 1 -gpt_width 16 -gpt_heads 2 -gpt_dropout 0.1"


@pytest.fixture
def texts(tmp_path):
    """Files of 0 to 2,999 bytes, and a hidden one that must not be read."""
    draw = np.random.default_rng(0)
    for number, size in enumerate([700, 0, 2999, 1, 1500, 800, 0]):
        (tmp_path / "some" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "some" / f"{number % 3}" / f"{number}.txt").write_bytes(
            draw.integers(1, 256, size, np.uint8).tobytes()
        )
    (tmp_path / "some" / ".git").mkdir()
    (tmp_path / "some" / ".git" / "config").write_bytes(b"not text")
    return tmp_path / "some"


@pytest.fixture
def folder(tmp_path):
    return tiny_data.make_tokens(tmp_path)


def splits_of(data, *flags):
    return tokens.get_dataset(args_of(data, *flags))


def args_of(data, *flags):
    return config.parse_args(["-dataset", "tokens", "-data", str(data), "-tokens_length", "16", *flags])


def starts_of(part):
    return [part.begin(index) for index in range(len(part))]


# Texts


def test_the_files_of_a_folder_are_joined_to_one_sequence_of_bytes(texts):
    files = sorted(texts.glob("*/*.txt"))
    whole = b"".join(file.read_bytes() for file in files)
    assert token_files.read_text(str(texts)).tobytes() == whole and len(whole) == 6000
    assert token_files.read_text(str(files[-1])).tobytes() == files[-1].read_bytes()


@pytest.mark.parametrize("samples", [0, 1, 7, 1000])
def test_text_for_validation_and_test_is_not_trained_on(texts, samples):
    parts, whole = splits_of(texts, "-tokens_samples", str(samples)), token_files.read_text(str(texts))
    assert [len(part.tokens) for part in parts.values()] == [5400, 300, 300]
    assert np.array_equal(np.concatenate([part.tokens for part in parts.values()]), whole)
    for name, part in parts.items():
        limit = {"train": samples}.get(name, -(-samples // 16)) or len(part)
        assert len(part) == min(limit, (len(part.tokens) - 1) // 16)
        inputs, targets = part.__getitems__([0, len(part) - 1])
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        last = part.begin(len(part) - 1)
        assert bytes(inputs[1].tolist()) == part.tokens[last : last + 16].tobytes()


def test_without_data_the_text_is_the_standard_library_of_this_python(tmp_path):
    args = config.parse_args(["-dataset", "tokens"])
    text = token_files.read_text(args.data).tobytes()
    assert Path(argparse.__file__).read_bytes() in text and len(text) > 5e6
    assert Path(pytest.__file__).read_bytes() not in text, "installed packages must be left out"
    assert (args.arch, args.num_classes) == ("gpt", 256)


def test_files_that_are_no_text_are_refused_by_name_alone_and_among_texts(texts):
    for name, content in (("c.png", b"\x89PNG\r\n\0\0"), ("c.txt", "a text".encode("utf-16"))):
        (texts / name).write_bytes(content)
        for data in (texts, texts / name):
            with pytest.raises(UsageError, match=f"{name} is no text: it has a zero byte; save a text as UTF-8"):
                splits_of(data)
        (texts / name).unlink()


# Token files


def test_without_shuffle_samples_are_consecutive_and_cover_the_file(folder):
    parts = splits_of(folder, "-shuffle", "no")
    whole = np.fromfile(folder / "train.bin", np.uint16).astype(np.int64)
    inputs, targets = (torch.cat(rows) for rows in zip(*(parts["train"][i] for i in range(len(parts["train"])))))
    assert torch.equal(inputs, torch.from_numpy(whole[: len(inputs)])) and len(whole) - len(inputs) <= 16
    assert torch.equal(targets, torch.from_numpy(whole[1 : len(inputs) + 1]))
    assert starts_of(parts["val"]) == [0, 16, 32, 48, 64, 80]
    assert starts_of(splits_of(folder, "-tokens_samples", "32")["val"]) == [0, 48], "a sixteenth of -tokens_samples"


def test_training_samples_depend_only_on_seed_and_index(folder):
    args, whole = args_of(folder), np.fromfile(folder / "train.bin", np.uint16)

    def starts_for(samples, seed):
        return starts_of(tokens.Windows(whole, args, samples, seed))

    for samples in (0, 1, 7, 1000):
        one = starts_for(samples, seed=3)
        assert one == starts_for(samples, seed=3) != starts_for(samples, seed=4)
        assert len(one) == min(samples or 62, 62) and one == sorted(one) and one[-1] + 16 < 1000
    assert starts_of(splits_of(folder, "-seed", "3")["train"]) == starts_for(16384, seed=3)
    assert len({begin % 16 for begin in one}) > 8, "samples start anywhere, not at multiples of the length"
    assert all(index * 16 <= begin < (index + 1) * 16 for index, begin in enumerate(one))
    assert {starts_for(0, seed)[61] for seed in range(99)} == set(range(976, 984)), (
        "the last one may end at the last token"
    )


def test_tokens_wider_than_two_bytes_are_read(folder):
    assert args_of(folder).num_classes == 50257, "the default is GPT-2's vocabulary"
    for split in ("train", "val"):
        (np.arange(1000, dtype=np.uint32) + 100_000).tofile(folder / f"{split}.bin")
    inputs, targets = splits_of(folder, "-num_classes", "128256", "-shuffle", "no")["train"][1]
    assert inputs.tolist() == list(range(100_016, 100_032)) and targets[-1] == 100_032


def test_a_file_larger_than_memory_is_mapped(folder):
    size = 1 << 42
    with (folder / "train.bin").open("r+b") as file:
        try:
            file.truncate(size)  # a hole that takes no space on the disk
        except OSError as error:
            pytest.skip(f"this file system has no such files: {error}")
        file.seek(size - 34)
        file.write(np.arange(17, dtype=np.uint16).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train = splits_of(folder, "-tokens_samples", "0", "-shuffle", "no")["train"]
    assert len(train) == (size // 2 - 1) // 16 and train[len(train) - 1][1].max() <= 16 and train[len(train) // 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # KB


DRAW = np.random.default_rng(0)
ONE_BYTE = {
    "text": b"to be or not to be, " * 20,
    "uint8": bytes(range(1, 65)) * 4,
    "text with zeros": b"to be\0or not\0to be\0" * 30,
    "accents": "für größere Öfen, ja. ".encode() * 30,
    "four": DRAW.integers(0, 4, 1000, np.uint8).tobytes(),
    "vocabulary 150": DRAW.integers(0, 150, 1000, np.uint8).tobytes(),
}


@pytest.mark.parametrize("content", ONE_BYTE.values(), ids=ONE_BYTE)
def test_a_text_and_tokens_of_one_byte_are_refused(folder, content):
    (folder / "train.bin").write_bytes(content)
    with pytest.raises(UsageError, match=r"train.bin is a text, or holds tokens of one byte"):
        splits_of(folder)


@pytest.mark.parametrize("vocabulary", [2, 65, 128, 256, 257, 300, 1024, 8192, 32000, 50257, 65536])
@pytest.mark.parametrize("count", [20, 32, 100, 1000, 100_000])
def test_tokens_of_two_bytes_are_never_taken_for_bytes(vocabulary, count):
    for seed in range(20):
        shares = DRAW.random(count) ** (1 + seed % 4)
        assert not token_files.are_bytes((shares * vocabulary).astype(np.uint16))


def test_a_folder_without_a_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(UsageError, match=f"-data .*/{name}: neither train.bin nor a text there"):
            splits_of(tmp_path / name)


@pytest.mark.parametrize("kind", ["texts", "folder"])
def test_a_run_on_tokens_resumes_with_the_same_bits(kind, tmp_path, request):
    flags = f"-dataset tokens -data {request.getfixturevalue(kind)} {SMALL} -tokens_samples 60 -epochs 2"
    once = runs.run(tmp_path / "out", f"{flags} -cpu 1 -model once")
    runs.run(tmp_path / "out", f"{flags} -cpu 2 -model twice -limit_steps 11", wanted=75)
    assert runs.distance(once, runs.run(tmp_path / "out", f"{flags} -cpu 1 -workers 1 -model twice")) == 0


def test_bits_per_token_is_the_mean_negative_log2_probability_of_the_targets():
    """The value ignores label smoothing and is the same for any split of the batch. Classes are last."""
    smoothed = loss.get_loss(config.parse_args(["-label_smoothing", "0.1"]))
    logits, targets = torch.randn(6, 9, 256), torch.randint(256, (6, 9))
    wanted = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean() / math.log(2)
    parts = [loss.compute_metrics(smoothed, logits[part], targets[part]) for part in (slice(0, 1), slice(1, 6))]
    assert sum(one["bits_per_token"].total for one in parts) / (6 * 9) == pytest.approx(wanted.item(), rel=1e-6)
    truth = functional.cross_entropy(logits.permute(0, 2, 1), targets, label_smoothing=0.1)
    assert smoothed(logits, targets) == pytest.approx(truth.item(), rel=1e-6)
    assert smoothed(logits.permute(0, 2, 1), targets) == pytest.approx(truth.item(), rel=1e-6)  # torch's own order


def test_gpt_names_the_flag_that_does_not_fit_the_others():
    gpt = pytest.importorskip("lib.arch.gpt")
    with pytest.raises(UsageError, match="-gpt_width 6"):
        gpt.get_model(config.parse_args(["-arch", "gpt", "-gpt_width", "6"]))
