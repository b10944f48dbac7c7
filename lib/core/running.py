"""What a model counts as it goes (BatchNorm's running statistics), as exact as its weights."""

import torch
from torch import nn

from lib.core import parallel
from lib.utils import distributed
from lib.utils.distributed import World


class Statistics:
    """Float buffers (BatchNorm's running mean and variance) as a function of the step, not of who saw what.

    Every micro-batch of a step starts from the same buffers, and the step ends with the mean of what the
    micro-batches made of them, weighted by their samples, over all ranks; a step that is skipped leaves them as they
    were. With one micro-batch on one process (`alone`) the mean is what the model did itself.
    """

    def __init__(self, model: nn.Module, world: World, alone: bool):
        saved = parallel.unwrap(model).state_dict(keep_vars=True)
        buffers = [b for name, b in parallel.unwrap(model).named_buffers() if name in saved]
        self.floats = [b for b in buffers if b.is_floating_point()]
        self.buffers = self.floats + [b for b in buffers if not b.is_floating_point()]
        self.world, self.on, self.alone = world, bool(self.floats), alone
        if self.on:
            sizes = [b.numel() for b in self.floats]
            self.total, self.first = (torch.zeros(sum(sizes), device=self.floats[0].device) for _ in range(2))
            self.parts = [v.view_as(b) for v, b in zip(self.total.split(sizes), self.floats, strict=True)]
            self.start = [v.view_as(b) for v, b in zip(self.first.split(sizes), self.floats, strict=True)]
            self.start += [b.clone() for b in self.buffers[len(self.floats) :]]

    def before(self, first: bool):
        """Before a micro-batch; `first`: of this rank's in the step."""
        if self.on and first:
            self._copy(self.start, self.buffers)
            self.total.zero_()
        elif self.on:
            self._copy(self.buffers, self.start)

    def after(self, weight: float):
        """After a micro-batch that holds `weight` of the step's samples, over all ranks."""
        if self.on and not self.alone:
            with torch.no_grad():
                torch._foreach_add_(self.parts, self.floats, alpha=weight)

    def settle(self, norm: torch.Tensor):
        """At the end of a step whose gradient has this norm."""
        if not self.on:
            return
        if self.alone:
            self._copy(self.parts, self.floats)
        else:
            distributed.sum_(self.total, self.world)
        good = torch.isfinite(norm)
        torch.where(good, self.total, self.first, out=self.total)
        self._copy(self.floats, self.parts)
        for count, before in zip(self.buffers[len(self.floats) :], self.start[len(self.floats) :], strict=True):
            torch.where(good, count, before, out=count)

    def restore(self):
        """As it was before the step."""
        if self.on:
            self._copy(self.buffers, self.start)

    @torch.no_grad()
    def _copy(self, to, source):
        torch._foreach_copy_(to, source)
