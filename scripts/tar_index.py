"""Finds out where each image lies in tar shards: python scripts/tar_index.py DATA.

-dataset tar does so by itself at its first start. An index is made once, by reading the headers of all files; it lies
beside the shards, in index/, or in -cache_dir, and holds for shards of these names, sizes and times. A run may be
killed while it is made, and several may start at once.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import sys
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError, printable
from lib.utils.files import is_debris

IMAGES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")  # torchvision's: -h imports no torch
ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("label", "<i4")])  # of an index


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="folder of the shards, as -data of train.py")
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

    Both are empty for a split that is not there. Raises UsageError for train, or if the index cannot be written.
    """
    shards = find_shards(args.data, split)
    if not shards and split != "train":
        return np.empty(0, ROW), []
    if not shards:
        raise UsageError(f"-data {args.data}: no {split}*.tar; scripts/pack.py makes shards of class folders")
    about = [(shard.name, shard.stat().st_size, shard.stat().st_mtime_ns) for shard in shards]
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    folder = Path(args.cache_dir or args.data) / "index"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{split}.lock").open("a") as lock:
            with contextlib.suppress(OSError):  # without locks, several make the same one
                fcntl.flock(lock, fcntl.LOCK_EX)
            file = folder / f"{split}_{key}.npy"
            if not file.exists():
                rows = scan(shards, split)
                with atomic.new_version(file) as partial, partial.open("wb") as opened:
                    np.save(opened, rows)
            return np.load(file, mmap_mode="r"), shards
    except OSError as error:
        if error.filename is None or folder not in [Path(error.filename), *Path(error.filename).parents]:
            raise
        raise UsageError(f"-data {args.data}: the index cannot be written ({error}): give a -cache_dir") from None


def find_shards(data: str, split: str) -> list[Path]:
    """Return the shards of a split, sorted: DATA/SPLIT*.tar, or else DATA/SPLIT/*.tar."""
    found = sorted(Path(data).glob(f"{split}*.tar")) or sorted(Path(data, split).glob("*.tar"))
    return [file for file in found if not is_debris(file.name)]


def scan(shards: list[Path], split: str) -> np.ndarray:
    """Return the index of shards. Raises UsageError for what is wrong with one of them."""
    parts = []
    for number, shard in enumerate(tqdm(shards, f"indexing {split}", unit="shard", disable=None)):
        try:
            rows = [(offset, size, number, label) for offset, size, label in find_images(shard)]
        except (tarfile.TarError, EOFError, OverflowError) as error:
            raise UsageError(f"{shard}: damaged, cut off or no uncompressed tar file ({error})") from None
        parts.append(np.array(rows, ROW))
    return np.concatenate(parts)


def find_images(shard: Path) -> list[tuple[int, int, int]]:
    """Return offset, size and class of each image in a shard, in its order."""
    samples: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
        while member := tar.next():
            tar.members = []  # or all of them stay in memory
            name = member.name.rpartition("/")[2]
            ending = name.partition(".")[2]
            kind = "image" if ending.lower() in IMAGES else ending.lower()
            if kind not in ("image", "cls") or is_debris(name) or member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise UsageError(f"{shard}: {printable(member.name)} is a link or a sparse file: store it as it is")
            key = member.name.removesuffix(f".{ending}")
            if kind in samples[key]:
                raise UsageError(f"{shard}: two files are the {kind} of {printable(key)}")
            samples[key][kind] = member.offset_data, member.size
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end at byte {tar.offset:,}")
        rows = []
        for key, sample in samples.items():
            missing = [kind for kind in ("image", "cls") if kind not in sample]
            if missing:
                found = Counter(len(one) for one in samples.values())[1]
                raise UsageError(f"{shard}: {printable(key)} has no {missing[0]} ({found} such samples)")
            offset, size = sample["cls"]
            text = os.pread(file.fileno(), min(size, 20), offset)
            if not text.strip().isdigit():
                raise UsageError(f"{shard}: the class of {printable(key)} is no number: {text!r}")
            rows.append((*sample["image"], int(text)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
