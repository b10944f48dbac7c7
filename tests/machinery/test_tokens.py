"""The dataset tokens and scripts/make_tokens.py: which tokens a sample holds, and that a run on them resumes."""

import importlib.util
import json
import resource
import sys

import numpy as np
import pytest
import runs
import torch

from lib import config
from lib.dataset import tokens
from lib.utils.data import loader
from lib.utils.errors import UsageError
from scripts import make_tokens

TOKENIZERS = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="needs the package tokenizers, which is optional"
)
TEXT = "".join(f"{number} bottles of beer, ünd another line\n" for number in range(400))


@pytest.fixture
def folder(tmp_path):
    """Token files as nanoGPT writes them: numbers of two bytes below 50, nothing else."""
    for split, count in (("train", 1000), ("val", 100)):
        np.random.default_rng(count).integers(0, 50, count).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    return tmp_path


def splits_of(folder, *words):
    return tokens.get_dataset(args_of(folder, *words))


def args_of(folder, *words):
    return config.parse_args(["-dataset", "tokens", "-data", str(folder), "-tokens_length", "16", *words])


def test_without_shuffle_samples_stand_in_a_row_and_cover_the_file(folder):
    parts = splits_of(folder, "-shuffle", "no")
    whole = np.fromfile(folder / "train.bin", np.uint16).astype(np.int64)
    inputs, targets = (torch.cat(rows) for rows in zip(*(parts["train"][i] for i in range(len(parts["train"])))))
    assert torch.equal(inputs, torch.from_numpy(whole[: len(inputs)])) and len(whole) - len(inputs) <= 16
    assert torch.equal(targets, torch.from_numpy(whole[1 : len(inputs) + 1]))
    assert [parts["val"].begin(index) for index in range(6)] == [0, 16, 32, 48, 64, 80] and len(parts["val"]) == 6


def test_training_samples_are_a_function_of_seed_and_index(folder):
    args = args_of(folder)

    def begins(samples, seed):
        part = tokens.Windows(folder / "train.bin", args, samples, seed)
        return [part.begin(index) for index in range(len(part))]

    for samples in (0, 1, 7, 1000):
        found = begins(samples, seed=3)
        assert found == begins(samples, seed=3) != begins(samples, seed=4)
        assert len(found) == min(samples or 62, 62) and found == sorted(found) and found[-1] + 16 < 1000
    assert len({begin % 16 for begin in found}) > 8, "anywhere, not at multiples"
    assert all(index * 16 <= begin < (index + 1) * 16 for index, begin in enumerate(found))
    assert {begins(0, seed)[61] for seed in range(99)} == set(range(976, 984)), "up to the last token"


def test_tokens_of_more_than_two_bytes_are_read(folder):
    (np.arange(1000, dtype=np.uint32) + 100_000).tofile(folder / "train.bin")
    inputs, targets = splits_of(folder, "-num_classes", "128256", "-shuffle", "no")["train"][1]
    assert inputs.tolist() == list(range(100_016, 100_032)) and targets[-1] == 100_032


