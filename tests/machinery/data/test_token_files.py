"""Files that hold no tokens, or tokens in another form: one line each, before the first step."""

import json
import os

import numpy as np
import pytest
import tiny_data
import torch
from command_line import usage_error

from lib import config
from lib.dataset import tokens


@pytest.fixture
def folder(tmp_path):
    return tiny_data.make_tokens(tmp_path)


def splits_of(data, *flags):
    words = ["-dataset", "tokens", "-data", str(data), "-tokens_length", "16", *flags]
    return tokens.get_dataset(config.parse_args(words))


def refusal(data, *flags) -> str:
    return usage_error(splits_of, data, *flags)


@pytest.mark.parametrize(
    "names", [("my-train.txt", "my-valid.txt"), ("wiki.train.tokens", "wiki.test.tokens"), ("Train.txt", "dev.txt")]
)
def test_texts_whose_names_are_splits_are_not_mixed(names, tmp_path):
    for name, text in zip(names, ("a" * 400, "b" * 300), strict=True):
        (tmp_path / name).write_text(text)
    parts = splits_of(tmp_path)
    assert [{*part.tokens.tolist()} for part in parts.values()] == [{97}, {98}] and len(parts) == 2
    (tmp_path / "more.txt").write_text("c")
    assert "more.txt: its name says no split" in refusal(tmp_path)
    (tmp_path / "more.txt").unlink()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "link").symlink_to(tmp_path)
    assert "link is no text" in refusal(tmp_path), "a link to a folder is not followed"


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("vocabulary", ["50257", "128256"])
def test_files_of_other_types_are_refused_by_their_type(folder, split, vocabulary):
    """Read as uint16 or uint32, most of them would be tokens, too: with zeros, or with bytes exchanged."""
    wanted = "uint16" if int(vocabulary) <= 1 << 16 else "uint32"
    values = np.random.default_rng(0).integers(0, int(vocabulary), 1000)
    for kind in ("int32", "int64", "float32", "float64", ">i4", ">i8", ">u2" if wanted == "uint16" else ">u4"):
        for name in ("train", "val"):
            values.astype(wanted).tofile(folder / f"{name}.bin")
        if wanted == kind.replace("int", "uint"):
            continue  # the same bytes
        values.astype(kind).tofile(folder / f"{split}.bin")
        message = refusal(folder, "-num_classes", vocabulary)
        found = f"{split}.bin looks like a wider type than {wanted}", "has the token", "multiples of 256 alone"
        assert any(one in message for one in found), kind
        assert ("wider" in message) >= ("int" in kind), kind


@pytest.mark.parametrize("size", [0, 1, 1999])
@pytest.mark.parametrize("split", ["train", "val"])
def test_files_of_odd_lengths_and_empty_ones_are_refused(folder, split, size):
    (folder / f"{split}.bin").write_bytes(bytes(range(1, 251)) * 8)
    with (folder / f"{split}.bin").open("r+b") as file:
        file.truncate(size)
    assert f"{split}.bin: {size:,} bytes are no tokens of uint16" in refusal(folder)


def test_files_with_a_header_zeros_and_tokens_whose_bytes_are_in_the_other_order_are_refused(folder):
    for values in (np.zeros(1000), np.arange(1000) % 196):
        values.astype(">u2").tofile(folder / "val.bin")
        assert "val.bin holds multiples of 256 alone" in refusal(folder)
    tokens_there, file = np.arange(1000, dtype=np.uint16), folder / "train.bin"
    for kind in (np.uint16, np.float32, np.int64):
        with file.open("wb") as opened:
            np.save(opened, tokens_there.astype(kind))
        assert "train.bin begins with the header of another format" in refusal(folder)
    file.write_bytes(b"PK\x03\x04" + tokens_there.tobytes())  # as torch.save begins
    assert "begins with the header" in refusal(folder)


