"""Running statistics, as BatchNorm's, that do not depend on which process saw which sample."""

import torch
from torch import Tensor, nn

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
    cut = f"{plan.samples} training samples, -batch_size {plan.batch} -micro_batch {plan.micro}"
    advice = "a larger -micro_batch, another -batch_size, or -drop_last for an epoch's short last batch"

    def check(module: nn.Module, inputs: tuple) -> None:
        values = inputs[0] if inputs else torch.empty(0, 0)
        if module.training and len(values) <= plan.micro and values.numel() == len(values) * values.shape[1] > 0:
            raise UsageError(f"{cut}: a micro-batch has one sample, and BatchNorm cannot train on one: {advice}")

    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(check)


class RunningStatistics:
    """Float buffers (BatchNorm's running mean and variance) as a function of the step, not of the process.

    Every micro-batch of a step starts from the same buffers. The step ends with the mean of what the micro-batches
    made of them, weighted by their samples, over all ranks. A value that no micro-batch changed stays as it is, to
    the bit. A step that is skipped leaves all of them as they were. Counts (BatchNorm's num_batches_tracked) are what
    the last micro-batch made of them.
    """

    def __init__(self, model: nn.Module, world: World, round_robin: bool = False):
        saved = model.state_dict(keep_vars=True)
        buffers = [buffer.detach() for name, buffer in model.named_buffers() if name in saved]
        self.buffers = buffers if any(buffer.is_floating_point() for buffer in buffers) else []
        self.world, self.tree = world, TreeSum(world, round_robin)

    def before(self, micro_batch: MicroBatch) -> None:
        """Prepare for a micro-batch."""
        if micro_batch.first:
            self.starts = [buffer.clone() for buffer in self.buffers]
            self.tree.begin(micro_batch.step_parts)
        elif self.buffers:
            torch._foreach_copy_(self.buffers, self.starts)

    def after(self, micro_batch: MicroBatch) -> None:
        """Add up what the forward pass made of the buffers; nothing of padding.

        This comes before the backward pass, which may compute blocks again (-recompute) and count a batch twice.
        """
        self.alone = self.world.size == micro_batch.step_parts == 1
        self.ends = [buffer.clone() for buffer in self.buffers]
        share, to_sum = micro_batch.count / micro_batch.step_samples, []
        for start, end in zip(self.starts, self.ends, strict=True):
            if end.is_floating_point():
                to_sum += [_exact(end) * share, _exact(end != start)]
        if micro_batch.count and to_sum and not self.alone:
            self.tree.add(micro_batch.number, to_sum)

    def finish(self, norm: Tensor) -> None:
        """Average over all ranks at the end of a step. If the norm of its gradient is not finite, it is skipped."""
        floats = [_exact(start) for start in self.starts if start.is_floating_point()]
        like = [tensor for start in floats for tensor in (start, start)]
        sums = iter([] if self.alone or not like else self.tree.result(like))
        finite = torch.isfinite(norm)
        for buffer, start, end in zip(self.buffers, self.starts, self.ends, strict=True):
            if end.is_floating_point() and not self.alone:
                total, changes = next(sums), next(sums)
                end = torch.where(changes > 0, total, start)
            buffer.copy_(torch.where(finite, end, start))


def _exact(values: Tensor) -> Tensor:
    """Return values in a type that sums are exact enough in: at least 32 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
