"""Images for TensorBoard, legible at 350 pixels: samples, samples with the model's answers, a confusion matrix.

Each is a tensor (3, height, width) of uint8.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.distributed import World

EPOCHS = 10  # from one picture to the next, as drawing takes as long as a small evaluation
SAMPLES, ACROSS = 16, 4  # that are shown, and in a row
TILE, GAP, CAPTION = 84, 3, 26  # pixels: a sample's width, the space around it, two lines of text below it
MAX_CLASSES = 100  # of a confusion matrix
NAMES_FROM, NUMBERS_FROM = 10, 24  # pixels of a class in it, to have room for its name, and for its numbers
DARK_BLUE = (8, 48, 107)


def due(epoch: int, epochs: int) -> bool:
    """Return whether the answers after this epoch are drawn: after the first, every tenth, and the last."""
    return epoch == 1 or epoch % EPOCHS == 0 or epoch == epochs


class Answers:
    """Collect what a classifier answers in an evaluation: the confusion matrix and the first samples.

    Nothing is collected for another loss than cross-entropy, or for more than 100 classes. A class without a name is
    called by its number.
    """

    def __init__(self, loss: nn.Module, classes: int, names: Sequence[str] | None, world: World):
        self.on = isinstance(loss, nn.CrossEntropyLoss) and classes <= MAX_CLASSES
        self.classes, self.world = classes if self.on else 0, world
        self.names = [*map(str, names or ()), *map(str, range(len(names or ()), self.classes))]
        self.reset(wanted=True)

    def reset(self, wanted: bool) -> None:
        """Forget everything, for the next evaluation; whether its pictures are `wanted`, all ranks know alike."""
        self.wanted = wanted
        self.samples: list[Tensor] | None = None  # this rank's first inputs, targets and answers, of images
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=self.world.device)

    def add(self, inputs: Any, targets: Any, outputs: Any, count: int) -> None:
        """Add a batch with the model's outputs (B, classes). Does not wait for the device."""
        if not (self.on and count and isinstance(targets, Tensor) and isinstance(outputs, Tensor)):
            return
        one_class_each = targets.ndim == 1 and not targets.is_floating_point()
        if not one_class_each or outputs.shape != (len(targets), self.classes):
            return
        answers = outputs.detach().argmax(1)
        if self.wanted and self.samples is None and is_picture(inputs):
            self.samples = [part[:SAMPLES].clone() for part in (inputs, targets, answers)]
        counted = (targets >= 0) & (targets < self.classes)  # the loss ignores others, as -100 and 255
        place = targets.clamp(0, self.classes - 1) * self.classes + answers
        self.counts.view(-1).index_add_(0, place, counted.long())

    def figures(self) -> dict[str, float]:
        """Return the macro F1 over the answers of all ranks, or nothing if none were counted.

        A class that is neither a target nor an answer does not count. Every rank calls this once in an evaluation;
        `counts` are then those of all ranks.
        """
        if not self.on:
            return {}
        total = distributed.merged(self.counts.tolist(), lambda *two: torch.tensor(two).sum(0).tolist(), self.world)
        self.counts = torch.tensor(total)
        counts = self.counts.double()
        both = counts.sum(0) + counts.sum(1)
        return {"f1": (2 * counts.diag() / both)[both > 0].mean().item()} if both.any() else {}

    def draw(self) -> dict[str, Tensor]:
        """Return the images by name, on rank 0, after `figures`."""
        counts = self.counts.cpu()
        if not (self.wanted and self.world.is_main and counts.any()):
            return {}
        pictures = {"confusion": confusion(counts, self.names)}
        if self.samples is not None:
            inputs, targets, answers = self.samples
            pairs = zip(targets.tolist(), answers.tolist(), strict=True)
            pictures["answers"] = tiles(inputs, [self._caption(target, answer) for target, answer in pairs])
        return pictures

    def _caption(self, target: int, answer: int) -> tuple[str, str]:
        if answer == target or not 0 <= target < self.classes:
            return self.names[answer], "green" if answer == target else "black"
        return f"{self.names[answer]}\nnot {self.names[target]}", "red"


def is_picture(images: Any) -> bool:
    """Return whether these are images that can be shown: a tensor (B, C, H, W) with 1 or 3 channels."""
    return isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3) and len(images) > 0


def tiles(images: Tensor, captions: Sequence[tuple[str, str]] = ()) -> Tensor:
    """Put the first 16 images (B, C, H, W) of any range into one, each above its caption: a text and its color."""
    images = images[:SAMPLES].detach().float().cpu().nan_to_num()
    low, high = images.aminmax()
    pixels = ((images - low) / (high - low).clamp_min(1e-12) * 255).byte()
    pixels = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    height = max(1, TILE * pixels.shape[1] // pixels.shape[2])
    column, row = TILE + GAP, height + GAP + (CAPTION if captions else 0)
    sheet = Image.new("RGB", (GAP + ACROSS * column, GAP + math.ceil(len(pixels) / ACROSS) * row), "white")
    for number, image in enumerate(pixels):
        left, top = GAP + number % ACROSS * column, GAP + number // ACROSS * row
        sheet.paste(Image.fromarray(image).resize((TILE, height), Image.Resampling.BOX), (left, top))
        if captions:
            text, color = captions[number]
            ImageDraw.Draw(sheet).text((left, top + height), text, fill=color)
    return _tensor(sheet)


def confusion(counts: Tensor, names: Sequence[str]) -> Tensor:
    """Draw counts (class, answer): a row for each class, dark at its answers. The diagonal is right."""
    classes = len(counts)
    cell, margin = max(3, 290 // classes), 60
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    shades = (255 - shares[..., None] * (255 - np.array(DARK_BLUE))).round().astype(np.uint8)
    image = Image.new("RGB", (margin + cell * classes, margin + cell * classes), "white")
    image.paste(Image.fromarray(shades.repeat(cell, 0).repeat(cell, 1)), (margin, margin))
    draw = ImageDraw.Draw(image)
    draw.text((2, 2), "class \\ answer", fill="black")
    middles = [margin + (number + 0.5) * cell for number in range(classes)]
    for name, middle in zip(names, middles) if cell >= NAMES_FROM else ():
        draw.text((margin - 4, middle), name[:10], fill="black", anchor="rm")
        if cell >= NUMBERS_FROM:
            draw.text((middle, margin - 8), name[: cell // 6], fill="black", anchor="mm")
    for row, column in np.argwhere(counts.numpy()) if cell >= NUMBERS_FROM else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        draw.text((middles[column], middles[row]), str(int(counts[row, column])), fill=color, anchor="mm")
    return _tensor(image)


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
