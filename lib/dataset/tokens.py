"""Tokens of text: of token files, DATA/train.bin and val.bin, or of texts, whose bytes are the tokens.

Token files are those of scripts/make_tokens.py, nanoGPT, llm.c and others. They may be larger than memory.
"""

import os
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lib.utils import seeding
from lib.utils.checkpoint.run_folder import read_json
from lib.utils.errors import UsageError, call_optional
from lib.utils.files import is_debris

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # of Python's own library
CHECKED = 1 << 22  # tokens of a split that are looked at before training; each batch is checked, too
LLM_C, LLM_C_BYTES = {20240520: "uint16", 20240801: "uint32"}, 1024  # first numbers of llm.c's headers; their size
HELD_OUT = 20  # the last 1/20 of a text is for the test, the 1/20 before it for validation


def add_args(parser):
    parser.add_argument("-tokens_length", type=int, default=128, metavar="N", help="tokens of a sample")
    count = "training samples an epoch, spread over the text; 0, or too many: as many as it holds"
    parser.add_argument("-tokens_samples", type=int, default=16384, metavar="N", help=count)
    parser.set_defaults(data=sysconfig.get_path("stdlib"))  # a text that is always there: Python's own library
    parser.set_defaults(arch="gpt", epochs=1, batch_size=16, lr_start=3e-3, lr_end=1e-4)
    parser.set_defaults(lr_warmup=0.05, weight_decay=0.1, clip_grad=1.0, channels=1, image_size=1)


def describe(args) -> dict[str, int | None]:
    """Return the size of the vocabulary: 256 bytes, or what scripts/make_tokens.py has written down, or GPT-2's."""
    if not find_files(args.data):
        return {"num_classes": 256}
    meta = read_meta(args.data)
    return {"num_classes": 50257 if meta is None else meta.get("vocabulary")}


