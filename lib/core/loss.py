"""Losses and the metrics that go with them, chosen by -loss."""

from torch import Tensor, nn


def get_loss(args):
    """A callable (outputs, targets) -> the mean loss over the batch, a scalar."""
    options = {"label_smoothing": args.label_smoothing} if args.loss == "cross_entropy" else {}
    return BY_NAME[args.loss](**options)


def metric_sums(loss, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What a batch adds to each metric beside the loss: sums over its samples, so that shares of any size add up."""
    if isinstance(loss, nn.CrossEntropyLoss) and targets.ndim == 1:
        return {"accuracy": (outputs.detach().argmax(1) == targets).sum()}
    return {}


BY_NAME = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss, "l1": nn.L1Loss, "huber": nn.HuberLoss}
