"""Finds out where each image lies in tar shards: python scripts/tar_index.py DATA.

-dataset tar does so by itself at its first start. An index is made once, by reading the headers of all files. It is
in the folder index/ next to the shards, or in -cache_dir, and is valid for shards of these names, sizes and times. A
run may be killed while it is made, and several may start at once.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils import files
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError, printable
from lib.utils.files import is_debris

IMAGES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")  # torchvision's: -h imports no torch
COMPRESSED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
MOST_CLASSES = 1 << 20
QUIET_S = 30  # between two lines of progress where stderr is no terminal
ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("label", "<i4")])  # of an index


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="folder of the shards, or a pattern, as -data of train.py")
    parser.add_argument("-cache_dir", metavar="DIR", help="folder for the index, where DATA cannot be written")
    args = parser.parse_args(argv)
    try:
        for split in ("train", "val", "test"):
            rows, shards = open_index(args, split)
            print(f"{split}: {len(rows):,} images in {len(shards):,} shards")
    except (UsageError, OSError) as error:
        parser.exit(2, f"tar_index.py: {error}\n")
    return 0


def open_index(args: argparse.Namespace, split: str) -> tuple[np.ndarray, list[Path]]:
    """Return where the images of a split lie, rows of ROW, mapped, and its shards. The first process makes the index.

    Both are empty for a split that is not there. Raises UsageError for train without shards, a split without images,
    what is wrong with a shard, or an index that cannot be written or read.
    """
    shards = find_shards(args.data, split)
    if not shards and split != "train":
        return np.empty(0, ROW), []
    if not shards:
        raise UsageError(f"-data {args.data}: no {split}*.tar; scripts/pack.py makes shards of class folders")
    about = []
    for shard in shards:
        with usage_errors(shard):
            about.append((shard.name, shard.stat().st_size, shard.stat().st_mtime_ns))
    root = root_of(args.data)
    place = str(root.resolve()) if args.cache_dir else ""  # other shards may have their index there, too
    key = hashlib.sha256(repr((about, place)).encode()).hexdigest()[:16]
    file = Path(args.cache_dir or root) / "index" / f"{split}_{key}.npy"
    if not file.exists():  # its folder may be writable for others only
        make_index(file, shards, split, args.data)
    try:
        rows = np.load(file, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise UsageError(f"{file}: damaged ({error}): remove it, and it is made again") from None
    if not len(rows):
        raise UsageError(f"-data {args.data}: no image with a class in the shards of {split}")
    return rows, shards


def make_index(file: Path, shards: list[Path], split: str, data: str) -> None:
    """Write the index of shards into a file, unless another process does. Raises UsageError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = (file.parent / f"{split}.lock").open("a")
    except OSError as error:
        raise UsageError(f"-data {data}: the index cannot be written ({error}): give a -cache_dir") from None
    with lock:
        with contextlib.suppress(OSError):  # without locks, several make the same one
            fcntl.flock(lock, fcntl.LOCK_EX)
            atomic.sweep(file.parent, f"{split}_")  # of killed ones
        if file.exists():
            return
        rows = scan(shards, split)
        try:
            with atomic.new_version(file) as partial, partial.open("wb") as opened:
                np.save(opened, rows)
        except OSError as error:
            raise UsageError(f"-data {data}: the index cannot be written ({error}): give a -cache_dir") from None


def find_shards(data: str, split: str) -> list[Path]:
    """Return the shards of a split, sorted: DATA/SPLIT*.tar, or else DATA/SPLIT/*.tar.

    If DATA is a pattern, they are those of its files that begin with the split's name, or whose folder does; train
    also has all that begin with none. Raises UsageError for a compressed one, which has no places to read at.
    """
    if is_pattern(data):
        return sorted(file for file in map(Path, expand(data)) if split_of(file) == split)
    for pattern in (f"{split}*", f"{split}/*"):
        found = sorted(file for file in Path(data).glob(pattern) if not is_debris(file.name))
        if compressed := [file for file in found if file.name.lower().endswith(COMPRESSED)]:
            raise UsageError(f"{compressed[0]}: compressed ({len(compressed)} such files): unpack it to a .tar file")
        if shards := [file for file in found if file.name.endswith(".tar")]:
            return shards
    return []


def is_pattern(data: str) -> bool:
    """Whether -data names the shards themselves, as DIR/{train,val}-{0000..0127}.tar, and not their folder."""
    return data.endswith(".tar")


def expand(pattern: str) -> list[str]:
    """Return the texts of a pattern as a shell does: {a,b} is a and b, {08..10} is 08, 09 and 10."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    if found[3] is None:
        parts = [f"{number:0{len(found[1])}d}" for number in range(int(found[1]), int(found[2]) + 1)]
    else:
        parts = found[3].split(",")
    return [text for part in parts for text in expand(pattern[: found.start()] + part + pattern[found.end() :])]


def split_of(file: Path) -> str:
    """Return the split of a pattern's file."""
    names = file.name, file.parent.name
    return next((split for split in ("val", "test") if any(name.startswith(split) for name in names)), "train")


