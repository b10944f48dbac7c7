"""Images stay bytes until they are on the device: mirrored and normalized there, in whole batches."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lib.utils.errors import UsageError


@dataclass(frozen=True)
class Pixels:
    """A dataset's `on_device` for uint8 images (B, C, H, W): floats of about mean 0 and deviation 1 in each channel.

    `mean`, `deviation`: of each channel, or of all, for pixels from 0 to 1. `mirror`: half of the images and masks.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    mirror: bool = False

    def __call__(self, batch: tuple, draws: Tensor) -> tuple:
        """Return the batch with its images (B, C, H, W) changed by draws in [0, 1), a row for each image."""
        images, *others = batch
        if (kind := getattr(images, "dtype", type(images))) != torch.uint8:
            raise UsageError(f"on_device takes (uint8 images, ...), not {kind}: the dataset may set it to None")
        if self.mirror:
            rows, sides = draws[:, 2] < 0.5, images.shape[-2:]
            images, *others = tree_map(lambda one: _mirror(one, rows, sides), [*batch])
        return self.normalize(images), *others

    def normalize(self, images: Tensor) -> Tensor:
        """Return uint8 images (..., C, H, W) as floats, not mirrored."""
        scale, shift = _constants(self.mean, self.deviation, images.device)
        return images * scale - shift


def _mirror(one: Any, rows: Tensor, sides: torch.Size) -> Any:  # (B, ..., H, W), and nothing else
    if not isinstance(one, Tensor) or one.ndim < 3 or (len(one), *one.shape[-2:]) != (len(rows), *sides):
        return one
    return torch.where(rows.view(-1, *[1] * (one.ndim - 1)), one.flip(-1), one)


@functools.lru_cache(maxsize=16)
def _constants(mean: tuple, deviation: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * deviations)).to(device), (means / deviations).to(device)
