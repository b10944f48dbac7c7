"""Evaluates and keeps the weights as they were on average over the last steps, not those of the very last one.

Polyak averaging, exponentially weighted (Izmailov et al., arXiv:1803.05407, section 3, compare it with others). An
example of a trainer with a state of its own: the average is an attribute, and so it is in every checkpoint.
"""

import contextlib

import torch
from torch import Tensor, nn

from lib.trainer import trainer
from lib.utils.checkpoint.shards import local
from lib.utils.checkpoint.state import model_tensors, unwrap


def add_args(parser):
    parser.add_argument("-ema_decay", type=share, default=0.999, metavar="X", help="share that a step leaves of it")


def share(text: str) -> float:
    """A number from 0 to below 1."""
    if not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


class Trainer(trainer.Trainer):
    """The usual trainer, whose evaluations, best and final weights are those of the average."""

    def __init__(self, args, world, loaders, model, loss, optimizer, logger):
        super().__init__(args, world, loaders, model, loss, optimizer, logger)
        self.average = Average(model_tensors(unwrap(model)), args.ema_decay)

    def step(self, samples):
        super().step(samples)
        self.average.update(model_tensors(unwrap(self.model)))

    def evaluate(self, split):
        with self.averaged():
            return super().evaluate(split)

    def whole_weights(self):
        with self.averaged():
            return super().whole_weights()

    @contextlib.contextmanager
    def averaged(self):
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
    def update(self, tensors: dict[str, Tensor]):
        """Takes the tensors in as they are now; the first time it becomes what they are."""
        averages, now = self._local(tensors)
        steps = int(self.steps)
        torch._foreach_lerp_(averages, now, 1 - min(self.decay, steps / (steps + 9)))
        self.steps += 1

    @torch.no_grad()
    def swap(self, tensors: dict[str, Tensor]):
        """Gives the tensors the values of the averages, and those theirs; nothing where no step was taken in."""
        for average, tensor in zip(*self._local(tensors), strict=True) if self.steps else ():
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def _local(self, tensors):
        """Yield pairs of an average and its tensor; of sharded ones, what this rank has."""
        return [local(one) for one in self.held.buffers()], [local(tensors[name]) for name in self.names]
