"""Evaluates and keeps the weights as they were on average over the last steps, not those of the very last one.

Polyak averaging, exponentially weighted (Izmailov et al., arXiv:1803.05407, section 3, compare it with others). An
example of a trainer with a state of its own: the average is an attribute, and so it is in every checkpoint.
"""

import contextlib
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lib.config.types import real
from lib.trainer import trainer
from lib.utils.checkpoint.shards import local
from lib.utils.checkpoint.state import model_tensors, unwrap


def add_args(parser: ArgumentParser) -> None:
    decay = real(0, 1, below=True)
    parser.add_argument("-ema_decay", type=decay, default=0.999, metavar="X", help="share that a step leaves of it")


class Trainer(trainer.Trainer):
    """The usual trainer, whose evaluations, best and final weights are those of the average."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.average = Average(model_tensors(unwrap(self.model)), self.args.ema_decay)

    def step(self, samples: int) -> None:
        super().step(samples)
        self.average.update(model_tensors(unwrap(self.model)))

    def evaluate(self, split: str) -> dict[str, float] | None:
        with self.averaged():
            return super().evaluate(split)

    def whole_weights(self) -> dict[str, Tensor]:
        with self.averaged():
            return super().whole_weights()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averaged weights while the block runs."""
        tensors = model_tensors(unwrap(self.model))
        self.average.swap(tensors)
        try:
            yield
        finally:
            self.average.swap(tensors)


class Average(nn.Module):
    """The exponential moving average of tensors that are given by name; integers are left out.

    A step that was skipped counts like another. While the average is young it is that of few steps: the decay is
    n / (n + 9) after n steps, as long as that is less.
    """

    def __init__(self, tensors: dict[str, Tensor], decay: float):
        super().__init__()
        self.decay, self.held = decay, nn.Module()
        self.names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        for name in self.names:
            self.held.register_buffer(name.replace(".", "/"), tensors[name].detach().clone())

    @torch.no_grad()
    def update(self, tensors: dict[str, Tensor]) -> None:
        """Include the tensors as they are now; the first time the averages become what they are."""
        averages, now = self._local(tensors)
        steps = int(self.steps)
        torch._foreach_lerp_(averages, now, 1 - min(self.decay, steps / (steps + 9)))
        self.steps += 1

    @torch.no_grad()
    def swap(self, tensors: dict[str, Tensor]) -> None:
        """Exchange the values of the tensors and of the averages, unless there was no step yet."""
        for average, tensor in zip(*self._local(tensors), strict=True) if self.steps else ():
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def _local(self, tensors: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and their tensors; of sharded ones, what this rank has."""
        return [local(one) for one in self.held.buffers()], [local(tensors[name]) for name in self.names]
