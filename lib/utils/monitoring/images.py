"""Images for TensorBoard (height, width, 3) of uint8: samples with the model's answers, a confusion matrix."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.distributed import World

SAMPLES, ACROSS = 16, 4  # that are shown, and in a row
TILE, COLUMN, ROW = 84, 87, 110  # pixels: a sample's width and height, and with two lines of text below it
MAX_CLASSES, MAX_NUMBERED = 100, 30  # of a confusion matrix, and of one with a number in each cell
CELL, MARGIN = 24, 60  # pixels: a cell's width and height, and the room for names


class Predictions:
    """Collect what a classifier with cross-entropy and at most 100 classes answers in an evaluation.

    That is the confusion matrix and the first samples. A class without a name is called by its number.
    """

    def __init__(self, loss: nn.Module, classes: int, names: Sequence[str] | None, world: World):
        self.classes = classes if isinstance(loss, nn.CrossEntropyLoss) and classes <= MAX_CLASSES else 0
        self.world = world
        self.names = [*map(str, names or ()), *map(str, range(len(names or ()), self.classes))]
        self.reset()

    def reset(self) -> None:
        """Forget everything, for the next evaluation."""
        self.samples: list[Tensor] | None = None  # this rank's first inputs, targets and answers, of images
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=self.world.device)

    def add(self, inputs: Any, targets: Any, outputs: Any, count: int) -> None:
        """Add a batch with the model's outputs (B, classes). Does not wait for the device."""
        if not (count and isinstance(targets, Tensor) and isinstance(outputs, Tensor)):
            return
        if targets.ndim != 1 or targets.is_floating_point() or outputs.shape != (len(targets), self.classes):
            return
        answers, targets = outputs.detach().argmax(1), targets.long()  # uint8 has no room for class times classes
        if self.samples is None and isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            self.samples = [part[:SAMPLES].clone() for part in (inputs, targets, answers)]
        counted = (targets >= 0) & (targets < self.classes)  # the loss ignores others, as -100 and 255
        place = targets.clamp(0, self.classes - 1) * self.classes + answers
        self.counts.view(-1).index_add_(0, place, counted.long())

    def figures(self) -> dict[str, float]:
        """Return the macro F1 of all ranks' answers, or nothing if there are none. Every rank calls this once.

        A class that is neither a target nor an answer does not count. `counts` are then those of all ranks.
        """
        if not self.classes:
            return {}
        mine = distributed.gather(self.counts.tolist(), self.world)
        self.counts = torch.tensor(mine).sum(0)
        counts = self.counts.double()
        both = counts.sum(0) + counts.sum(1)
        return {"f1": (2 * counts.diag() / both)[both > 0].mean().item()} if both.any() else {}

    def draw(self) -> dict[str, np.ndarray]:
        """Return the images by name, after `figures`."""
        if not self.counts.any():
            return {}
        pictures = {"confusion": confusion_matrix(self.counts.cpu(), self.names)}
        if self.samples is not None:
            inputs, targets, answers = self.samples
            pictures["answers"] = image_grid(inputs, [*map(self._caption, targets.tolist(), answers.tolist())])
        return pictures

    def _caption(self, target: int, answer: int) -> str:
        wrong = answer != target and 0 <= target < self.classes
        return f"{self.names[answer]}\nnot {self.names[target]}" if wrong else self.names[answer]


def image_grid(images: Tensor, captions: Sequence[str]) -> np.ndarray:
    """Put the first 16 images (B, C, H, W) of any range into one, each above its caption."""
    images = images[:SAMPLES].float().cpu().nan_to_num()
    low, high = images.aminmax()
    pixels = ((images - low) / (high - low).clamp_min(1e-12) * 255).byte()
    pixels = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    sheet = Image.new("RGB", (ACROSS * COLUMN, math.ceil(len(pixels) / ACROSS) * ROW), "white")
    for number, (image, caption) in enumerate(zip(pixels, captions)):
        left, top = number % ACROSS * COLUMN, number // ACROSS * ROW
        sheet.paste(Image.fromarray(image).resize((TILE, TILE), Image.Resampling.BOX), (left, top))
        ImageDraw.Draw(sheet).text((left, top + TILE), caption, fill="black")
    return np.array(sheet)


def confusion_matrix(counts: Tensor, names: Sequence[str]) -> np.ndarray:
    """Draw counts (class, answer): a row for each class, dark at its answers. The diagonal is right.

    The columns have the order of the rows, whose names are at the left.
    """
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    side = CELL * len(counts)
    shades = Image.fromarray((255 * (1 - shares)).byte().numpy()).resize((side, side), Image.Resampling.BOX)
    image = ImageOps.expand(shades, (MARGIN, 0, 0, 0), fill=255)
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        draw.text((MARGIN - 4, CELL * (row + 0.5)), name[:10], fill=0, anchor="rm")
    for row, column in counts.nonzero().tolist() if len(counts) <= MAX_NUMBERED else ():
        middle = MARGIN + CELL * (column + 0.5), CELL * (row + 0.5)
        shade = 255 if shares[row, column] > 0.5 else 0
        draw.text(middle, str(counts[row, column].item()), fill=shade, anchor="mm")
    return np.array(image.convert("RGB"))
