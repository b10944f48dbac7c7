"""Images for TensorBoard: samples, samples with the model's answers, and a confusion matrix.

Each is a tensor (C, height, width) of uint8, with 1 or 3 channels.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

from lib.utils import distributed
from lib.utils.distributed import World

log = logging.getLogger(__name__)
EPOCHS = 10  # from one picture to the next, as drawing takes as long as a small evaluation
SAMPLES = 16  # that are shown with the model's answers
MAX_CLASSES = 100  # of a confusion matrix
MAX_LABELED = 20  # classes of one that has names and numbers in it
GREEN, RED, BLACK, WHITE, DARK_BLUE = (0, 128, 0), (200, 0, 0), (0, 0, 0), (255, 255, 255), (8, 48, 107)


def due(epoch: int, epochs: int) -> bool:
    """Whether the answers after this epoch are drawn: after the first, every tenth, and the last."""
    return epoch == 1 or epoch % EPOCHS == 0 or epoch == epochs


class Answers:
    """Collect what a classifier answers in an evaluation: the confusion matrix, its F1, and the first samples.

    Nothing is collected for another loss than cross-entropy, or for more than 100 classes. A class without a name is
    called by its number.
    """

    def __init__(self, loss, classes: int, names: Sequence[str] | None, world: World):
        self.on = isinstance(loss, nn.CrossEntropyLoss) and classes <= MAX_CLASSES
        self.classes, self.world = classes, world
        named = [str(name) for name in names or ()][:classes]
        self.names = named + [str(number) for number in range(len(named), classes)]
        self.reset(wanted=True)

    def reset(self, wanted: bool):
        """Forget everything, for the next evaluation; whether its pictures are `wanted`, all ranks know alike."""
        self.wanted = wanted
        self.samples = None  # this rank's first inputs, targets and answers, if the inputs are images
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=self.world.device)

    def add(self, inputs, targets, outputs: Tensor | None, count: int):
        """Add a batch with the model's outputs (B, classes). Does not wait for the device."""
        if not (self.on and count and isinstance(targets, Tensor) and isinstance(outputs, Tensor)):
            return
        one_class_each = targets.ndim == 1 and not targets.is_floating_point()
        if not one_class_each or outputs.shape != (len(targets), self.classes):
            return
        answers = outputs.detach().argmax(1)
        if self.wanted and self.samples is None and is_picture(inputs):
            self.samples = [part[:SAMPLES].clone() for part in (inputs, targets, answers)]
        counted = (targets >= 0) & (targets < self.classes)  # others are to be ignored, as -100 and 255
        place = targets.clamp(0, self.classes - 1) * self.classes + answers
        self.counts.view(-1).index_add_(0, place, counted.long())

    def figures(self) -> dict[str, float]:
        """Return the macro F1 over the answers of all ranks, or nothing if none were counted. Every rank calls this.

        A class that is neither a target nor an answer does not count.
        """
        if not self.on:
            return {}
        counts = distributed.sum_(self.counts.clone(), self.world).double().cpu()
        both = counts.sum(0) + counts.sum(1)
        return {"f1": (2 * counts.diag() / both)[both > 0].mean().item()} if both.any() else {}

    def shown(self) -> dict[str, Tensor]:
        """Return the images by name, of the answers of all ranks. Every rank calls this; rank 0 gets the images."""
        if not (self.on and self.wanted):
            return {}
        counts = distributed.sum_(self.counts, self.world).cpu()
        if not self.world.is_main or not counts.any():
            return {}
        try:
            pictures = {"confusion": confusion(counts, self.names)}
            if self.samples is not None:
                inputs, targets, answers = self.samples
                pictures["answers"] = answered(inputs, targets.tolist(), answers.tolist(), self.names)
        except Exception as error:
            log.warning("the model's answers are not drawn (%r)", error)
            return {}
        return pictures


def is_picture(images) -> bool:
    """Whether these are images that can be shown: a tensor (B, C, H, W) with 1 or 3 channels."""
    return isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3) and len(images) > 0


def grid(images: Tensor) -> Tensor:
    """Put up to 64 images (B, C, H, W) of any range into one."""
    return _square(_bytes(images[:64]), padding=1)


def answered(images: Tensor, targets: list[int], answers: list[int], names: list[str]) -> Tensor:
    """Put images (B, C, H, W) of any range into one, each above its answer: green if right, else red."""
    pixels = _bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    scale = max(1, math.ceil(64 / max(pixels.shape[1:3])))
    height, width = pixels.shape[1] * scale, pixels.shape[2] * scale
    tiles = []
    for image, target, answer in zip(pixels, targets, answers):
        tile = Image.new("RGB", (width, height + 14), WHITE)
        tile.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST))
        wrong = answer != target and 0 <= target < len(names)
        text = f"{names[answer]} not {names[target]}" if wrong else names[answer]
        ImageDraw.Draw(tile).text((2, height + 1), text, fill=GREEN if answer == target else RED)
        tiles.append(_tensor(tile))
    return _square(torch.stack(tiles), padding=2, background=255)


def confusion(counts: Tensor, names: list[str]) -> Tensor:
    """Draw counts (class, answer): a row for each class, dark at its answers. The diagonal is right."""
    classes = len(counts)
    labeled = classes <= MAX_LABELED
    cell, margin = (34, 60) if labeled else (max(4, 600 // classes), 16)
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    shades = (255 - shares[..., None] * (255 - np.array(DARK_BLUE))).round().astype(np.uint8)
    image = Image.new("RGB", (margin + cell * classes, margin + cell * classes), WHITE)
    image.paste(Image.fromarray(shades.repeat(cell, 0).repeat(cell, 1)), (margin, margin))
    draw = ImageDraw.Draw(image)
    draw.text((2, 2), "class \\ answer", fill=BLACK)
    if labeled:
        middles = [margin + (number + 0.5) * cell for number in range(classes)]
        for row, column in np.argwhere(counts.numpy()):
            color = WHITE if shares[row, column] > 0.5 else BLACK
            draw.text((middles[column], middles[row]), str(int(counts[row, column])), fill=color, anchor="mm")
        for name, middle in zip(names, middles):
            draw.text((margin - 4, middle), name[:8], fill=BLACK, anchor="rm")
            draw.text((middle, margin - 8), name[:5], fill=BLACK, anchor="mm")
    return _tensor(image)


def _square(tiles, padding, background=0):
    """Put tiles (N, C, height, width) next to each other, row by row."""
    across = math.ceil(math.sqrt(len(tiles)))
    down = math.ceil(len(tiles) / across)
    tiles = functional.pad(tiles, (padding, 0, padding, 0, 0, 0, 0, down * across - len(tiles)), value=background)
    rows = tiles.unflatten(0, (down, across)).permute(2, 0, 3, 1, 4)  # (C, down, height, across, width)
    return functional.pad(rows.flatten(3, 4).flatten(1, 2), (0, padding, 0, padding), value=background)


def _bytes(images):
    images = images.detach().float().cpu().nan_to_num()
    low, high = images.aminmax()
    return ((images - low) / (high - low).clamp_min(1e-12) * 255).byte()


def _tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
