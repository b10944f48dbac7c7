"""Images stay bytes until they are on the device: shifted, mirrored and normalized there, in whole batches."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Pixels:
    """A dataset's `on_device` for uint8 images (B, C, H, W): floats of about mean 0 and deviation 1 in each channel.

    `mean`, `deviation`: of each channel, or of all, for pixels from 0 to 1. With `pad` each image is shifted by up to
    that many pixels each way, and the gap is black. With `mirror` half of the images are mirrored.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    pad: int = 0
    mirror: bool = False

    def __call__(self, batch: tuple, draws: Tensor) -> tuple:
        """Return the batch with its images (B, C, H, W) changed by draws in [0, 1), a row for each image."""
        images, *others = batch
        if self.pad:
            images = shift(images, draws[:, :2], self.pad)
        if self.mirror:
            images = torch.where((draws[:, 2] < 0.5)[:, None, None, None], images.flip(3), images)
        return self.normalize(images), *others

    def normalize(self, images: Tensor) -> Tensor:
        """Return uint8 images (..., C, H, W) as floats, neither moved nor mirrored."""
        scale, shift = _constants(self.mean, self.deviation, images.device)
        return images * scale - shift


def shift(images: Tensor, draws: Tensor, pad: int) -> Tensor:
    """Return each image moved by -pad to pad pixels down and right, by its two draws (B, 2); the gap is 0."""
    height, width = images.shape[2:]
    padded = functional.pad(images, [pad] * 4)
    views = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2 pad + 1, 2 pad + 1, H, W) without copying
    top, left = (draws * (2 * pad + 1)).long().T
    return views[torch.arange(len(images), device=images.device), :, top, left]


@functools.lru_cache(maxsize=16)
def _constants(mean: tuple, deviation: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * deviations)).to(device), (means / deviations).to(device)
