"""Buffers that training changes: running statistics, as BatchNorm's, and all others, as counters and queues."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.data.plan import MicroBatch

log = logging.getLogger(__name__)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of torch's norm layers


def is_statistic(name: str) -> bool:
    """Return whether a tensor of this name is a norm layer's running statistic, or the average of one (ema.py)."""
    return name.replace("/", ".").rpartition(".")[2] in STATISTICS


class Buffers:
    """The saved buffers of some modules, through the passes of a step.

    Running statistics: every micro-batch of a step starts from the same ones. The step ends with the mean of what the
    micro-batches made of them, weighted by their samples, over all ranks. A value that no micro-batch changed stays
    as it is, to the bit, and so does one that would become NaN or infinite. Counts (num_batches_tracked) grow by the
    mean over the micro-batches that changed them: a layer may be left out in some.

    All others, as counters and queues: each rank's passes change its own, as in plain PyTorch. After a step on
    several ranks they take rank 0's values, as under DDP.
    """

    def __init__(self, modules: Iterable[nn.Module], world: distributed.World):
        found: dict[tuple[nn.Module, str], str] = {}  # a module may put another tensor in the place of one
        for root in modules:
            saved = root.state_dict(keep_vars=True)
            for prefix, module in root.named_modules():
                names = {key: f"{prefix}.{key}" if prefix else key for key in module._buffers}
                found |= {(module, key): name for key, name in names.items() if name in saved}
        self.statistics = [place for place, name in found.items() if is_statistic(name)]
        self.others = [place for place, name in found.items() if not is_statistic(name)] if world.size > 1 else []
        self.starts: list[Tensor] = []  # of the statistics, when a step began that is not finished
        if self.others:
            shown = ", ".join(found[place] for place in self.others[:5])
            log.info("buffers:     after each step all processes take rank 0's %s (%d)", shown, len(self.others))

    def before(self, micro_batch: MicroBatch) -> None:
        """Prepare for the forward pass of a micro-batch."""
        if micro_batch.first:
            self.starts = self.copies()
        else:
            self.restore(self.starts)

    @torch.no_grad()
    def restore(self, copies: list[Tensor]) -> None:
        """Give the statistics the values of these copies, if there are any."""
        for buffer, values in zip(_read(self.statistics), copies, strict=False):
            buffer.copy_(values)

    def after(self) -> None:
        """Note what the forward pass made of the statistics: a backward pass may compute blocks again."""
        self.ends = self.copies()

    def copies(self) -> list[Tensor]:
        """Return copies of the statistics."""
        return [buffer.clone() for buffer in _read(self.statistics)]

    def shares(self, micro_batch: MicroBatch) -> list[Tensor]:
        """Return what the micro-batches add up: a float's share or a count's growth, and whether it changed."""
        share, to_sum = micro_batch.count / micro_batch.step_samples, []
        for start, end in zip(self.starts, self.ends, strict=True):
            kind = torch.promote_types(end.dtype, torch.float32)  # in which sums are exact enough
            part = end.to(kind) * share if end.is_floating_point() else (end - start).to(kind)
            to_sum += [part, (end != start).to(kind)]
        return to_sum

    @torch.no_grad()
    def finish(self, sums: list[Tensor]) -> None:
        """End the passes of a step with the sums of `shares`."""
        tensors = zip(_read(self.statistics), self.starts, self.ends, sums[::2], sums[1::2], strict=True)
        for buffer, start, end, total, changes in tensors:
            if not end.is_floating_point():
                total = start + (total / changes.clamp_min(1)).round().to(end.dtype)
            end = torch.where(changes > 0, total, start)
            buffer.copy_(torch.where(torch.isfinite(end), end, start))
        self.share()

    def share(self) -> None:
        """Give all ranks rank 0's values of the others, which an evaluation may have changed, too."""
        take_first(_read(self.others))


def take_first(tensors: Iterable[Tensor]) -> None:
    """Give those of these tensors that are not sharded the values of rank 0. All ranks call this alike."""
    for tensor in tensors:
        if not is_sharded(tensor):
            distributed.broadcast_tensor(tensor, 0)


def _read(places: Iterable[tuple[nn.Module, str]]) -> list[Tensor]:
    """Return the buffers in these places as they are now."""
    return [module._buffers[key].detach() for module, key in places]  # type: ignore[union-attr]