@pytest.mark.parametrize(("magic", "kind"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_files_of_llm_c_are_read_behind_their_header(folder, magic, kind):
    tokens, header, file = np.arange(1000), np.zeros(256, np.int32), folder / "train.bin"
    header[:3] = magic, 1, 1000
    file.write_bytes(header.tobytes() + tokens.astype(kind).tobytes())
    assert splits_of(folder, "-num_classes", "1000")["train"].tokens.tolist() == tokens.tolist()
    for size in (1024, file.stat().st_size - 4):
        os.truncate(file, size)
        assert f"train.bin: {size:,} bytes, and its header says 1,000 tokens" in refusal(folder)


@pytest.mark.parametrize("place", [0, 500, 999])
def test_another_token_at_the_begin_in_the_middle_or_at_the_end_is_other_data(folder, place):
    before = splits_of(folder, "-num_classes", "50")["train"].fingerprint
    tokens = np.fromfile(folder / "train.bin", np.uint16)
    tokens[place] += 1
    tokens.tofile(folder / "train.bin")
    assert splits_of(folder, "-num_classes", "60")["train"].fingerprint != before


FOREIGN = ["{", "[1]", "\0", "[" * 100_000, '{"vocab_size": 65}', '{"vocabulary": "65", "type": "uint16"}']
ODD = ({"train": "train.bin"}, {"train": None}, {"val": [1]}, {"vocabulary": True}, {"vocabulary": -5})
FOREIGN += [json.dumps({"vocabulary": 60} | odd) for odd in ODD]


def test_beside_a_foreign_meta_json_the_vocabulary_must_be_given(folder):
    wanted = "meta.json has no vocabulary, or is odd: give -num_classes"
    for meta in FOREIGN:
        (folder / "meta.json").write_text(meta)
        assert wanted in refusal(folder), meta[:50]
        assert splits_of(folder, "-num_classes", "50")["train"].vocabulary == 50
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")
    assert wanted in refusal(folder)


def test_links_to_nothing_and_files_that_are_missing_are_refused(folder):
    for split in ("test", "val", "train"):
        file = folder / f"{split}.bin"
        file.unlink(missing_ok=True)
        file.symlink_to(folder / "nothing")
        assert f"{split}.bin is a link to nothing" in refusal(folder)
        file.unlink()
        os.mkfifo(file)
        assert f"{split}.bin is a link to nothing, or no regular file" in refusal(folder)
        file.unlink()
    np.arange(1000, dtype=np.uint16).tofile(folder / "val.bin")
    assert ".bin is no text: -data is a text, or a folder of texts, or of train.bin" in refusal(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_outside_the_vocabulary_and_files_shorter_than_a_sample_are_refused_before_training(folder, split):
    np.arange(100, 1100, dtype=np.uint16).tofile(folder / f"{split}.bin")
    assert "-num_classes 1099: the data has the token 1099" in refusal(folder, "-num_classes", "1099")
    splits_of(folder, "-num_classes", "1100")
    for count in (1, 16):
        np.arange(count, dtype=np.uint16).tofile(folder / f"{split}.bin")
        assert f"{split} has {count} tokens: too few" in refusal(folder)
    for length in ("0", "-3"):
        assert f"-tokens_length {length}: train has " in refusal(folder, "-tokens_length", length)


@pytest.mark.parametrize(
    "form", ["train_{}.bin", "fineweb-train-{}.bin", "training{}.bin", "train/{}.bin", "Training/{}.bin"]
)
def test_several_files_are_read_as_one(folder, form):
    (folder / "meta.json").unlink(missing_ok=True)
    whole = splits_of(folder, "-num_classes", "500", "-tokens_samples", "-1")["train"]
    values = np.array(whole.tokens)
    (folder / "train.bin").unlink()
    (folder / form).parent.mkdir(exist_ok=True)
    for number, part in enumerate(np.split(values, [1, 20, 20 + len(values) // 3])):
        (folder / form.format(number)).write_bytes(part.tobytes())
    (folder / "constrained.bin").write_bytes(b"x")
    (folder / "test_train_9.bin").write_bytes(b"x")  # of which split?
    joined = splits_of(folder, "-num_classes", "500", "-tokens_samples", "0")["train"]
    assert len(joined) == len(whole) > 20 and joined.fingerprint == whole.fingerprint
    for index in range(len(whole)):
        assert all(torch.equal(*pair) for pair in zip(joined[index], whole[index], strict=True))
