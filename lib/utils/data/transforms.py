"""Images stay bytes until they are on the device: mirrored and normalized there, in whole batches."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.utils.errors import UsageError


@dataclass(frozen=True)
class Pixels:
    """A dataset's `on_device` for uint8 images (B, C, H, W): floats of about mean 0 and deviation 1 in each channel.

    `mean`, `deviation`: of each channel, or of all, for pixels from 0 to 1. `mirror`: half of the images.
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
            images = torch.where((draws[:, 2] < 0.5)[:, None, None, None], images.flip(3), images)
        return self.normalize(images), *others

    def normalize(self, images: Tensor) -> Tensor:
        """Return uint8 images (..., C, H, W) as floats, not mirrored."""
        scale, shift = _constants(self.mean, self.deviation, images.device)
        return images * scale - shift


@functools.lru_cache(maxsize=16)
def _constants(mean: tuple, deviation: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * deviations)).to(device), (means / deviations).to(device)
