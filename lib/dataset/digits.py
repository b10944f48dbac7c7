"""The 1,797 handwritten digits that come with Baton: 8x8 grey images in 10 classes."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lib.utils.data.tensors import Tensors
from lib.utils.errors import UsageError, load_optional

TURN, ZOOM, SHEAR, SHIFT = 0.15, 0.1, 0.1, 0.5  # most a training image is changed: radians, share, share, pixels


def add_args(parser):
    parser.set_defaults(num_classes=10, channels=1, image_size=8, arch="convnet", epochs=30, batch_size=64)
    parser.set_defaults(lr_start=3e-3, lr_warmup=1.0, weight_decay=0.05, label_smoothing=0.1)


def get_dataset(args) -> dict[str, Tensors]:
    """Return 1,259 training, 179 validation and 359 test samples: images (1, 8, 8) from 0 to 1, and labels.

    Training images are turned, zoomed, sheared and shifted a little. Raises UsageError if -data lacks digits.npz.
    """
    file = Path(args.data) / "digits.npz"
    if not file.is_file():
        raise UsageError(f"-data {args.data}: no digits.npz in it; it comes with Baton, in the folder data")
    with np.load(file) as arrays:
        images, labels, split = (arrays[name] for name in ("images", "labels", "split"))
    images = torch.from_numpy(images[:, None] / np.float32(16))
    labels = torch.from_numpy(labels.astype(np.int64))
    rows = {part: torch.from_numpy(np.flatnonzero(split == part)) for part in ("train", "val", "test")}
    return {
        part: Tensors(images[chosen], labels[chosen], on_device=augment if part == "train" and args.augment else None)
        for part, chosen in rows.items()
    }


def get_transform(args):
    """Return a function from an image of a light digit on black to floats (1, 8, 8) from 0 to 1."""
    photos = load_optional("lib.utils.data.photos", "get_transform")  # of predict.py: no start waits for it
    return lambda image: torch.from_numpy(np.array(photos.view(image, "L", 8), np.float32)[None] / 255)


def augment(batch: tuple[Tensor, Tensor], draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch, each image (B, C, H, W) under an affine map close to the identity that its draws decide."""
    images, labels = batch
    turn, zoom_x, zoom_y, shear, *shift = (draws[:, :6] * 2 - 1).T
    cos, sin = (turn * TURN).cos(), (turn * TURN).sin()
    zoom_x, zoom_y = (zoom_x * ZOOM).exp(), (zoom_y * ZOOM).exp()
    shift_x, shift_y = (2 * SHIFT / images.shape[-1] * part for part in shift)  # the image spans -1 to 1
    rows = [cos * zoom_x, shear * SHEAR - sin * zoom_x, shift_x, sin * zoom_y, cos * zoom_y, shift_y]
    grid = functional.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False), labels
