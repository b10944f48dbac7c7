"""Running statistics, as BatchNorm's, that do not depend on which process saw which sample."""

import torch
from torch import nn

from lib.core.reduction import TreeSum
from lib.utils.data.plan import MicroBatch, Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def refuse_single_samples(model: nn.Module, plan: Plan) -> None:
    """Let BatchNorm refuse, in the first pass, a plan with a micro-batch of one sample that it could not train on.

    It needs two values for each channel. A sample has several if it has places, as an image: only a pass shows that.
    """
    if plan.least > 1:
        return
    if plan.micro == 1:
        cause, advice = f"-batch_size {plan.batch} -micro_batch 1", "-micro_batch 2 or more makes larger ones"
    else:
        cause = f"{plan.samples} training samples, -batch_size {plan.batch} -micro_batch {plan.micro}"
        advice = "-drop_last leaves out an epoch's short last batch; another -batch_size cuts otherwise"

    def check(module: nn.Module, inputs: tuple) -> None:
        values = inputs[0]
        if module.training and values.numel() == values.shape[0] * values.shape[1]:
            raise UsageError(f"{cause}: a micro-batch has one sample, and BatchNorm cannot train on one: {advice}")

    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(check)


class RunningStatistics:
    """Float buffers (BatchNorm's running mean and variance) as a function of the step, not of the process.

    Every micro-batch of a step starts from the same buffers. The step ends with the mean of what the micro-batches
    made of them, weighted by their samples, over all ranks. A value that no micro-batch changed stays as it is, to
    the bit. A step that is skipped leaves all of them as they were. With one micro-batch on one process (`alone`) the
    mean is what the model did itself. Counts (BatchNorm's num_batches_tracked) are what the last micro-batch made of
    them.
    """

    def __init__(self, model: nn.Module, world: World, round_robin: bool = False):
        self.world = world
        saved, by_dtype = model.state_dict(keep_vars=True), {}
        for name, buffer in model.named_buffers():
            if name in saved:
                by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())  # the same memory, without a graph
        needed = any(dtype.is_floating_point for dtype in by_dtype)
        self.groups = [_Group(buffers, world, round_robin) for buffers in by_dtype.values()] if needed else []

    def before(self, micro_batch: MicroBatch) -> None:
        """Prepare for a micro-batch."""
        self.alone = self.world.size == micro_batch.step_parts == 1
        for group in self.groups:
            if micro_batch.first:
                torch._foreach_copy_(group.starts, group.buffers)
                group.sum.begin(micro_batch.step_parts)
            else:
                torch._foreach_copy_(group.buffers, group.starts)

    def after(self, micro_batch: MicroBatch) -> None:
        """Add up what the forward pass made of the buffers; nothing of padding.

        This comes before the backward pass, which may compute blocks again (-recompute) and count a batch twice.
        """
        for group in self.groups:
            if self.alone or not group.is_float:
                torch._foreach_copy_(group.totals, group.buffers)
            elif micro_batch.count:
                torch._foreach_copy_(group.totals, group.buffers)
                changes = (group.total != group.start).to(group.total.dtype)
                group.sum.add(
                    micro_batch.number, [group.total * (micro_batch.count / micro_batch.step_samples), changes]
                )

    def finish(self, norm: torch.Tensor) -> None:
        """Average over all ranks at the end of a step. If the norm of its gradient is not finite, it is skipped."""
        for group in self.groups:
            if group.is_float and not self.alone:
                total, changes = group.sum.result()
                torch.where(changes > 0, total, group.start, out=group.total)
            torch.where(torch.isfinite(norm), group.total, group.start, out=group.total)
            torch._foreach_copy_(group.buffers, group.totals)


class _Group:
    """The buffers of one dtype. All their values lie in one tensor, which a GPU handles at once; lists are views."""

    def __init__(self, buffers: list[torch.Tensor], world: World, round_robin: bool):
        first, sizes = buffers[0], [buffer.numel() for buffer in buffers]
        self.buffers, self.is_float = buffers, first.is_floating_point()
        exact = torch.promote_types(first.dtype, torch.float32) if self.is_float else first.dtype
        self.total, self.start = torch.zeros(2 * sum(sizes), dtype=exact, device=first.device).chunk(2)
        self.sum = TreeSum([self.total, self.total], world, round_robin)  # weighted, and how often each value changed

        def views(whole: torch.Tensor) -> list[torch.Tensor]:
            return [part.view_as(buffer) for part, buffer in zip(whole.split(sizes), buffers, strict=True)]

        self.totals, self.starts = views(self.total), views(self.start)
