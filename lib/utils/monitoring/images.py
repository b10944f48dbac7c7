"""Pictures for TensorBoard: samples, samples with a model's answers, and which classes it takes for which.

A picture is a tensor (C, height, width) of uint8, C being 1 or 3."""

import logging
import math

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.distributed import World

log = logging.getLogger(__name__)
SHOWN = 16  # samples with their answers
MOST_CLASSES, MOST_TOLD = 100, 20  # of a confusion matrix; with its numbers written into it
RIGHT, WRONG, INK, PAPER, DARK = (0, 128, 0), (200, 0, 0), (0, 0, 0), (255, 255, 255), (8, 48, 107)


class Answers:
    """What a classifier answers in an evaluation: how often which class was taken for which, and the first samples.

    Of another loss than cross-entropy, or more than 100 classes, nothing is kept. A class without a name is called
    by its number.
    """

    def __init__(self, loss, classes: int, names: list[str] | None, world: World):
        self.on = isinstance(loss, nn.CrossEntropyLoss) and classes <= MOST_CLASSES
        self.classes, self.world = classes, world
        known = names if isinstance(names, (list, tuple)) else []
        self.names = [str(name) for name in (*known[:classes], *range(len(known), classes))]
        self.reset()

    def reset(self):
        """Forgets all: for the next evaluation."""
        self.first = None  # this rank's first samples, where they are images: inputs, targets, answers
        self.counts = torch.zeros(self.classes if self.on else 0, self.classes, dtype=torch.int64)
        self.counts = self.counts.to(self.world.device)

    def add(self, inputs, targets: Tensor, outputs: Tensor, count: int):
        """Takes in a batch with the model's outputs (B, classes); nothing waits for the device."""
        alike = isinstance(targets, Tensor) and targets.ndim == 1 and isinstance(outputs, Tensor)
        if not (self.on and count and alike and outputs.shape == (len(targets), self.classes)):
            return
        answers = outputs.detach().argmax(1)
        if self.first is None and is_picture(inputs):
            self.first = tuple(part[:SHOWN].clone() for part in (inputs, targets, answers))  # not all of the batch
        at = targets.clamp_min(0) * self.classes + answers  # below 0: not to be counted (ignore_index)
        self.counts.view(-1).index_add_(0, at, (targets >= 0).long())

    def shown(self) -> dict[str, Tensor]:
        """The pictures, by name, of the samples of all ranks, which all must call this."""
        if not self.on:
            return {}
        counts = distributed.sum_(self.counts, self.world).cpu()
        if not (self.world.is_main and counts.any()):
            return {}
        try:
            return self._drawn(counts)
        except Exception as error:  # what names and pixels may do to a drawing, nobody lists: no run ends of it
            log.warning("no pictures of the answers (%s: %s)", type(error).__name__, error)
            return {}

    def _drawn(self, counts):
        there = {"confusion": confusion(counts, self.names)}
        if self.first is None:
            return there
        inputs, targets, answers = self.first
        return {**there, "answers": answered(inputs, targets.tolist(), answers.tolist(), self.names)}


def is_picture(images) -> bool:
    """Whether these are images that can be drawn: a tensor (B, C, H, W) with 1 or 3 channels."""
    return isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3) and len(images) > 0


def grid(images: Tensor) -> Tensor:
    """Up to 64 images (B, C, H, W) of any range as one picture, as square as can be."""
    return _square(_bytes(images[:64]), padding=1)


def answered(images: Tensor, targets: list[int], answers: list[int], names: list[str]) -> Tensor:
    """Images (B, C, H, W) of any range as one picture: under each the answer, in red beside what would be right."""
    pixels = _bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    larger = max(1, math.ceil(64 / max(pixels.shape[1:3])))
    height, width = pixels.shape[1] * larger, pixels.shape[2] * larger
    tiles = []
    for image, target, answer in zip(pixels, targets, answers):
        tile = Image.new("RGB", (width, height + 14), PAPER)
        tile.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST))
        right = answer == target
        text = names[answer] if right or target < 0 else f"{names[answer]} not {names[target]}"
        ImageDraw.Draw(tile).text((2, height + 1), text, fill=RIGHT if right else WRONG)
        tiles.append(_picture(tile))
    return _square(torch.stack(tiles), padding=2, pad_value=255)


def _square(tiles, **words):
    from torchvision.utils import make_grid  # half a second, which no first step should wait for

    return make_grid(tiles, nrow=math.ceil(math.sqrt(len(tiles))), **words)


def confusion(counts: Tensor, names: list[str]) -> Tensor:
    """Counts (class, answer) as a picture: a row for each class, dark where its samples end up. In the diagonal is
    what is right."""
    classes = len(counts)
    told = classes <= MOST_TOLD
    size, margin = (34, 60) if told else (max(4, 600 // classes), 16)
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    shades = (255 - shares[..., None] * (255 - np.array(DARK))).round().astype(np.uint8)
    image = Image.new("RGB", (margin + size * classes, margin + size * classes), PAPER)
    image.paste(Image.fromarray(shades.repeat(size, 0).repeat(size, 1)), (margin, margin))
    draw = ImageDraw.Draw(image)
    draw.text((2, 2), "class \\ answer", fill=INK)
    for row, column in np.argwhere(counts.numpy()) if told else ():
        middle = [margin + (at + 0.5) * size for at in (column, row)]
        draw.text(
            middle, str(int(counts[row, column])), fill=PAPER if shares[row, column] > 0.5 else INK, anchor="mm"
        )
    for at, name in enumerate(names if told else ()):
        middle = margin + (at + 0.5) * size
        draw.text((margin - 4, middle), name[:8], fill=INK, anchor="rm")
        draw.text((middle, margin - 8), name[:5], fill=INK, anchor="mm")
    return _picture(image)


def _bytes(images):
    images = images.detach().float().cpu().nan_to_num()
    low, high = images.aminmax()
    return ((images - low) / (high - low).clamp_min(1e-12) * 255).byte()


def _picture(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
