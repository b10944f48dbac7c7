"""Image files of any origin: found, and read upright, in 8 bits, decoded no larger than needed."""

import errno
import io
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, TiffImageFile

from lib.utils import files
from lib.utils.errors import UsageError

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's
SIDEWAYS = (5, 6, 7, 8)  # orientations in EXIF that swap width and height
MOST_PIXELS = 250_000_000  # of an image: a gigabyte when decoded in full
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
_decode = lambda image: image.load()  # noqa: E731


def find(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return the images below a folder, in order, and how many other files there are of each ending."""
    images, others, failed = [], Counter(), []
    for root, folders, names in os.walk(folder, onerror=failed.append):
        folders[:] = [name for name in folders if not files.is_debris(name)]
        others.update("link to a folder" for name in folders if Path(root, name).is_symlink())
        for name in names:
            ending = Path(name).suffix.lower()
            if ending in IMG_EXTENSIONS and not files.is_debris(name):
                images.append((root, name))
            elif not files.is_debris(name):
                others[ending or "no ending"] += 1
    if failed:
        raise failed[0]
    return [str(Path(*one)) for one in sorted(images)], others


def describe(others: Counter[str]) -> str:
    """Return a line on files that are not read."""
    counts = ", ".join(f"{count} {ending}" for ending, count in others.most_common())
    return f"{others.total()} files are not read: {counts} (read are {' '.join(IMG_EXTENSIONS)})"


def read(file: str | Path, use: Callable[[Image.Image], Any], data: bytes | None = None) -> Any:
    """Return what `use` makes of an image file, or of `data` that came from there.

    Raises what `use` raises for a good image; UsageError for content that is none; OSError if the disk fails.
    """
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow refuses twice as many
    try:
        whole = files.open_regular(Path(file), "rb", follow=True) if data is None else io.BytesIO(data)
        with whole as opened, Image.open(opened) as image:
            return use(image)
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # Pillow raises many kinds for bad content, none with a number
        if use is not _decode and not isinstance(error, UsageError):
            read(file, _decode, data)  # raises if the content is at fault
            raise
        number = error.errno if isinstance(error, OSError) else None
        if number in (None, *files.UNFIT) or (number == errno.ENOENT and Path(file).is_symlink()):
            why = "of no kind that is known" if isinstance(error, UnidentifiedImageError) else error
            raise UsageError(f"{file}: not a readable image ({why}): fix it; a new run can -skip_bad_files") from None
        raise


def view(image: Image.Image, mode: str, size: int, box: Callable[[int, int], Box] | None = None) -> Image.Image:
    """Return the part of an image that `box` gives, upright, `size` pixels wide and high, in 8 bits, on white.

    A JPEG that was not read yet is decoded at 1/2, 1/4 or 1/8 of its size, if the part still has `size` pixels each
    way: a photo of 12 megapixels then takes a third of the time.

    `mode` is "RGB" or "L" (grey); `box` is a function from width and height of the upright image to the part (None:
    the whole). Raises UsageError if the pixels' values have no known range.
    """
    if not isinstance(image, JpegImageFile):
        image.load()  # a TIFF turns itself then, and a PNG's EXIF may follow its pixels
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):  # damaged EXIF, whose pixels may be good
        orientation = None
    width, height = image.size[::-1] if orientation in SIDEWAYS else image.size
    left, top, right, bottom = box(width, height) if box else (0, 0, width, height)
    scale = next((scale for scale in (8, 4, 2) if min(right - left, bottom - top) / size >= scale), 1)
    if image.draft(mode, (image.width // scale, image.height // scale)) is None:
        scale = 1  # no JPEG, or one that was read before
    image.load()
    if orientation:
        image.info.pop("exif", None)  # exif_transpose rewrites it, and it may be damaged
        ImageOps.exif_transpose(image, in_place=True)
    part = (left / scale, top / scale, right / scale, bottom / scale)
    return to_8_bits(image).convert(mode).resize((size, size), Image.Resampling.BILINEAR, part)


def to_8_bits(image: Image.Image) -> Image.Image:
    """Return the image on white, with values from 0 to 255. Raises UsageError if the range of values is unknown."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        values = np.array(image)
        if 0 < values.max() < 4096:
            raise UsageError(f"16 bits that hold 12 bits or fewer, up to {values.max()}: scale them, or save 8 bits")
        values[values == image.info.get("transparency", -1)] = 65535  # white
        if isinstance(image, TiffImageFile) and image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0:
            values = 65535 - values  # 0 is white there; Pillow inverts 8 bits itself
        return Image.fromarray((values // 257).astype(np.uint8))
    if image.mode in ("I", "F", "LAB"):
        raise UsageError(f"mode {image.mode} has no range from black to white: save it as grey or RGB of 8 bits")
    if image.has_transparency_data:  # the colours of transparent pixels are arbitrary
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image
