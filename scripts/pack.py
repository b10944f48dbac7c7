"""Packs class folders into tar shards for -dataset tar: python scripts/pack.py data/photos -o data/shards.

Files go in as they are; with -resize N as JPEGs whose shorter side has N pixels, upright. Each split is in an order
drawn once, so that programs that read shards from front to back see the classes mixed. The same files give the same
bytes. Shards are whole or absent: killed, the same command goes on.
"""

import argparse
import functools
import io
import random
import sys
import tarfile
import zlib
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.dataset import folder
from lib.utils.checkpoint import atomic
from lib.utils.data import photos
from lib.utils.errors import UsageError

Sample = tuple[str, str, int]  # path of an image, its key, its class


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with train/CLASS/*.jpg, val/CLASS/*.jpg")
    parser.add_argument("-o", type=Path, required=True, metavar="DIR", help="where the shards go")
    parser.add_argument("-resize", type=int, metavar="N", help="pixels of the shorter side; smaller images stay")
    parser.add_argument("-quality", type=int, default=90, metavar="Q", help="of JPEGs under -resize (%(default)s)")
    parser.add_argument(
        "-shard_mb", type=int, default=256, metavar="N", help="about the size of a shard (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        args.o.mkdir(parents=True, exist_ok=True)
        atomic.sweep(args.o)
        names = folder.class_names(str(args.folder))
        atomic.write_file(args.o / "classes.txt", "".join(f"{name}\n" for name in names))
        convert = functools.partial(resize, size=args.resize, quality=args.quality) if args.resize else None
        for split in ("train", "val", "test"):
            if split == "train" or (args.folder / split).is_dir():
                pack(split, find_samples(args.folder, split, names), args.o, args.shard_mb, convert)
    except (UsageError, OSError) as error:
        parser.exit(2, f"pack.py: {error}\n")
    print(f"{args.o}: python train.py -dataset tar -data {args.o}")
    return 0


def find_samples(data: Path, split: str, names: list[str]) -> list[Sample]:
    """Return the images of a split, in an order that is drawn once."""
    samples = []
    for name in folder.class_names(str(data), split):
        if name not in names:
            raise UsageError(f"{data / split / name} is not a class in train")
        samples += [(file, names.index(name)) for file in photos.find(data / split / name)[0]]
    random.Random(0).shuffle(samples)
    return [(file, f"{number:08d}", label) for number, (file, label) in enumerate(samples)]


def pack(split: str, samples: list[Sample], out: Path, shard_mb: int, convert) -> None:
    """Write the shards of a split that are not there yet, each with equally many samples."""
    count = shard_count(samples, shard_mb)
    bar = tqdm(total=len(samples), desc=split, unit="image", disable=None)
    for number in range(count):
        part = samples[number * len(samples) // count : (number + 1) * len(samples) // count]
        shard = out / f"{split}-{number:05d}-of-{count:05d}.tar"
        if not shard.exists():
            with atomic.new_version(shard) as partial:
                verify(partial, write(partial, part, convert))
        bar.update(len(part))
    bar.close()
    written = {f"{split}-{number:05d}-of-{count:05d}.tar" for number in range(count)}
    if others := sorted({file.name for file in out.glob(f"{split}*.tar")} - written):
        raise UsageError(f"{out / others[0]} is not of these files ({len(others)} in all): take an empty folder")


def shard_count(samples: list[Sample], shard_mb: int) -> int:
    """Return how many shards the files of the samples fill."""
    total = sum(Path(file).stat().st_size for file, _, _ in samples)
    return max(1, min(len(samples), round(total / (shard_mb << 20))))


def write(shard: Path, samples: list[Sample], convert) -> list[int]:
    """Write a shard. Returns the checksum of each file in it."""
    checksums = []
    with tarfile.open(shard, "x", format=tarfile.USTAR_FORMAT) as tar:
        for file, key, label in samples:
            image, ending = Path(file).read_bytes(), Path(file).suffix.lower()
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
