"""How a run's dataset prepares images: found by trying its get_transform, and done inside of an exported model."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor, nn

from lib.config import plugins
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

CROPS = (None, 1.0, 7 / 8)  # see Preprocessing
PHOTOS = ((48, 64), (101, 43), (9, 7))  # height and width of images on which get_transform is tried


@dataclass(frozen=True)
class Preprocessing:
    """How get_transform prepares images: a square in the centre is resized, and normalized.

    `crop`: the square's side, as a share of the image's shorter side. None: the whole image is stretched to a square.
    `upright`: before that, an image is turned upright by its EXIF, as phones need it.
    """

    pixels: Pixels
    crop: float | None
    upright: bool


def find(args, pixels: Pixels | None) -> Preprocessing | None:
    """Return what gives the same as the dataset's get_transform, to one level of 256. None: nothing known does.

    Without `pixels` the normalization is that of a black and a white image. Raises UsageError if get_transform fails.
    """
    dataset = plugins.load("dataset", args.dataset)
    if not hasattr(dataset, "get_transform") or args.channels not in (1, 3):
        return None
    draw = np.random.default_rng(0)
    photos = [draw.integers(256, size=(*size, args.channels), dtype=np.uint8) for size in PHOTOS]
    plain = [np.full_like(photos[0], value) for value in (0, 255)]
    upright, turned = Image.fromarray(np.rot90(photos[0], -1).squeeze()), Image.fromarray(photos[0].squeeze())
    turned.getexif()[ExifTags.Base.Orientation] = 6  # to be turned clockwise
    try:
        transform = dataset.get_transform(args)
        black, white, *wanted = [transform(Image.fromarray(one.squeeze())) for one in (*plain, *photos)]
        upright, turned = transform(upright), transform(turned)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"get_transform of lib/dataset/{args.dataset}.py fails: {reason}") from error
    shape = (args.channels, args.image_size, args.image_size)
    if not all(isinstance(one, Tensor) and one.shape == shape for one in (black, white, *wanted)):
        return None
    if not pixels:
        first, last = black.double().mean((1, 2)), white.double().mean((1, 2))
        mean, deviation = (-first / (last - first)).tolist(), (1 / (last - first)).tolist()
        pixels = Pixels(*(tuple(round(one, 6) + 0.0 for one in values) for values in (mean, deviation)))
    level = 1.01 / (255 * min(map(abs, pixels.deviation)))
    images = [torch.from_numpy(one).permute(2, 0, 1)[None] for one in photos]
    for crop in CROPS:
        ours = [pixels.normalize(resize(one, crop, args.image_size))[0] for one in images]
        if all(torch.allclose(one, other.float(), rtol=0, atol=level) for one, other in zip(ours, wanted)):
            return Preprocessing(pixels, crop, torch.equal(upright, turned))
    return None


class FromBytes(nn.Module):
    """A model that takes images (B, C, height, width) of bytes; with `resizing` of any height and width."""

    def __init__(self, model: nn.Module, pixels: Pixels, resizing: Preprocessing | None, size: int):
        super().__init__()
        self.model, self.pixels, self.resizing, self.size = model, pixels, resizing, size

    def forward(self, images):
        if self.resizing:
            images = resize(images, self.resizing.crop, self.size)
        return self.model(self.pixels.normalize(images))


def resize(images: Tensor, crop: float | None, size: int) -> Tensor:
    """Return images (B, C, height, width) as floats (B, C, size, size), as photos.view does but for its rounding."""
    kind = {"dtype": torch.float64, "device": images.device}
    rows, columns = (torch.arange(length, **kind) + 0.5 for length in images.shape[2:])
    height, width = rows[-1] + 0.5, columns[-1] + 0.5
    side = torch.minimum(height, width) * (crop or 1)
    down = filter_weights(rows, height, side if crop else height, size)
    across = filter_weights(columns, width, side if crop else width, size)
    return down @ (images.float() @ across.T)


def filter_weights(places: Tensor, length: Tensor, side: Tensor, size: int) -> Tensor:
    """Return the weights (size, length) of Pillow's bilinear filter, for a side in the centre of all places."""
    scale = side / size
    centres = (length - side) / 2 + (torch.arange(size, device=places.device) + 0.5) * scale
    weights = (1 - (places - centres[:, None]).abs() / scale.clamp(min=1)).clamp(min=0)
    return (weights / weights.sum(1, keepdim=True)).float()