def get_dataset(args) -> dict[str, Dataset]:
    """Return tokens (tokens_length,), int64, and the token that follows each.

    Training samples begin at places that follow from -seed and the index, the same in each epoch. With `-shuffle no`
    they are evenly spread, as those of val and test are: a sixteenth as many. Token files hold uint16, or uint32 if
    -num_classes is above 65,536. Python's own library differs from version to version: a run needs the same one.
    """
    if files := find_files(args.data):
        meta = read_meta(args.data) or {}
        if args.num_classes is None:
            raise UsageError(f"{args.data}/meta.json has no vocabulary, or is odd: give -num_classes, of all tokens")
        parts = {split: open_split(split, some, args.num_classes, meta) for split, some in files.items()}
    else:
        parts = read_texts(args.data)
    for split, part in parts.items():
        if not 0 < args.tokens_length < len(part):
            fault = f"{split} has {len(part):,} tokens, and a sample needs one more than its length"
            raise UsageError(f"-tokens_length {args.tokens_length}: {fault}")
    train = Windows(parts.pop("train"), args, args.tokens_samples, args.seed if args.shuffle else None)
    few = -(-args.tokens_samples // 16)
    return {"train": train, **{split: Windows(part, args, few) for split, part in parts.items()}}


def get_transform(args):
    """Return a function from a text or bytes to its last bytes, int64: the model gives the next one."""

    def transform(text: str | bytes) -> Tensor:
        if args.num_classes != 256:
            hint = "in scripts/predict.py, load takes a tensor of tokens"
            raise UsageError(f"-num_classes {args.num_classes}: only models of bytes read a text; {hint}")
        return torch.tensor([*(text.encode() if isinstance(text, str) else text)][-args.tokens_length :])

    return transform


class Windows(Dataset):
    """Samples from a sequence of tokens, which is cut into as many equal stretches as there are samples.

    Sample i begins in stretch i: at a place that follows from (seed, i), or without a seed at its beginning.
    """

    def __init__(self, tokens: "np.ndarray | Joined", args, samples: int, seed: int | None = None):
        self.tokens, self.length, self.vocabulary, self.seed = tokens, args.tokens_length, args.num_classes, seed
        self.fills = (len(tokens) - 1) // self.length  # how many samples stand in a row
        self.samples = min(samples, self.fills) if samples > 0 else self.fills
        parts = [tokens[at : at + CHECKED] for at in (0, len(tokens) // 2, max(0, len(tokens) - CHECKED))]
        self.fingerprint = " ".join(str(zlib.crc32(part.tobytes())) for part in parts)
        if self.vocabulary == 256:
            self.classes = [ascii(chr(byte))[1:-1] for byte in range(256)]

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (len(indices), length) each. Raises UsageError if -num_classes is too small."""
        begins = [self.begin(index) for index in indices]
        rows = np.stack([self.tokens[begin : begin + self.length + 1] for begin in begins]).astype(np.int64)
        if rows.max() >= self.vocabulary:
            raise UsageError(f"-num_classes {self.vocabulary}: the data has the token {rows.max()}")
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])

    def begin(self, index: int) -> int:
        """Return where a sample begins."""
        low, high = (number * self.fills // self.samples * self.length for number in (index, index + 1))
        places = min(high, len(self.tokens) - self.length) - low
        return low + (0 if self.seed is None else seeding.hash_ints(self.seed, index) % places)


class Joined:
    """Several arrays of tokens as one, of which slices are read."""

    def __init__(self, parts: list[np.ndarray]):
        self.parts, self.edges = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        begin, end, _ = places.indices(len(self))
        first, last = np.searchsorted(self.edges, [begin, end - 1], "right") - 1
        used = [(self.parts[number], self.edges[number]) for number in range(first, last + 1)]
        return np.concatenate([part[max(0, begin - place) : end - place] for part, place in used])


def find_files(data: str) -> dict[str, list[Path]]:
    """Return the token files of each split, in order; none without those of train.

    They are DATA/train.bin, or else those with the word train (training) in their names, or else those in DATA/train.
    """
    loose = sorted(file for file in Path(data).glob("*.bin") if not is_debris(file.name))
    found = {}
    for split in ("train", "val", "test"):
        named = [file for file in loose if split_of(file.stem) == split]
        inner = sorted(file for file in Path(data, split).glob("*.bin") if not is_debris(file.name))
        found[split] = [file for file in named if file.stem == split] or named or inner
    return {split: some for split, some in found.items() if some} if found["train"] else {}


def split_of(name: str) -> str:
    """Return the split that a word of a name says, as training, Valid or dev; "" without one, or with several."""
    words = re.findall(r"(?<![a-z])(train|val|dev|test)(?:ing|id|idation)?(?![a-z])", name.lower())
    found = {"val" if word == "dev" else word for word in words}
    return found.pop() if len(found) == 1 else ""


def read_meta(data: str) -> dict | None:
    """Return what meta.json says, None without one: {} if scripts/make_tokens.py has not written it."""
    file = Path(data) / "meta.json"
    if not file.exists():
        return None
    meta = read_json(file, follow=True)
    counts = [meta.get("vocabulary"), *(meta.get(split, 1) for split in ("train", "val", "test"))]
    is_known = meta.get("type", "uint16") in ("uint16", "uint32")
    return meta if is_known and all(type(one) is int and 0 < one < 1 << 48 for one in counts) else {}


def open_split(split: str, files: list[Path], vocabulary: int, meta: dict) -> np.ndarray | Joined:
    """Map the token files of a split. Raises UsageError for one that does not hold tokens below `vocabulary`."""
    is_certain = "type" in meta and split in meta  # by meta.json, these are tokens
    parts = [open_tokens(file, vocabulary, meta, is_certain, -(-CHECKED // len(files))) for file in files]
    count, place = sum(map(len, parts)), files[0] if len(files) == 1 else f"{files[0]} to {files[-1].name}"
    if meta.get(split, count) != count:
        raise UsageError(f"{place} has {count:,} tokens, and meta.json says {meta[split]:,}: copy it again")
    return Joined(parts) if len(parts) > 1 else parts[0]


def open_tokens(file: Path, vocabulary: int, meta: dict, is_certain: bool, checked: int) -> np.ndarray:
    """Map a token file. Raises UsageError unless its first `checked` numbers are tokens below `vocabulary`."""
    if not file.is_file():
        raise UsageError(f"{file} is a link to nothing, or no regular file")
    first, offset = np.fromfile(file, "<i4", 3).tolist(), 0
    kind = np.dtype(meta.get("type", "uint16" if vocabulary <= 1 << 16 else "uint32"))
    if not is_certain and len(first) == 3 and first[0] in LLM_C:
        kind, offset, is_certain = np.dtype(LLM_C[first[0]]), LLM_C_BYTES, True
    hint = f"write the tokens alone: numpy.asarray(tokens, '{kind}').tofile('{file.name}')"
    size = file.stat().st_size
    if offset and size != offset + first[2] * kind.itemsize:
        raise UsageError(f"{file}: {size:,} bytes, and its header says {first[2]:,} tokens of {kind}: copy it again")
    if size % kind.itemsize or size <= offset:
        raise UsageError(f"{file}: {size:,} bytes are no tokens of {kind}, {kind.itemsize} bytes each; {hint}")
    tokens = np.memmap(file, kind, "r", offset)
    begin = np.array(tokens[:checked])
    call_optional("scripts.check_tokens", "check", begin, is_certain, f"{file} {{}}; {hint}")
    if begin.max() >= vocabulary:
        raise UsageError(f"-num_classes {vocabulary}: the data has the token {begin.max()}, in {file}; or {hint}")
    return tokens


def read_texts(data: str) -> dict[str, np.ndarray]:
    """Return the splits of a text, or of a folder of texts: by their names, if these name splits, as train.txt."""
    entries = [entry for entry in sorted(Path(data).glob("*")) if not is_debris(entry.name)]
    if named := by_split(entries):
        return {split: np.concatenate([read_text(str(one)) for one in some]) for split, some in named.items()}
    text = read_text(data)
    count = len(text) // HELD_OUT
    return dict(zip(("train", "val", "test"), np.split(text, [len(text) - 2 * count, len(text) - count])))


def by_split(texts: list[Path]) -> dict[str, list[Path]]:
    """Return files or folders by the split in their names; {} unless they name train and another one.

    Raises UsageError if they do, and some name none.
    """
    named: dict[str, list[Path]] = {}
    for text in texts:
        named.setdefault(split_of(text.stem), []).append(text)
    several = named if {"train"} < named.keys() - {""} else {}
    if odd := several.get(""):
        raise UsageError(f"{odd[0]}: its name says no split, as that of {named['train'][0].name}: rename one of them")
    return several


def find_texts(data: str) -> list[Path]:
    """Return the files in a folder, and links to folders, sorted, without hidden ones. Raises OSError."""
    library, found, failed = data == sysconfig.get_path("stdlib"), [], []
    for folder, inner, names in os.walk(data, onerror=failed.append):
        inner[:] = [name for name in inner if not (is_debris(name) or (library and name in LEFT_OUT))]
        names += [name for name in inner if Path(folder, name).is_symlink()]  # which are not followed
        found += [Path(folder, name) for name in names if not is_debris(name)]
    if failed:
        raise failed[0]
    return sorted(file for file in found if file.suffix == ".py" or not library)


def read_text(data: str) -> np.ndarray:
    """Return the bytes of a file, mapped, or of all files in a folder, in memory. Raises UsageError without any."""
    root = Path(data)
    files = find_texts(data) if root.is_dir() else [root] if root.is_file() else []
    if not files:
        raise UsageError(f"-data {data}: neither train.bin nor a text there; scripts/make_tokens.py makes train.bin")
    texts, is_mapped = [], root.is_file() and root.stat().st_size
    for file in files:
        if not file.is_file() or file.suffix.lower() in (".bin", ".npy", ".npz"):
            raise UsageError(f"{file} is no text: -data is a text, or a folder of texts, or of train.bin and val.bin")
        texts.append(np.memmap(file, np.uint8, "r") if is_mapped else np.fromfile(file, np.uint8))
        if 0 in texts[-1][:CHECKED]:
            hint = "save a text as UTF-8; scripts/make_tokens.py -bytes takes any file"
            raise UsageError(f"{file} is no text: it has a zero byte; {hint}")
    return texts[0] if is_mapped else np.concatenate(texts)
