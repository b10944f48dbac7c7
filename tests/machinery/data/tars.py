"""Tar shards for tests, as WebDataset has them."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def jpeg(shade: int = 90, size=(40, 30)) -> bytes:
    """A noisy JPEG that is about as bright as `shade`."""
    written = io.BytesIO()
    pixels = np.random.default_rng(shade).integers(0, 60, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels + np.uint8(shade)).save(written, "JPEG")
    return written.getvalue()


def write(file: Path, members: dict, **options) -> None:
    """Write a tar file: bytes by name; a TarInfo stands for itself."""
    with tarfile.open(file, "w", **options) as opened:
        for name, data in members.items():
            member = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = 0 if member is data else len(data)
            opened.addfile(member, None if member is data else io.BytesIO(data))


def pairs(count: int, start: int = 0, path: str = "") -> dict:
    found = {}
    for number in range(start, start + count):
        name, label = f"{path}{number:04d}", number % 2
        found |= {f"{name}.jpg": jpeg(label * 100), f"{name}.cls": b"%d\n" % label}
    return found
