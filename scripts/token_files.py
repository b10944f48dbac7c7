"""Opens token files and texts for -dataset tokens: by the splits in their names, checked before training."""

import os
import sysconfig
from pathlib import Path

import numpy as np

from lib.utils.errors import UsageError
from lib.utils.files import is_debris, split_of

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # of Python's own library
CHECKED = 1 << 22  # tokens of a split that are looked at before training; each batch is checked, too
LLM_C, LLM_C_BYTES = {20240520: "uint16", 20240801: "uint32"}, 1024  # first numbers of llm.c's headers; their size
HELD_OUT = 20  # the last 1/20 of a text is for the test, the 1/20 before it for validation
HEADERS = (b"\x93NUMPY", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x80\x04\x95")  # .npy, zip, pickle


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
    if fault := fault_of(begin, is_certain):
        raise UsageError(f"{file} {fault}; {hint}")
    if begin.max() >= vocabulary:
        raise UsageError(f"-num_classes {vocabulary}: the data has the token {begin.max()}, in {file}; or {hint}")
    return tokens


def are_bytes(tokens: np.ndarray) -> bool:
    """Return whether low and high bytes are alike, as of tokens of one byte: neither few nor 0, none near 255."""
    columns = tokens.view(np.uint8).reshape(len(tokens), -1)
    low, high = len(np.unique(columns[:, 0])), len(np.unique(columns[:, -1]))
    chance = ((1 + int(columns.max())) / 256) ** len(tokens)  # that the low bytes of real tokens are all so small
    return bool(columns[:, -1].any()) and 2 * high >= low > 1 and chance < 1e-6


def fault_of(tokens: np.ndarray, is_certain: bool) -> str:
    """Return what else these look like: a file of another format or, unless `is_certain`, other numbers; or ""."""
    if tokens.tobytes().startswith(HEADERS):
        return "begins with the header of another format"
    if is_certain:
        return ""
    rows = tokens[: len(tokens) // 4 * 4].reshape(-1, 4)
    used = rows.any(axis=0)
    if len(rows) >= 16 and used.any() and not used.all():
        return f"looks like a wider type than {tokens.dtype}, as int32, int64 or floats"
    if len(rows) >= 16 and not (tokens & 255).any():
        return "holds multiples of 256 alone, as zeros, or numbers whose bytes are in the other order"
    return "is a text, or holds tokens of one byte" if are_bytes(tokens) else ""


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