def test_a_file_larger_than_memory_is_mapped(folder):
    size = 1 << 42
    with (folder / "train.bin").open("r+b") as file:
        try:
            file.truncate(size)  # with a hole that takes no room on the disk
        except OSError as error:
            pytest.skip(f"this file system has no such files: {error}")
        file.seek(size - 34)
        file.write(np.arange(17, dtype=np.uint16).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train = splits_of(folder, "-tokens_length", "16", "-shuffle", "no")["train"]
    train.tokens -= 1 - train.tokens % 16  # so that the last sample is the last row
    assert len(train) == (size // 2 - 1) // 16 and train[len(train) - 1][1].max() <= 16 and train[len(train) // 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # KB


def test_what_does_not_fit_is_one_line(folder):
    with pytest.raises(UsageError, match=r"-num_classes 20: .*train.bin holds the token [2-4]\d"):
        splits_of(folder, "-num_classes", "20")["train"][0]
    with pytest.raises(UsageError, match="-dataset tokens: its train split is empty"):
        loader.splits(splits_of(folder, "-tokens_length", "1000"), "tokens")
    (folder / "train.bin").write_bytes(b"")
    assert len(splits_of(folder)["train"]) == 0
    with pytest.raises(UsageError, match=r"-data .*/none: no train.bin there; scripts/make_tokens.py"):
        splits_of(folder / "none")


def test_a_run_on_tokens_goes_on_after_a_stop_to_the_same_bits(folder):
    words = f"-dataset tokens -data {folder} -tokens_length 16 -batch_size 8 -micro_batch 4 -num_classes 50 "
    words += "-epochs 2 -gpt_depth 1 -gpt_width 16 -gpt_heads 2 -gpt_dropout 0.1"
    once = runs.run(folder / "out", f"{words} -cpu 1 -model once")
    runs.run(folder / "out", f"{words} -cpu 2 -model twice -limit_steps 11", wanted=75)
    assert runs.distance(once, runs.run(folder / "out", f"{words} -cpu 1 -workers 1 -model twice")) == 0


# scripts/make_tokens.py


@pytest.fixture
def texts(tmp_path):
    """A folder with two texts and a hidden file."""
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "texts" / "inner" / "first.txt").write_text(TEXT)
    (tmp_path / "texts" / "second.md").write_text(TEXT)
    (tmp_path / "texts" / ".hidden").write_text("not text")
    return tmp_path / "texts"


def made(folder, kind="uint16") -> list[int]:
    """All tokens, in the order of the texts."""
    return np.concatenate([np.fromfile(folder / f"{split}.bin", kind) for split in ("train", "val")]).tolist()


def test_bytes_become_tokens_without_a_package(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr(make_tokens, "PIECE", 1000)
    out = tmp_path / "tokens"
    assert make_tokens.main([str(texts), "-bytes", "-val", "0.3", "-o", str(out)]) == 0
    assert bytes(made(out)) == 2 * TEXT.encode()
    val = bytes(np.fromfile(out / "val.bin", np.uint16).tolist())
    assert 0 <= len(val) - 0.3 * len(2 * TEXT.encode()) < 50 and val[:1].isdigit(), "it begins with a line"
    assert f"{len(val):,} for validation" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    args = config.parse_args(["-dataset", "tokens", "-data", str(out)])
    assert args.num_classes == 256 and set(tokens.get_dataset(args)) == {"train", "val"}


def test_what_cannot_be_made_is_one_line(texts, tmp_path, monkeypatch, capsys):
    def refused(*words):
        with pytest.raises(SystemExit) as end:
            make_tokens.main([*map(str, words), "-o", str(tmp_path / "tokens")])
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.startswith("make_tokens.py: ") and said.count("\n") == 1
        return said

    assert "none: no such file" in refused(tmp_path / "none", "-bytes")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "tokenizers is not installed: `uv pip install tokenizers`" in refused(texts)
    assert not (tmp_path / "tokens").exists()
    assert "no text is left for train: take another -val" in refused(texts, "-bytes", "-val", "1")
    assert "no text is left for val: take another -val" in refused(texts, "-bytes", "-val", "0")
    assert not list(tmp_path.glob("tokens/*"))


@TOKENIZERS
def test_an_encoding_is_trained_and_taken_for_other_texts(texts, tmp_path, capsys):
    import tokenizers

    out, other = tmp_path / "tokens", tmp_path / "other"
    assert make_tokens.main([str(texts), "-vocabulary", "400", "-o", str(out)]) == 0
    meta = json.loads((out / "meta.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert meta["vocabulary"] == tokenizer.get_vocab_size() <= 400 and meta["train"] + meta["val"] == len(made(out))
    assert tokenizer.decode(made(out), skip_special_tokens=False) == 2 * f"{TEXT}<|endoftext|>"
    assert len(made(out)) < len(2 * TEXT) / 3

    assert (
        make_tokens.main([str(texts / "second.md"), "-tokenizer", str(out / "tokenizer.json"), "-o", str(other)]) == 0
    )
    assert tokenizer.decode(made(other), skip_special_tokens=False) == f"{TEXT}<|endoftext|>"
    assert config.parse_args(["-dataset", "tokens", "-data", str(other)]).num_classes == meta["vocabulary"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        make_tokens.main([str(texts), "-tokenizer", str(texts / "second.md")])
    assert "second.md: not a tokenizer.json" in capsys.readouterr().err
