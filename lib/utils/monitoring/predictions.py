"""What a classifier answers in an evaluation, counted: a confusion matrix, and its macro F1."""

from typing import Any

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.distributed import World

MAX_CLASSES = 100  # of a confusion matrix


class Predictions:
    """Count what a classifier with cross-entropy and at most 100 classes answers in an evaluation."""

    def __init__(self, loss: nn.Module, classes: int, world: World):
        self.classes = classes if isinstance(loss, nn.CrossEntropyLoss) and classes <= MAX_CLASSES else 0
        self.ignored, self.world = getattr(loss, "ignore_index", -100), world
        self.reset()

    def reset(self) -> None:
        """Forget everything, for the next evaluation."""
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=self.world.device)

    def add(self, targets: Any, outputs: Any, count: Any) -> None:
        """Add a batch with the model's outputs (B, classes). Does not wait for the device."""
        if not (isinstance(targets, Tensor) and isinstance(outputs, Tensor)):
            return
        if targets.ndim != 1 or targets.is_floating_point() or outputs.shape != (len(targets), self.classes):
            return
        answers, targets = outputs.detach().argmax(1), targets.long()  # uint8 has no room for class times classes
        # The loss ignores others, as -100 and 255. A batch of padding has the count 0.
        counted = (targets >= 0) & (targets < self.classes) & (targets != self.ignored) & (count > 0)
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
