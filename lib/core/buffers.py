"""Buffers that training changes: running statistics, as BatchNorm's, and all others, as counters and queues."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.data.plan import MicroBatch, Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of torch's norm layers


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
        values = inputs[0] if inputs else torch.empty(0, 0)
        if module.training and len(values) <= plan.micro and values.numel() == len(values) * values.shape[1] > 0:
            raise UsageError(f"{cause}: a micro-batch has one sample, and BatchNorm cannot train on one: {advice}")

    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(check)


def is_statistic(name: str) -> bool:
    """Return whether a buffer of this name belongs to a norm layer's running statistics."""
    return name.rpartition(".")[2] in STATISTICS


class Buffers:
    """The buffers of some modules; read where they lie, as a module may put another tensor in the place of one."""

    def __init__(self, modules: Iterable[nn.Module], statistics: bool):
        self.places: dict[tuple[nn.Module, str], str] = {}  # (module, key within the module): name
        for root in modules:
            saved = root.state_dict(keep_vars=True)
            for prefix, module in root.named_modules():
                for key in module._buffers:
                    name = f"{prefix}.{key}" if prefix else key
                    if name in saved and is_statistic(key) == statistics:
                        self.places.setdefault((module, key), name)

    def read(self) -> list[Tensor]:
        """Return the buffers as they are now; an empty tensor for one that is None."""
        now = [module._buffers[key] for module, key in self.places]
        return [torch.empty(0) if buffer is None else buffer for buffer in now]


class RunningStatistics:
    """Running means and variances as a function of the step, not of the process.

    Every micro-batch of a step starts from the same buffers. The step ends with the mean of what the micro-batches
    made of them, weighted by their samples, over all ranks. A value that no micro-batch changed stays as it is, to
    the bit. A step that is skipped leaves all of them as they were. Counts (num_batches_tracked) are what the last
    micro-batch made of them.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self.buffers = Buffers(modules, statistics=True)
        self.starts: list[Tensor] = []  # their values before the step
        self.ends: list[Tensor] = []  # and after it

    def before(self, micro_batch: MicroBatch) -> None:
        """Prepare for a micro-batch."""
        if micro_batch.first:
            self.starts = [buffer.detach().clone() for buffer in self.buffers.read()]
        else:
            for buffer, start in zip(self.buffers.read(), self.starts, strict=True):
                buffer.detach().copy_(start)

    def after(self, micro_batch: MicroBatch) -> list[Tensor]:
        """Return what is to be summed over the micro-batches: of each value its share, and whether it changed."""
        self.ends = [buffer.detach().clone() for buffer in self.buffers.read()]
        share, to_sum = micro_batch.count / micro_batch.step_samples, []
        for start, end in zip(self.starts, self.ends, strict=True):
            if end.is_floating_point():
                to_sum += [_exact(end) * share, _exact(end != start)]
        return to_sum

    def like(self) -> list[Tensor]:
        """Return tensors of the types and shapes of what `after` returns."""
        floats = [_exact(start) for start in self.starts if start.is_floating_point()]
        return [like for start in floats for like in (start, start)]

    def finish(self, sums: list[Tensor], norm: Tensor) -> None:
        """End a step with the sums of what `after` returned; [] if there was one micro-batch, on one process.

        If the norm of the step's gradient (0-d) is not finite, the step is skipped.
        """
        finite, parts = torch.isfinite(norm), iter(sums)
        for buffer, start, end in zip(self.buffers.read(), self.starts, self.ends, strict=True):
            if sums and end.is_floating_point():
                total, changes = next(parts), next(parts)
                end = torch.where(changes > 0, total, start)
            buffer.detach().copy_(torch.where(finite, end, start))


def _exact(values: Tensor) -> Tensor:
    """Return values in a type that sums are exact enough in: at least 32 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class OtherBuffers:
    """All buffers that are no running statistics: each rank's passes change its own, as in plain PyTorch.

    After a step on several ranks, those that any rank's passes changed take rank 0's values, as under DDP.
    """

    def __init__(self, modules: Iterable[nn.Module], world: World):
        self.world, self.reported = world, False
        self.buffers = Buffers(modules, statistics=False)
        self.seen: list[tuple[Tensor, int]] = []

    def before(self) -> None:
        """Prepare for a pass."""
        self.seen = [(buffer, buffer._version) for buffer in self.buffers.read()]

    def changed(self) -> list[bool]:
        """Return for each buffer whether this pass wrote to it, or put another tensor in its place."""
        pairs = zip(self.buffers.read(), self.seen, strict=True)
        return [now is not before or now._version != version for now, (before, version) in pairs]

    @torch.no_grad()
    def share(self, changed: list[bool]) -> None:
        """Give those that changed on any rank rank 0's values. All ranks call this with the same list.

        Raises RuntimeError if a buffer's type or shape differs between rank 0 and this rank.
        """
        buffers = zip(self.buffers.places.values(), self.buffers.read(), strict=True)
        shared = [(name, buffer) for (name, buffer), flag in zip(buffers, changed, strict=True) if flag]
        if not shared:
            return
        if not self.reported:
            self.reported = True
            shown = ", ".join(name for name, _ in shared[:5])
            log.info("buffers that a step changes take rank 0's values after it: %s", shown)
        here = [[name, str(buffer.dtype), list(buffer.shape)] for name, buffer in shared]
        for mine, first in zip(here, distributed.broadcast_json(here, self.world), strict=True):
            if mine != first:
                fault = f"the buffer {mine[0]} is {mine[1:]} on rank {self.world.rank} and {first[1:]} on rank 0"
                raise RuntimeError(f"{fault}: give it one shape, or register it with persistent=False")
        for _, buffer in shared:
            distributed.broadcast_tensor(buffer, 0)
