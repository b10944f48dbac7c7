"""Packs class folders into tar shards for -dataset tar: python scripts/pack.py data/photos -o data/shards.

The names of the folders say their splits: valid, validation and dev are for val. Files go in as they are; with
-resize N as JPEGs whose shorter side has N pixels, upright. -dataset NAME packs what another file in lib/dataset
gives, with -augment no. Each split is in an order drawn once, so that programs that read shards from front to back
see the classes mixed. The same files give the same bytes. Shards are whole or absent: killed, the same command goes
on. DIR/pack.json says what they are of: with other files or flags an empty folder is needed.
"""

import argparse
import functools
import hashlib
import io
import json
import os
import random
import re
import shlex
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config
from lib.config import Args, plugins
from lib.core import loss as losses
from lib.dataset import folder
from lib.utils import files, seeding
from lib.utils.checkpoint import atomic
from lib.utils.data import fetch, fingerprint, photos
from lib.utils.distributed import World
from lib.utils.errors import UsageError, printable
from scripts import model_input, tar_index

RECORD, SPLITS = "pack.json", ("train", "val", "test")
Files = dict[str, bytes]  # of a sample, by their endings


class Photos:
    """The images of class folders as files: DATA/PART/CLASS/*. Raises UsageError as -dataset folder does."""

    def __init__(self, data: Path, part: str, names: list[str]):
        others: Counter[str] = Counter()
        flags = argparse.Namespace(data=str(data), image_size=224, channels=3, augment=False)  # only to find them
        self.data, self.samples = data, folder.find_images(flags, part, names, others).files
        if others:
            print(f"{data / part}: {photos.describe(others)}", file=sys.stderr)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Files:
        """Return the image's bytes, and its class."""
        file, label = self.samples[index]
        with files.open_regular(Path(file), "rb", follow=True) as opened:
            return {Path(file).suffix.lower()[1:]: opened.read(), "cls": str(label).encode()}

    def name(self, index: int) -> str:
        """Return where a sample is, for messages."""
        return self.samples[index][0]

    def size(self) -> int:
        """Return the bytes of all."""
        return sum(Path(file).stat().st_size for file, _ in self.samples)

    def digest(self) -> str:
        """Return a digest of all names, sizes, times and classes."""
        facts = []
        for file, label in self.samples:
            about = Path(file).stat()
            name = os.fsencode(os.path.relpath(file, self.data))
            facts.append((name, about.st_size, about.st_mtime_ns, label))
        return hashlib.sha256(repr(facts).encode()).hexdigest()


