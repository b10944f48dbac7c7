"""Packs class folders into tar shards for -dataset tar: python scripts/pack.py data/photos -o data/shards.

Files go in as they are; with -resize N as JPEGs whose shorter side has N pixels, upright. Each split is in an order
drawn once, so that programs that read shards from front to back see the classes mixed. The same files give the same
bytes. Shards are whole or absent: killed, the same command goes on. DIR/pack.json says what they are of: with other
files or flags an empty folder is needed.
"""

import argparse
import functools
import hashlib
import io
import json
import os
import random
import sys
import tarfile
import zlib
from collections import Counter
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.dataset import folder
from lib.utils import files
from lib.utils.checkpoint import atomic
from lib.utils.data import photos
from lib.utils.errors import UsageError, printable
from scripts import tar_index

RECORD, SPLITS = "pack.json", ("train", "val", "test")
Sample = tuple[str, str, int]  # path of an image, its key, its class


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with train/CLASS/*.jpg, val/CLASS/*.jpg")
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
        pack_all(args)
    except (UsageError, OSError) as error:
        parser.exit(2, printable(f"pack.py: {error}\n"))
    print(printable(f"{args.o}: python train.py -dataset tar -data {args.o}"))
    return 0


def pack_all(args: argparse.Namespace) -> None:
    """Write the shards of all splits. Raises UsageError, or OSError."""
    for split in SPLITS:
        if (args.folder / split).resolve() in (args.o.resolve(), *args.o.resolve().parents):
            raise UsageError(
                f"-o {args.o}: it is in {args.folder / split}, where a folder is a class: take another one"
            )
    names = folder.class_names(str(args.folder))
    there = [split for split in SPLITS if split == "train" or (args.folder / split).is_dir()]
    samples = {split: find_samples(args.folder, split, names) for split in there}
    counts = {split: shard_count(some, args.shard_mb) for split, some in samples.items()}
    args.o.mkdir(parents=True, exist_ok=True)
    check_folder(args, samples, counts)
    atomic.sweep(args.o, (*(f"{split}-" for split in SPLITS), "classes.txt.", RECORD))
    atomic.write_file(args.o / "classes.txt", "".join(f"{tar_index.one_line(name)}\n" for name in names))
    convert = functools.partial(resize, size=args.resize, quality=args.quality) if args.resize else None
    for split, some in samples.items():
        pack(split, some, args.o, counts[split], convert)


def check_folder(args: argparse.Namespace, samples: dict[str, list[Sample]], counts: dict[str, int]) -> None:
    """Raise UsageError if DIR has shards of other files or flags than those that it is for, by DIR/pack.json."""
    digest = hashlib.sha256()
    for split, some in samples.items():
        for file, _, label in some:
            name = os.fsencode(os.path.relpath(file, args.folder))
            digest.update(repr((split, name, Path(file).stat().st_size, label)).encode())
    facts = {"files": digest.hexdigest(), "shards": counts, "resize": args.resize, "quality": args.quality}
    record, text = args.o / RECORD, json.dumps(facts, indent=1) + "\n"
    before = record.read_text() if record.exists() else None
    shards = {shard.name for split in SPLITS for shard in args.o.glob(f"{split}*.tar")}
    others = sorted(shards - {shard_name(split, n, count) for split, count in counts.items() for n in range(count)})
    if shards and (before != text or others):
        example = (others or sorted(shards))[0]
        raise UsageError(f"{args.o / example}: made of other files or with other flags: take an empty folder")
    atomic.write_file(record, text)


def find_samples(data: Path, split: str, names: list[str]) -> list[Sample]:
    """Return the images of a split, in an order that is drawn once; print which files are left out.

    Raises UsageError for a class that -dataset folder would not take.
    """
    others: Counter[str] = Counter()
    flags = argparse.Namespace(data=str(data), image_size=224, channels=3, augment=False)  # only to find them
    samples = folder.find_images(flags, split, names, others).files
    if others:
        print(f"{data / split}: {photos.describe(others)}", file=sys.stderr)
    random.Random(0).shuffle(samples)
    return [(file, f"{number:08d}", label) for number, (file, label) in enumerate(samples)]


def shard_name(split: str, number: int, count: int) -> str:
    return f"{split}-{number:05d}-of-{count:05d}.tar"


def pack(split: str, samples: list[Sample], out: Path, count: int, convert) -> None:
    """Write the shards of a split that are not there yet, each with equally many samples."""
    pause = 0.1 if sys.stderr.isatty() else tar_index.QUIET_S
    tqdm.monitor_interval = 0  # no thread that redraws
    bar = tqdm(total=len(samples), desc=split, unit="image", mininterval=pause, maxinterval=pause, delay=pause)
    for number in range(count):
        part = samples[number * len(samples) // count : (number + 1) * len(samples) // count]
        shard = out / shard_name(split, number, count)
        if not shard.exists():
            with atomic.new_version(shard) as partial:
                verify(partial, write(partial, part, convert))
        bar.update(len(part))
    bar.close()


def shard_count(samples: list[Sample], shard_mb: int) -> int:
    """Return how many shards the files of the samples fill."""
    total = sum(Path(file).stat().st_size for file, _, _ in samples)
    return max(1, min(len(samples), round(total / (shard_mb << 20))))


def write(shard: Path, samples: list[Sample], convert) -> list[int]:
    """Write a shard. Returns the checksum of each file in it."""
    checksums = []
    with tarfile.open(shard, "x", format=tarfile.USTAR_FORMAT) as tar:
        for file, key, label in samples:
            with files.open_regular(Path(file), "rb", follow=True) as opened:
                image, ending = opened.read(), Path(file).suffix.lower()
            if convert:
                image, ending = convert(file, image), ".jpg"
            for name, data in ((f"{key}{ending}", image), (f"{key}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
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
