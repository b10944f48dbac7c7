"""Evaluates and keeps the average of the weights over the last steps (EMA), not the weights of the last step.

Polyak averaging, exponentially weighted (see Izmailov et al., arXiv:1803.05407). Checkpoints have the average.
"""

import contextlib
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lib.config import flags
from lib.core.buffers import is_statistic
from lib.trainer import trainer
from lib.utils.checkpoint.shards import local_part
from lib.utils.checkpoint.state import model_tensors


def add_args(parser: ArgumentParser) -> None:
    parser.add_argument("-ema_decay", **flags.BELOW_1, default=0.999, help="weight of the old average")


class Trainer(trainer.Trainer):
    """The usual trainer, whose evaluations, best and final weights are those of the average."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.is_swapped = False  # whether the model has the average
        self.average = nn.Module()  # its parameters are in every checkpoint
        for name, tensor in self.averaged_tensors().items():
            kept = nn.Parameter(tensor.detach().clone(), requires_grad=False)
            self.average.register_parameter(name.replace(".", "/"), kept)

    def optimizer_step(self) -> Tensor:
        """Include the weights after the step, also a skipped one. After n steps the decay is n / (n + 9) at most."""
        norm, done = super().optimizer_step(), self.state.step
        decay = vars(self.args).get("ema_decay", 0.999)  # the file of a subclass may lack the flag
        torch._foreach_lerp_(*self.local_tensors(), 1 - min(decay, done / (done + 9)))
        return norm

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        is_due = not (self.is_swapped or self.is_loaded)  # as around evaluate(), which has such a block itself
        if is_due:
            self.swap()
        try:
            yield
        finally:
            if is_due:
                self.swap(back=True)

    def swap(self, back: bool = False) -> None:
        """Exchange the values of weights and averages; `back`: the last ones first, as some may share memory."""
        self.is_swapped, pairs = not back, [*zip(*self.local_tensors(), strict=True)]
        for average, tensor in reversed(pairs) if back else pairs:
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def local_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and their tensors; of sharded ones, what this rank has."""
        return [*map(local_part, self.average.parameters())], [*map(local_part, self.averaged_tensors().values())]

    def averaged_tensors(self) -> dict[str, Tensor]:
        """Return what is averaged, by name: parameters and running statistics. Other buffers are the model's own."""
        own = model_tensors(self.model).items()
        kept = {name: one for name, one in own if isinstance(one, nn.Parameter) or is_statistic(name)}
        return {name: one for name, one in kept.items() if one.is_floating_point() or one.is_complex()}
