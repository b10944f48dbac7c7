"""What a model counts as it goes (BatchNorm's running statistics), as exact as its weights."""

import torch
from torch import nn

from lib.utils import distributed
from lib.utils.checkpoint.state import unwrap
from lib.utils.distributed import World


class Statistics:
    """Float buffers (BatchNorm's running mean and variance) as a function of the step, not of who saw what.

    Every micro-batch of a step starts from the same buffers. The step ends with the mean of what the micro-batches
    made of them, weighted by their samples, over all ranks. A value that no micro-batch changed stays as it is, to
    the bit. A step that is skipped leaves all of them as they were. With one micro-batch on one process (`alone`) the
    mean is what the model did itself. Counts (BatchNorm's num_batches_tracked) are what the last micro-batch made of
    them.
    """

    def __init__(self, model: nn.Module, world: World, alone: bool):
        model = unwrap(model)
        saved, by_dtype = model.state_dict(keep_vars=True), {}
        for name, buffer in model.named_buffers():
            if name in saved:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self.on = any(dtype.is_floating_point for dtype in by_dtype)
        self.world, self.alone = world, alone
        self.kinds = [_Kind(buffers) for buffers in by_dtype.values()] if self.on else []

    @torch.no_grad()
    def before(self, first: bool):
        """Before a micro-batch; `first`: of this rank's in the step."""
        for kind in self.kinds:
            if first:
                torch._foreach_copy_(kind.at_start, kind.buffers)
                kind.sums.zero_()
            else:
                torch._foreach_copy_(kind.buffers, kind.at_start)

    @torch.no_grad()
    def after(self, weight: float):
        """After a micro-batch that holds `weight` of the step's samples, over all ranks; 0 for a borrowed one."""
        if self.alone or not weight:  # 0 times infinity would be NaN
            return
        for kind in self.kinds:
            if kind.averaged:
                torch._foreach_copy_(kind.at_end, kind.buffers)
                kind.total.add_(kind.end, alpha=weight)
                kind.changes.add_(kind.end != kind.start)

    @torch.no_grad()
    def reduce(self) -> torch.Tensor | None:
        """Averages over all ranks when the step's micro-batches are done. Returns whether a value that was finite no
        longer is, a 0-d tensor, the same on all ranks; None for a model without float buffers."""
        broken = None
        for kind in self.kinds:
            if not kind.averaged or self.alone:
                torch._foreach_copy_(kind.totals, kind.buffers)
            else:
                distributed.sum_(kind.sums, self.world)
                torch.where(kind.changes > 0, kind.total, kind.start, out=kind.total)
            if kind.averaged:
                here = (torch.isfinite(kind.start) & ~torch.isfinite(kind.total)).any()
                broken = here if broken is None else broken | here
        return broken

    @torch.no_grad()
    def settle(self, norm: torch.Tensor):
        """At the end of a step whose gradient has this norm, after `reduce`."""
        good = torch.isfinite(norm)
        for kind in self.kinds:
            torch.where(good, kind.total, kind.start, out=kind.total)
            torch._foreach_copy_(kind.buffers, kind.totals)

    @torch.no_grad()
    def restore(self):
        """As it was before the step."""
        for kind in self.kinds:
            torch._foreach_copy_(kind.buffers, kind.at_start)


class _Kind:
    """The buffers of one dtype, and room for all their values in one tensor, which a GPU handles at once."""

    def __init__(self, buffers: list[torch.Tensor]):
        first, sizes = buffers[0], [buffer.numel() for buffer in buffers]
        self.buffers, self.averaged = buffers, first.is_floating_point()
        exact = torch.promote_types(first.dtype, torch.float32) if self.averaged else first.dtype

        def room(times=1):
            return torch.zeros(times * sum(sizes), dtype=exact, device=first.device)

        def parts(whole):
            return [part.view_as(buffer) for part, buffer in zip(whole.split(sizes), buffers, strict=True)]

        self.sums = room(2)  # in one tensor for one all-reduce: the weighted sum, and how often each value changed
        self.total, self.changes = self.sums.chunk(2)
        self.start, self.end = room(), room()
        self.totals, self.at_start, self.at_end = parts(self.total), parts(self.start), parts(self.end)
