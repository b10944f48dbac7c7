"""Makes token files for -dataset tokens: python scripts/make_tokens.py TEXTS... [-o data/tokens].

TEXTS are files, or folders, of which all files are read. It trains a byte-pair encoding of -vocabulary tokens on
them, or takes the one in a tokenizer.json of Hugging Face; both need `pip install tokenizers`. With -bytes each byte
is a token, and no package is needed. Each line of a file that ends in .jsonl is a text of its own: its field "text",
or that of -field. Where the names of texts say their splits, as train.txt and valid.txt, these decide; else the last
part of the texts goes into val.bin, the rest into train.bin.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError
from lib.utils.files import is_debris, split_of
from scripts import token_files

PIECE = 1 << 20  # bytes that are encoded at once, up to the end of a line
SPLITS = ("train", "val", "test")
END = "<|endoftext|>"  # the token behind each text, if the tokenizer has it


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXTS", help="text files, or folders of them")
    parser.add_argument("-o", type=Path, default=Path("data/tokens"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("-field", metavar="NAME", help="of the text in each line of .jsonl files (text)")
    parser.add_argument("-val", type=float, metavar="X", help="share of the texts for val, if no names decide (0.05)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-vocabulary", type=int, default=4096, metavar="N", help="of the new encoding (%(default)s)")
    kind.add_argument("-tokenizer", type=Path, metavar="FILE", help="take the tokenizer in this file")
    kind.add_argument("-bytes", action="store_true", help="make each byte a token")
    args = parser.parse_args(argv)
    try:
        val = 0.05 if args.val is None else args.val
        if not (0 < val < 1 and args.vocabulary > 256):
            wanted = "a share between 0 and 1, and -vocabulary at least 257: the bytes and the end of a text"
            raise UsageError(f"-val is {wanted}")
        parts = found(args.texts, args.o)
        if args.val is not None and "" not in parts:
            raise UsageError("-val: the names of the texts say which are for val")
        files = [file for files in parts.values() for file in files]
        lines = [file for file in files if is_jsonl(file)]
        if args.field and (args.bytes or not lines):
            raise UsageError(f"-field {args.field}: it is for .jsonl files, and not with -bytes")
        field = "" if args.bytes else args.field or "text"
        if field:
            check_texts(files, field)
        texts = functools.partial(pieces_of, parts, val, field)
        tokenizer = Bytes() if args.bytes else Tokenizer(args.tokenizer, args.vocabulary, texts())
        splits = ["train", "val"] if "" in parts else [split for split in SPLITS if split in parts]
        counts = write(args.o, tokenizer, splits, texts())
    except (UsageError, OSError) as error:
        parser.exit(2, f"make_tokens.py: {error}\n")
    notes = "".join(f"; -gpt_end_token {token}" for token in tokenizer.end)
    notes += f"; {lines[0].name} as it is, with the JSON around its texts" if args.bytes and lines else ""
    uses = {"train": "tokens for training", "val": "for validation", "test": "for test"}
    print(f"{args.o}: {', '.join(f'{count:,} {uses[split]}' for split, count in counts.items())}{notes}")
    return 0


def found(texts: list[Path], out: Path) -> dict[str, list[Path]]:
    """Return the files by the splits in their names, or all of them under "", without older token files in `out`.

    Raises UsageError if a folder has none, for links to nothing or to folders, and for a file that comes twice.
    """
    made = {out / name for name in ("", *(f"{split}.bin" for split in SPLITS), "meta.json", "tokenizer.json")}
    made = {one.resolve() for one in made}
    entries: list[Path] = []
    for text in texts:
        if not text.exists():
            raise UsageError(f"{text}: no such file or folder")
        is_part = text.is_file() or (len(texts) > 1 and split_of(text.stem))
        inner = [text] if is_part else sorted(one for one in text.iterdir() if not is_debris(one.name))
        entries += [one for one in inner if one.resolve() not in made and one.suffix != ".partial"]
    named, known = token_files.by_split(entries) or {"": entries}, set()
    parts = {}
    for split, some in named.items():
        parts[split] = [file for one in some for file in files_of(one) if file.resolve() not in made]
    for file in [file for files in parts.values() for file in files]:
        if not file.is_file():
            raise UsageError(f"{file}: a link to nothing or to a folder, or no regular file")
        if file.resolve() in known:
            raise UsageError(f"{file}: it comes twice")
        known.add(file.resolve())
    if not known:
        raise UsageError(f"{texts[0]}: a folder without files")
    return parts


def files_of(text: Path) -> list[Path]:
    """Return a file, or the files in a folder."""
    return token_files.find_texts(str(text)) if text.is_dir() and not text.is_symlink() else [text]


def check_texts(files: list[Path], field: str) -> None:
    """Raise UsageError for a file that is not UTF-8, or has a zero byte, as other files than texts have; or for JSON.

    In a .jsonl file each line must have a text in its `field`.
    """
    for file in files:
        if file.suffix.lower() == ".json":
            hint = 'write a .jsonl file with a line {"text": "..."} for each text; -bytes takes any file'
            raise UsageError(f"{file}: JSON, whose texts are not known: {hint}")
        done = 0
        with file.open("rb") as opened:
            while piece := b"".join(opened.readlines(PIECE)):
                place = piece.find(b"\0")
                try:
                    piece.decode()
                except UnicodeDecodeError as error:
                    place = error.start
                if place >= 0:
                    hint = "save it as UTF-8; -bytes takes any file"
                    raise UsageError(
                        f"{file}: byte {done + place:,} is {piece[place]:#04x}, no text in UTF-8: {hint}"
                    )
                done += len(piece)
        if is_jsonl(file):
            for _ in texts_of(file, field):  # which raises UsageError
                pass


def is_jsonl(file: Path) -> bool:
    """Return whether each line of a file is a text of its own, in JSON."""
    return file.suffix.lower() == ".jsonl"


def texts_of(file: Path, field: str) -> Iterator[tuple[bytes, int]]:
    """Return the text of each line of a .jsonl file that has one, and where in the file the line ends.

    Raises UsageError for a line that is no JSON object with a string in the field. Blank lines are left out.
    """
    end = 0
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            end += len(line)
            if line.isspace():
                continue
            place = f"{file}, line {number}"
            try:
                facts = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):
                facts = None
            if not isinstance(facts, dict):
                raise UsageError(f'{place}: no JSON object, as {{"{field}": "..."}}, which each line must be')
            if not isinstance(facts.get(field), str):
                there = [name for name, value in facts.items() if isinstance(value, str)][:4]
                hint = f"-field may be {' or '.join(map(repr, there))}" if there else "no other field has one"
                raise UsageError(f"{place}: no string in the field {field!r}: {hint}")
            try:
                text = facts[field].encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise UsageError(f"{place}: {half} is half a character, and no text in UTF-8: remove it") from None
            if text:
                yield text, end


def pieces_of(parts: dict[str, list[Path]], val: float, field: str) -> Iterator[tuple[str, bytes]]:
    """Return what `pieces` does, for files whose splits are known, or with a share of all their bytes for val."""
    for split, files in parts.items():
        cut = math.inf if split else round(sum(file.stat().st_size for file in files) * (1 - val))
        yield from ((split or part, piece) for part, piece in pieces(files, cut, field))


def pieces(files: list[Path], train_bytes: float, field: str = "") -> Iterator[tuple[str, bytes]]:
    """Return the bytes of the texts in pieces, each with its split, and an empty piece behind each text.

    A text is a file; or with a `field`, a line of a .jsonl file.
    """
    done = 0
    for file in files:
        if field and is_jsonl(file):
            for text, end in texts_of(file, field):
                split = "train" if done + end <= train_bytes else "val"
                yield from ((split, text), (split, b""))
            done += file.stat().st_size
            continue
        with file.open("rb") as opened:
            while piece := b"".join(opened.readlines(PIECE)):
                cut = int(max(0, min(train_bytes - done, len(piece))))
                if 0 < cut < len(piece):
                    cut = piece.rfind(b"\n", 0, cut) + 1 or cut
                    while cut > 0 and piece[cut] & 0xC0 == 0x80:  # inside a character
                        cut -= 1
                yield from ((split, part) for split, part in (("train", piece[:cut]), ("val", piece[cut:])) if part)
                done += len(piece)
        yield "train" if done <= train_bytes else "val", b""


class Bytes:
    """Each byte is a token."""

    vocabulary = 256
    end = ()

    def encode(self, piece: bytes) -> np.ndarray:
        return np.frombuffer(piece, np.uint8)

    def save(self, folder: Path):
        """Remove the tokenizer of older token files, which would be taken for these."""
        (folder / "tokenizer.json").unlink(missing_ok=True)


class Tokenizer:
    """A tokenizer of Hugging Face, from a file, or a byte-level byte-pair encoding that is trained here."""

    def __init__(self, file: Path | None, vocabulary: int, texts: Iterator[tuple[str, bytes]]):
        try:
            import tokenizers
        except ModuleNotFoundError:
            hint = "`uv pip install tokenizers` installs it, and -bytes needs none"
            raise UsageError(f"the package tokenizers is not installed: {hint}") from None
        if file:
            try:
                self.inner = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # it raises nothing more specific
                raise UsageError(f"-tokenizer {file}: not a tokenizer.json of Hugging Face ({error})") from error
            self.inner.no_padding()  # a text is encoded in pieces of any length
            self.inner.no_truncation()
        else:
            byte_level = tokenizers.pre_tokenizers.ByteLevel
            self.inner = tokenizers.Tokenizer(tokenizers.models.BPE())
            self.inner.pre_tokenizer, self.inner.decoder = byte_level(False), tokenizers.decoders.ByteLevel()
            options = {"special_tokens": [END], "initial_alphabet": byte_level.alphabet(), "show_progress": False}
            trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, **options)
            self.inner.train_from_iterator((piece.decode() for split, piece in texts if split == "train"), trainer)
        self.vocabulary, end = max(self.inner.get_vocab().values()) + 1, self.inner.token_to_id(END)
        self.end = [] if end is None else [end]

    def encode(self, piece: bytes) -> list[int]:
        return self.inner.encode(piece.decode(), add_special_tokens=False).ids if piece else self.end

    def save(self, folder: Path):
        """Write tokenizer.json."""
        atomic.write_file(folder / "tokenizer.json", self.inner.to_str())


def write(
    folder: Path, tokenizer: Bytes | Tokenizer, splits: list[str], texts: Iterator[tuple[str, bytes]]
) -> dict[str, int]:
    """Write the token file of each split, meta.json and the tokenizer; return how many tokens each split has.

    Raises UsageError, and writes nothing, if one has none, or if a token file of another split is there.
    """
    kind, counts = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32", dict.fromkeys(splits, 0)
    if old := [one for one in SPLITS if one not in counts and (folder / f"{one}.bin").exists()]:
        raise UsageError(f"{folder / old[0]}.bin: it would be taken with these: remove it, or give another -o")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        partials = {split: stack.enter_context(atomic.new_version(folder / f"{split}.bin")) for split in counts}
        files = {split: stack.enter_context(partial.open("xb")) for split, partial in partials.items()}
        for split, piece in texts:
            numbers = np.asarray(tokenizer.encode(piece), kind)
            files[split].write(numbers.tobytes())
            counts[split] += len(numbers)
        if empty := next((split for split, count in counts.items() if not count), ""):
            raise UsageError(f"no text is left for {empty}: take another -val, or more text")
        facts = {"vocabulary": tokenizer.vocabulary, "type": kind, **counts}
        atomic.write_file(folder / "meta.json", json.dumps(facts) + "\n")  # first: it fits no other token files
        tokenizer.save(folder)
    return counts


if __name__ == "__main__":
    sys.exit(main())
