"""One model on several processes: wrapping, precision, gradient norms, running statistics."""

import contextlib
import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lib.utils import distributed
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def wrap(model: nn.Module, args, world: World) -> nn.Module:
    """The model on its device, under DistributedDataParallel where there are several processes.

    Raises UsageError for -sync_bn on the CPU, which torch does not have.
    """
    if args.sync_bn and world.device.type == "cpu":
        raise UsageError("-sync_bn needs a GPU: torch has no SyncBatchNorm on the CPU")
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(world.device)
    if world.size == 1:
        return model
    ids = None if world.device.type == "cpu" else [world.device.index]
    # RunningStatistics keeps the buffers alike; torch 2.15 has another word for leaving them alone.
    words = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in words else "broadcast_buffers"
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **{buffers: False})


def unwrap(model: nn.Module) -> nn.Module:
    """The module that the user wrote, with its own names."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def set_sync(model: nn.Module, last: bool):
    """Gradients are reduced in the backward pass of a step's last micro-batch only, as under DDP's no_sync."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last


def autocast(args, device: torch.device):
    """The context of the forward pass: mixed precision under -fp16 or -bf16, else nothing."""
    if not (args.fp16 or args.bf16):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if args.fp16 else torch.bfloat16)


def reorders(model: nn.Module, world: World) -> bool:
    """Whether the order in which gradients are summed would settle only after the first backward pass: with three
    ranks or more, DDP rebuilds its buckets then, and a resumed run would differ from one that went through, in the
    last bits."""
    return isinstance(model, DistributedDataParallel) and world.size > 2


class RunningStatistics:
    """Float buffers (BatchNorm's running mean and variance) as a function of the step, not of who saw what.

    Every micro-batch of a step starts from the same buffers, and the step ends with the mean of what the
    micro-batches made of them, weighted by their samples, over all ranks; a step that is skipped leaves them as they
    were. With one micro-batch on one process (`alone`) the mean is what the model did itself.
    """

    def __init__(self, model: nn.Module, world: World, alone: bool):
        saved = unwrap(model).state_dict(keep_vars=True)
        buffers = [b for name, b in unwrap(model).named_buffers() if name in saved]
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
