"""Images for TensorBoard, legible at 350 pixels: samples, samples with the model's answers, a confusion matrix.

Each is an array (height, width, 3) of uint8.
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
TILE, COLUMN, ROW = 84, 87, 110  # pixels: a sample's width and height, and with two lines of text below it
MAX_CLASSES = 100  # of a confusion matrix


def is_due(epoch: int, epochs: int) -> bool:
    """Return whether the answers after this epoch are drawn: after the first, every tenth, and the last."""
    return epoch == 1 or epoch % EPOCHS == 0 or epoch == epochs


class Predictions:
    """Collect what a classifier answers in an evaluation: the confusion matrix and the first samples.

    Nothing is collected for another loss than cross-entropy, or for more than 100 classes. A class without a name is
    called by its number.
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
        answers = outputs.detach().argmax(1)
        if self.samples is None and is_image_batch(inputs):
            self.samples = [part[:SAMPLES].clone() for part in (inputs, targets, answers)]
        counted = (targets >= 0) & (targets < self.classes)  # the loss ignores others, as -100 and 255
        place = targets.long().clamp(0, self.classes - 1) * self.classes + answers  # uint8 has no room for it
        self.counts.view(-1).index_add_(0, place, counted.long())

    def figures(self) -> dict[str, float]:
        """Return the macro F1 over the answers of all ranks, or nothing if none were counted.

        A class that is neither a target nor an answer does not count. Every rank calls this once in an evaluation;
        `counts` are then those of all ranks.
        """
        if not self.classes:
            return {}
        total = distributed.reduce_json(
            self.counts.tolist(), lambda *two: torch.tensor(two).sum(0).tolist(), self.world
        )
        self.counts = torch.tensor(total)
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


def is_image_batch(images: Any) -> bool:
    """Return whether these are images that can be shown: a tensor (B, C, H, W) with 1 or 3 channels."""
    return isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3) and len(images) > 0


def image_grid(images: Tensor, captions: Sequence[str] = ("",) * SAMPLES) -> np.ndarray:
    """Put the first 16 images (B, C, H, W) of any range into one, each above its caption."""
    images = images[:SAMPLES].detach().float().cpu().nan_to_num()
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
    """Draw counts (class, answer): a row for each class, dark at its answers. The diagonal is right."""
    classes, margin = len(counts), 60
    cell = max(3, 290 // classes)  # pixels: names need 10, numbers 24
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    side = cell * classes
    shades = Image.fromarray((255 * (1 - shares)).byte().numpy()).resize((side, side), Image.Resampling.BOX)
    image = Image.new("RGB", (margin + side, margin + side), "white")
    image.paste(shades, (margin, margin))
    draw = ImageDraw.Draw(image)
    draw.text((2, 2), "class \\ answer", fill="black")
    middles = [margin + (number + 0.5) * cell for number in range(classes)]
    for name, middle in zip(names, middles) if cell >= 10 else ():
        draw.text((margin - 4, middle), name[:10], fill="black", anchor="rm")
        draw.text((middle, margin - 8), name[: cell // 6], fill="black", anchor="mm")
    for row, column in counts.nonzero().tolist() if cell >= 24 else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        draw.text((middles[column], middles[row]), str(counts[row, column].item()), fill=color, anchor="mm")
    return np.array(image)