class Samples:
    """The samples of a split of any -dataset as files: each part of one has the ending of its type."""

    def __init__(self, part: Any, split: str, args: Args, digest: Any):
        self.part, self.split, self.seed, self.known = part, split, args.seed, digest
        if digest == fingerprint.NEVER_THE_SAME:
            raise UsageError(f"the samples of {split} differ each time they are read: switch that off in -flags")
        some = (0, len(part) // 2, len(part) - 1)
        if any(self.read(index) != self.read(index, draw=draw) for index in some for draw in (1, 2)):
            fault = "are drawn at random, as by an augmentation: one draw of each is packed"
            print(f"pack.py: the samples of {split} {fault}, unless -flags switch it off", file=sys.stderr)

    def __len__(self) -> int:
        return len(self.part)

    def read(self, index: int, draw: int = 0) -> Files:
        """Return the parts of a sample. Raises UsageError for one that is nothing that a file can hold."""
        seeding.seed(seeding.SAMPLE, self.seed, draw, index)
        sample = self.part[index]
        parts = sample if isinstance(sample, Mapping | tuple | list) else [sample]
        named = dict(parts if isinstance(parts, Mapping) else enumerate(parts))
        is_second = 1 in named and encode(named[1], self.name(index))[0] == "cls"  # of a tuple, as in training
        place = 1 if is_second else len(named) - 1
        target = next((name for name in (*losses.TARGETS, "cls", place) if name in named), None)
        found: Files = {}
        for name, value in named.items():
            ending, data = encode(value, self.name(index))
            if ending == "cls" and name == target and data.startswith(b"-"):
                raise UsageError(f"{self.name(index)} has the class {data.decode()}: numbers from 0 are needed")
            if ending in found or (ending == "cls" and name != target):  # another number is no class
                ending = f"{re.sub(r'[^A-Za-z0-9_]', '_', str(name))[:32]}.{ending}"
            found[ending] = data
        return found

    def name(self, index: int) -> str:
        """Return where a sample is, for messages."""
        return f"sample {index} of {self.split}"

    def size(self) -> int:
        """Return about the bytes of all, by some of them."""
        some = range(0, len(self), -(-len(self) // 100))
        return sum(len(data) for index in some for data in self.read(index).values()) * len(self) // len(some)

    def digest(self) -> str:
        """Return what a run knows of these samples."""
        return hashlib.sha256(f"{len(self)} {self.known}".encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", help="train/CLASS/*.jpg, val/CLASS/*.jpg")
    parser.add_argument("-dataset", metavar="NAME", help="instead of FOLDER: what this file in lib/dataset gives")
    parser.add_argument("-flags", default="", metavar="FLAGS", help="its flags, as '-data DIR -image_size 64'")
    parser.add_argument("-o", type=Path, required=True, metavar="DIR", help="where the shards go")
    parser.add_argument("-resize", type=int, metavar="N", help="pixels of the shorter side; smaller images stay")
    parser.add_argument("-quality", type=int, metavar="Q", help="of JPEGs under -resize, 1 to 100 (90)")
    parser.add_argument(
        "-shard_mb", type=int, default=256, metavar="N", help="about the size of a shard (%(default)s)"
    )
    args = parser.parse_args(argv)
    if args.quality is not None and not args.resize:
        parser.error("-quality is for -resize: without it files go in as they are")
    args.quality = 90 if args.quality is None else args.quality
    if args.shard_mb < 1 or (args.resize is not None and args.resize < 1) or not 1 <= args.quality <= 100:
        parser.error("-shard_mb and -resize are 1 or more, and -quality is 1 to 100")
    try:
        endings = pack_all(args)
    except (UsageError, OSError) as error:
        hint = f"; train.py -dataset folder -data {args.folder} -check_data lists all"
        hint = hint if "-skip_bad" in str(error) else ""
        parser.exit(2, printable(f"pack.py: {error}{hint}\n"))
    hint = f"python train.py -dataset tar -data {shlex.quote(str(args.o))}"
    if not endings & {*tar_index.IMAGES} or "cls" not in endings:
        hint = f"samples have {', '.join(sorted(endings))}: a subclass of Shards reads them (docs/data.md)"
    print(printable(f"{args.o}: {hint}"))
    return 0


def pack_all(args: argparse.Namespace) -> set[str]:
    """Write the shards of all splits. Returns the endings of a sample's files. Raises UsageError, or OSError."""
    if bool(args.folder) == bool(args.dataset) or (args.flags and args.folder):
        raise UsageError("give either FOLDER or -dataset, which may have -flags")
    if args.dataset and args.resize:
        raise UsageError("-resize is for class folders: next to an image there may be a mask, or boxes")
    sources, names = open_dataset(args) if args.dataset else open_folder(args)
    counts = {split: shard_count(source, args.shard_mb) for split, source in sources.items()}
    args.o.mkdir(parents=True, exist_ok=True)
    check_folder(args, sources, counts)
    atomic.sweep(args.o, (*(f"{split}-" for split in SPLITS), "classes.txt.", RECORD))
    if names:
        atomic.write_file(args.o / "classes.txt", "".join(f"{tar_index.one_line(name)}\n" for name in names))
    convert = functools.partial(resize, size=args.resize, quality=args.quality) if args.resize else None
    for split, source in sources.items():
        pack(split, source, args.o, counts[split], convert)
    return {*sources["train"].read(0)}


def open_folder(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the splits of class folders, and the names of the classes."""
    parts = split_folders(args.folder)
    for name in {*SPLITS, *parts.values()}:
        if (args.folder / name).resolve() in (args.o.resolve(), *args.o.resolve().parents):
            raise UsageError(
                f"-o {args.o}: it is in {args.folder / name}, where a folder is a class: take another one"
            )
    names = folder.class_names(str(args.folder), parts.get("train", "train"))
    return {split: Photos(args.folder, parts[split], names) for split in SPLITS if split in parts}, names


def split_folders(data: Path) -> dict[str, str]:
    """Return the name of each split's folder, as valid for val, and print which folders are of none.

    Raises UsageError if two are of one split.
    """
    parts: dict[str, str] = {}
    others = []
    for one in sorted(data.glob("*/")):
        split = files.split_of(one.name)
        if files.is_debris(one.name) or (one / RECORD).exists():  # shards that were made before
            continue
        if split in parts:
            raise UsageError(f"{data}: {parts[split]} and {one.name} are both for {split}: move one elsewhere")
        if split:
            parts[split] = one.name
        else:
            others.append(one.name)
    if others:
        hint = "their names say no split, as train, valid or test do"
        print(printable(f"pack.py: {data}: {', '.join(others)} left out: {hint}"), file=sys.stderr)
    return parts


def open_dataset(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the splits of a -dataset without augmentation, and the names of the classes, if it has them."""
    try:
        words = shlex.split(args.flags)
    except ValueError as error:
        raise UsageError(f"-flags {args.flags}: {error}") from None
    flags = config.parse_args([*words, "-dataset", args.dataset, "-augment", "no", "-shuffle", "no"])
    dataset = plugins.load("dataset", flags.dataset)
    if plugins.mixed(dataset, flags.data) is not dataset:
        raise UsageError(f"-data {flags.data}: shards have no shares: pack each folder by itself, and mix the shards")
    parts = model_input.find_splits(flags)
    if odd := parts.keys() - {*SPLITS}:
        raise UsageError(f"-dataset {args.dataset} has {', '.join(sorted(odd))}: shards are of {', '.join(SPLITS)}")
    if any(fetch.lists(part, "weights") or fetch.option(part, "sampler") is not None for part in parts.values()):
        print("weights and samplers are not packed: each sample is, once", file=sys.stderr)
    facts = fingerprint.describe(parts, flags, World())
    sources = {split: Samples(part, split, flags, facts[f"{split} digest"]) for split, part in parts.items()}
    return sources, facts["classes"]


def check_folder(args: argparse.Namespace, sources: dict[str, Any], counts: dict[str, int]) -> None:
    """Raise UsageError if DIR has shards of other files or flags than those that it is for, by DIR/pack.json."""
    digests = {split: source.digest() for split, source in sources.items()}
    facts = {"files": digests, "shards": counts, "resize": args.resize, "quality": args.quality}
    facts |= {"dataset": args.dataset, "flags": args.flags}
    record, text = args.o / RECORD, json.dumps(facts, indent=1) + "\n"
    before = record.read_text() if record.exists() else None
    shards = {shard.name for split in SPLITS for shard in args.o.glob(f"{split}*.tar")}
    others = sorted(shards - {shard_name(split, n, count) for split, count in counts.items() for n in range(count)})
    if shards and (before != text or others):
        example = (others or sorted(shards))[0]
        raise UsageError(f"{args.o / example}: made of other files or with other flags: take an empty folder")
    atomic.write_file(record, text)


def encode(value: Any, place: str) -> tuple[str, bytes]:
    """Return the ending and the bytes of a file for a part of a sample.

    An image, also one of bytes (C, H, W) with one or three channels, is a png; a whole number a cls; a text a txt;
    bytes a bin; any other array a npy; dicts and lists json. Raises UsageError for anything else.
    """
    written = io.BytesIO()
    try:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            value = np.asarray(value)
            if value.dtype == np.uint8 and value.ndim == 3 and len(value) in (1, 3):
                value = Image.fromarray(value[0] if len(value) == 1 else np.moveaxis(value, 0, 2))
            elif value.ndim == 0 and value.dtype.kind in "iu":
                value = int(value)
        if isinstance(value, Image.Image):
            value.save(written, "PNG")  # as it is: without what a camera says of its orientation
            return "png", written.getvalue()
        if isinstance(value, int) and not isinstance(value, bool):
            return "cls", str(value).encode()
        if isinstance(value, str | bytes):
            return ("txt", value.encode()) if isinstance(value, str) else ("bin", value)
        if isinstance(value, np.ndarray | float):
            np.save(written, value, allow_pickle=False)
            return "npy", written.getvalue()
        return "json", json.dumps(value).encode()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{place} has a {type(value).__name__} that no file of a shard holds: {error}") from None


def shard_name(split: str, number: int, count: int) -> str:
    return f"{split}-{number:05d}-of-{count:05d}.tar"


def pack(split: str, source: Any, out: Path, count: int, convert) -> None:
    """Write the shards of a split that are not there yet, each with equally many samples, in an order drawn once."""
    pause = 0.1 if sys.stderr.isatty() else tar_index.QUIET_S
    tqdm.monitor_interval = 0  # no thread that redraws
    bar = tqdm(total=len(source), desc=split, unit="sample", mininterval=pause, maxinterval=pause, delay=pause)
    order = [*range(len(source))]
    random.Random(0).shuffle(order)
    there = 0
    for number in range(count):
        places = range(number * len(order) // count, (number + 1) * len(order) // count)
        shard = out / shard_name(split, number, count)
        if shard.exists():
            there += 1
        else:
            with atomic.new_version(shard) as partial:
                verify(partial, write(partial, source, {f"{place:08d}": order[place] for place in places}, convert))
        bar.update(len(places))
    bar.close()
    if there:
        hint = "if samples have changed since, take an empty folder"
        print(
            f"pack.py: {split}: {there} of {count} shards were there, and stay as they are; {hint}", file=sys.stderr
        )


def shard_count(source: Any, shard_mb: int) -> int:
    """Return how many shards the files of the samples fill."""
    return max(1, min(len(source), round(source.size() / (shard_mb << 20))))


def write(shard: Path, source: Any, keys: dict[str, int], convert) -> list[int]:
    """Write a shard with the samples of some indices, by their keys. Returns the checksum of each file in it."""
    checksums = []
    with tarfile.open(shard, "x", format=tarfile.USTAR_FORMAT) as tar:
        for key, index in keys.items():
            for ending, data in source.read(index).items():
                if convert and ending in tar_index.IMAGES:
                    data, ending = convert(source.name(index), data), "jpg"
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                checksums.append(zlib.crc32(data))
    return checksums


def resize(file: str, data: bytes, size: int, quality: int) -> bytes:
    """Return an image as a JPEG, upright, in 8 bits, its shorter side `size` pixels long if it is longer."""

    def shrink(image: Image.Image) -> bytes:
        image.draft(None, [2 * side * size // min(image.size) for side in image.size])  # decodes no more than needed
        upright = photos.to_8_bits(ImageOps.exif_transpose(image)).convert("RGB")
        short, written = min(upright.size), io.BytesIO()
        if short > size:
            shape = [round(side * size / short) for side in upright.size]
            upright = upright.resize(shape, Image.Resampling.LANCZOS)
        if max(upright.size) > 65500:  # libjpeg's limit
            raise UsageError(f"{upright.width} x {upright.height} pixels are too many for a JPEG")
        upright.save(written, "JPEG", quality=quality)
        return written.getvalue()

    return photos.read(file, shrink, data)


def verify(shard: Path, checksums: list[int]) -> None:
    """Raise OSError unless a shard holds files with these checksums."""
    with tarfile.open(shard) as tar:
        found = [zlib.crc32(tar.extractfile(member).read()) for member in tar]
    if found != checksums:
        raise OSError(f"{shard}: what was written is not what is there")


if __name__ == "__main__":
    sys.exit(main())
