"""scripts/make_tokens.py: token files, the size of their vocabulary and their tokenizer."""

import json
import sys

import numpy as np
import pytest
from needs import require_package

from lib import config
from lib.dataset import tokens
from scripts import make_tokens

TEXT = "".join(f"{number} bottles of beer, ünd another line\n" for number in range(400))


@pytest.fixture
def texts(tmp_path):
    """A folder with two texts and a hidden file."""
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    for name, text in (("inner/first.txt", TEXT), ("second.md", TEXT), (".hidden", "not text")):
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


def all_tokens(folder, kind="uint16") -> list[int]:
    return np.concatenate([np.fromfile(folder / f"{split}.bin", kind) for split in ("train", "val")]).tolist()


def test_bytes_are_tokens_without_a_package_and_no_character_is_cut(texts, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("ü€" * 9)
    for train_bytes in range(46):
        assert "".join(part.decode() for _, part in make_tokens.pieces([tmp_path / "a.txt"], train_bytes)) == "ü€" * 9
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr(make_tokens, "PIECE", 1000)
    out = tmp_path / "tokens"
    assert make_tokens.main([str(texts), "-bytes", "-val", "0.3", "-o", str(out)]) == 0
    assert bytes(all_tokens(out)) == 2 * TEXT.encode()
    val = bytes(np.fromfile(out / "val.bin", np.uint16).tolist())
    assert 0 <= len(val) - 0.3 * len(2 * TEXT.encode()) < 50 and val[:1].isdigit(), "val begins at a line"
    assert f"{len(val):,} for validation" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    args = config.parse_args(["-dataset", "tokens", "-data", str(out)])
    assert args.num_classes == 256 and set(tokens.get_dataset(args)) == {"train", "val"}


@pytest.fixture
def refused(tmp_path, script_error):
    """A function that returns the one-line error of make_tokens.py."""
    return lambda *args: script_error(make_tokens, *args, "-o", tmp_path / "tokens")


def test_texts_and_flags_that_make_no_tokens_are_refused_in_one_line(texts, tmp_path, monkeypatch, refused):
    assert "none: no such file" in refused(tmp_path / "none", "-bytes")
    for flag in "-vocabulary=-1 -vocabulary=256 -val=nan -val=-0.5 -val=0 -val=1 -val=1.5".split():
        assert "-val is a share between 0 and 1, and -vocabulary at least 257" in refused(texts, flag)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "tokenizers is not installed: `uv pip install tokenizers`" in refused(texts)
    assert not (tmp_path / "tokens").exists()
    assert "no text is left for train: take another -val" in refused(texts, "-bytes", "-val", "0.999999")
    assert "second.md: it comes twice" in refused(texts, texts / "second.md", "-bytes")
    monkeypatch.setattr(make_tokens, "PIECE", 50)
    odd, lines = texts / "odd.txt", b"a line\n" * 30
    for content, place in ((lines + b"f\xfcr", 211), (lines + b"f\0r", 211), ("a text".encode("utf-16"), 0)):
        odd.write_bytes(content)
        assert f"odd.txt: byte {place} is 0x" in refused(texts), "not UTF-8"
    faults = {"[1]": "no JSON object", '{"a": ""}': "no string in the field 'b'", '{"b": "\\udfff"}': "'\\udfff'"}
    for line, fault in faults.items():
        odd.with_suffix(".jsonl").write_text(f'{{"a": 1, "b": ""}}\n{line}')
        assert f"odd.jsonl, line 2: {fault}" in refused(texts, "-field", "b")
    assert "odd.json: JSON, whose texts are not known" in refused(odd.rename(texts / "odd.json"))
    (texts / "inner" / "broken").symlink_to(texts / "nothing")
    assert "broken: a link to nothing" in refused(texts, "-bytes") and not list(tmp_path.glob("tokens/*"))


def test_the_splits_are_those_that_names_say(tmp_path, refused, capsys):
    for name in ("train.jsonl", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(name)
    out = tmp_path / "tokens"
    for words in ([tmp_path], [*tmp_path.glob("*.*")]):
        assert make_tokens.main([*map(str, words), "-bytes", "-o", str(out)]) == 0
        found = {split: bytes(np.fromfile(out / f"{split}.bin", np.uint16).tolist()) for split in make_tokens.SPLITS}
        assert found == {"train": b"train.jsonl", "val": b"valid.txt", "test": b"test.txt"}
    assert "11 tokens for training, 9 for validation, 8 for test; train.jsonl as it is" in capsys.readouterr().out
    assert "-val: the names of the texts say" in refused(tmp_path, "-bytes", "-val", "0.1")
    (tmp_path / "test.txt").unlink()
    assert "test.bin: it would be taken with these" in refused(tmp_path, "-bytes")


@require_package("tokenizers", "world")
def test_a_tokenizer_is_trained_and_can_be_used_for_other_texts(texts, tmp_path, refused, capsys):
    import tokenizers

    out, other = tmp_path / "tokens", tmp_path / "other"
    assert make_tokens.main([str(texts), "-vocabulary", "400", "-o", str(out)]) == 0
    assert "; -gpt_end_token 0\n" in capsys.readouterr().out
    meta = json.loads((out / "meta.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert meta["vocabulary"] == tokenizer.get_vocab_size() <= 400
    assert meta["train"] + meta["val"] == len(all_tokens(out)) < len(2 * TEXT) / 3
    assert tokenizer.decode(all_tokens(out), skip_special_tokens=False) == 2 * f"{TEXT}<|endoftext|>"
    (tmp_path / "lines.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in ("ü", "", TEXT)))
    for name, text in (("texts/second.md", f"{TEXT}|"), ("lines.jsonl", f"ü|{TEXT}|")):
        assert make_tokens.main([str(tmp_path / name), "-tokenizer", f"{out}/tokenizer.json", "-o", str(other)]) == 0
        assert tokenizer.decode(all_tokens(other), skip_special_tokens=False).replace("<|endoftext|>", "|") == text
    assert config.parse_args(["-dataset", "tokens", "-data", str(other)]).num_classes == meta["vocabulary"]
    tokenizer.enable_padding(length=50_000)
    tokenizer.enable_truncation(9)
    tokenizer.save(str(tmp_path / "padded.json"))
    assert make_tokens.main([str(texts), "-tokenizer", str(tmp_path / "padded.json"), "-o", str(other)]) == 0
    assert all_tokens(other) == all_tokens(out)
    assert "second.md: not a tokenizer.json" in refused(texts, "-tokenizer", texts / "second.md")