def root_of(data: str) -> Path:
    """Return the folder of the shards: -data, or what all files of a pattern have in common."""
    return Path(os.path.commonpath([Path(file).parent for file in expand(data)])) if is_pattern(data) else Path(data)


def scan(shards: list[Path], split: str) -> np.ndarray:
    """Return the index of shards. Raises UsageError for what is wrong with one of them."""
    parts = []
    pause = 0.1 if sys.stderr.isatty() else QUIET_S
    tqdm.monitor_interval = 0  # no thread that redraws: a run's processes are forked after this
    bar = tqdm(shards, f"indexing {split}", unit="shard", mininterval=pause, maxinterval=pause, delay=pause)
    for number, shard in enumerate(bar):
        try:
            with usage_errors(shard):
                rows = [(offset, size, number, label) for offset, size, label in find_images(shard)]
        except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
            raise UsageError(f"{shard}: damaged, cut off or no uncompressed tar file ({error})") from None
        parts.append(np.array(rows, ROW))
    return np.concatenate(parts)


@contextlib.contextmanager
def usage_errors(shard: Path) -> Iterator[None]:
    """Raise UsageError for a shard that cannot be opened. An error of the disk stays an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in files.OF_DISK:
            raise
        raise UsageError(f"{shard}: cannot be read ({error.strerror})") from None


def find_images(shard: Path) -> list[tuple[int, int, int]]:
    """Return offset, size and class of each image in a shard, in its order.

    Raises UsageError, OSError, or, as tarfile does, TarError, EOFError, OverflowError or ValueError.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    with files.open_regular(shard, "rb", follow=True) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while member := tar.next():
            tar.members = []  # or all of them stay in memory
            name = member.name.rpartition("/")[2]
            ending = name.partition(".")[2]
            kind = "image" if ending.lower() in IMAGES else ending.lower()
            if kind not in ("image", "cls") or is_debris(name) or member.isdir():
                continue
            shown = f"{shard}: {one_line(member.name)}"
            if not member.isreg() or member.issparse():
                raise UsageError(f"{shown} is a link or a sparse file: store it as it is")
            if member.size >= 1 << 32:
                raise UsageError(f"{shown} has {member.size:,} bytes: no image has 4 GB")
            key = member.name.removesuffix(f".{ending}")
            if kind in samples[key]:
                raise UsageError(f"{shard}: two files are the {kind} of {one_line(key)}")
            samples[key][kind] = member.offset_data, member.size
        check_end(file, tar.offset)
        rows = []
        for key, sample in samples.items():
            missing = [kind for kind in ("image", "cls") if kind not in sample]
            if missing:
                found = Counter(len(one) for one in samples.values())[1]
                raise UsageError(f"{shard}: {one_line(key)} has no {missing[0]} ({found} such samples)")
            offset, size = sample["cls"]
            text = os.pread(file.fileno(), min(size, 20), offset)
            if size > 20 or not text.strip().isdigit():
                raise UsageError(f"{shard}: the class of {one_line(key)} is no number from 0: {text!r}")
            if int(text) >= MOST_CLASSES:
                raise UsageError(
                    f"{shard}: the class of {one_line(key)} is {int(text)}: at most {MOST_CLASSES - 1:,}"
                )
            rows.append((*sample["image"], int(text)))
    return rows


def check_end(file: BinaryIO, offset: int) -> None:
    """Raise ReadError unless a shard has only zeros from `offset` on, a block of them at least."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no end at byte {offset:,}")
    while data := file.read(1 << 20):
        if any(data):
            raise tarfile.ReadError(f"it goes on after its end at byte {offset:,}: tar -A joins shards, cat does not")


def member_name(header: bytes, offset: int, size: int, shard: Path) -> str:
    """Return the name in a header, and where its file begins: long and foreign names are not whole there.

    Raises UsageError if it is no header of a file of this size.
    """
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError:
        member = None
    if member is None or member.size != size:
        raise UsageError(f"{shard}: changed since its index was written: start the run again")
    return f"{member.name} at byte {offset}"


def class_names(data: str) -> list[str]:
    """Return the names of the classes, by their numbers: none without DATA/classes.txt. Raises UsageError."""
    file = root_of(data) / "classes.txt"
    try:
        names = files.read_bytes(file, follow=True).decode("utf-8-sig").rstrip("\n\r").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error})") from None
    if not all(name.strip() for name in names):
        raise UsageError(f"{file}: an empty line: it must have a name in each line")
    return names


def one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main())
