"""Losses and the metrics that go with them, chosen by -loss."""

import functools
import math

from torch import Tensor, nn
from torch.nn import functional

from lib.utils.errors import UsageError


def get_loss(args):
    """Return a callable (outputs, targets) -> the mean loss over the batch, a scalar."""
    options = {"label_smoothing": args.label_smoothing} if args.loss == "cross_entropy" else {}
    return BY_NAME[args.loss](**options)


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's, which also takes classes in the last dimension: outputs (B, length, classes), targets (B, length)."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if _classes_last(outputs, targets):
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return super().forward(outputs, targets)


def _classes_last(outputs, targets) -> bool:
    """Whether the classes are in the last dimension. Where both readings fit, (B, C, C) is a row of C places and
    (B, C, C, C) an image, classes first as torch has them."""
    fits = outputs.shape[:-1] == targets.shape
    return fits and (outputs.ndim < 4 or outputs.shape[:1] + outputs.shape[2:] != targets.shape)


class SameShape(nn.Module):
    """A loss of torch's that refuses outputs and targets of different shapes; torch would stretch one of them."""

    def __init__(self, loss: type[nn.Module]):
        super().__init__()
        self.loss = loss()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            raise UsageError(f"the model gives {tuple(outputs.shape)} and the targets are {tuple(targets.shape)}: "
                             "this -loss needs the same shape")  # fmt: skip
        return self.loss(outputs, targets)


def metric_sums(loss, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return what a batch adds to each metric but the loss: sums over its samples, so that shares of any size add up.

    One class a sample: accuracy. A class at each place (tokens; a byte is one of 256): bits_per_byte, the mean over
    a sample's places of the code length in bits, without label smoothing.
    """
    if not isinstance(loss, CrossEntropy) or not _classes_last(outputs, targets):
        return {}
    if targets.ndim == 1:
        return {"accuracy": (outputs.detach().argmax(1) == targets).sum()}
    nats = functional.cross_entropy(outputs.detach().flatten(0, -2).float(), targets.flatten())
    return {"bits_per_byte": nats * (len(targets) / math.log(2))}


def checked(loss, trainer: str) -> Tensor:
    """Return what a training_step returned. Raises UsageError unless it is a 0-d tensor that leads to a gradient."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        kind = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            kind = f"a tensor of shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}"
        raise UsageError(f"-trainer {trainer}: training_step returns {kind}; it must return the mean loss, a 0-d "
                         "tensor ready for backward")  # fmt: skip
    return loss


BY_NAME = {
    "cross_entropy": CrossEntropy,
    "mse": functools.partial(SameShape, nn.MSELoss),
    "l1": functools.partial(SameShape, nn.L1Loss),
    "huber": functools.partial(SameShape, nn.HuberLoss),
}
