"""The exact engine: sums over a step's micro-batches whose bits do not depend on how many processes share them.

Micro-batch m is leaf m of one binary tree. A node is the sum of 2^k leaves from a multiple of 2^k on; leaves past the
last one are left out. Each rank adds up its own leaves as far as they make whole nodes. After the last pass of a step
the ranks exchange their nodes, chunk by chunk: each rank gets one slice of all nodes (all_to_all), adds them in the
tree's order, and gives the sum to all (all_gather). Of a small chunk each rank gets all nodes.
"""

import functools
import itertools
from argparse import Namespace
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.buffers import Buffers
from lib.core.parallel import SKIPPED
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.data.plan import MicroBatch, rank_share
from lib.utils.distributed import World
from lib.utils.errors import UsageError

CHUNK = 8 << 20  # bytes of gradients from which on a chunk travels
ALIGNED = 64  # values: NCCL is slower where a part does not begin at a multiple of 16 bytes (its issue 413)


class Engine:
    """Computes the gradients of a step: `begin_pass` and `backward` of each micro-batch, then `sum_gradients`.

    Sharded parameters (FSDP) are summed in each backward pass, by `TreeReduceScatter`; all others after the last one.
    A parameter that no micro-batch uses gets no gradient. Running statistics (BatchNorm's) follow the tree, too.
    """

    def __init__(self, modules: list[nn.Module], world: World, args: Namespace):
        self.world, self.buffers = world, Buffers(modules, world)
        self.round_robin = args.parallel == "fsdp"  # as in rank_share
        self.scatters = []
        for module in modules:
            parts: Any = module.named_modules()
            for name, group in parts:
                if hasattr(group, "set_custom_reduce_scatter"):
                    self.scatters.append(TreeReduceScatter(name))
                    group.set_custom_reduce_scatter(self.scatters[-1])
                if isinstance(group, DistributedDataParallel):
                    group.require_backward_grad_sync = False  # or they would be summed twice
                    group.broadcast_buffers = False  # `buffers` shares them

    def begin_pass(self, micro_batch: MicroBatch, parameters: list[nn.Parameter]) -> None:
        """Prepare for the forward pass of a micro-batch. `parameters`: those whose gradients are wanted."""
        if micro_batch.first:
            self.parameters = [one for one in parameters if not is_sharded(one)]  # a pass may freeze and thaw some
            self.sharded = [one for one in parameters if is_sharded(one)]
            self.unused = {*range(len(self.parameters))}  # by all micro-batches of this rank
            self.leaves, self.nodes = micro_batch.step_parts, {}
        for scatter in self.scatters:
            scatter.begin(micro_batch)
        self.buffers.before(micro_batch)
        self.figures: Any = None  # of this pass

    def backward(self, loss: Tensor, micro_batch: MicroBatch, figures: Tensor) -> None:
        """Add a micro-batch's gradients to the sum, none of padding. `figures` (2,): mean loss, number of targets."""
        if self.figures is not None:
            raise UsageError("two backward passes of one micro-batch: add up its losses")
        self.buffers.after()
        loss.backward()
        self.figures = figures
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in [*self.parameters, *(() if micro_batch.last else self.sharded)]:
            parameter.grad = None  # of sharded ones, what is whole comes with the last pass
        self.shares = self.buffers.shares(micro_batch)
        if micro_batch.count:
            missing = {number for number, gradient in enumerate(gradients) if gradient is None}
            self.unused &= missing
            used, of_all = figures.new_ones(len(gradients)), figures.new_zeros(self.leaves, 2)
            for number in missing:
                used[number] = 0  # nobody waits for the device, as for a copy of a list
            of_all[micro_batch.number] = figures
            pairs = zip(gradients, self.parameters, strict=True)
            dense = [torch.zeros_like(parameter) if one is None else one for one, parameter in pairs]
            add_leaf(self.nodes, micro_batch.number, [*dense, used, of_all, *self.shares])

    def sum_gradients(self) -> Tensor:
        """Set each gradient to the sum over all micro-batches of the step; return their figures, (number, 2)."""
        for scatter in self.scatters:
            if scatter.nodes:  # no sum is whole: the last micro-batches skipped the block
                raise UsageError(SKIPPED.format(scatter.name))
        count = len(self.parameters)
        like = [*self.parameters, self.figures.new_empty(count), self.figures.new_empty(self.leaves, 2), *self.shares]
        by_rank = nodes_by_rank(self.leaves, self.world.size, self.round_robin)
        sums = sum_over_ranks(self.nodes, by_rank, like)
        gradients, (uses, figures, *shares) = sums[:count], sums[count:]
        self.buffers.finish(shares)
        used = [number > 0 for number in uses.tolist()] if self.unused else [True] * count
        if any(parameter.grad is not None for parameter in self.parameters):
            raise UsageError("a backward pass of another loss has set gradients: add it to that of training_step")
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        return figures


def sum_over_ranks(nodes: dict[int, list[Tensor]], by_rank: list[list[int]], like: list[Tensor]) -> list[Tensor]:
    """Return the sums of the nodes of all ranks, each laid out in memory like its tensor in `like`.

    `nodes` are this rank's, and `by_rank` is what `nodes_by_rank` returns. All ranks call this together.
    """
    if len(by_rank) == 1:
        return sum_nodes(nodes)
    sums = {}
    chunks, _ = dist._compute_bucket_assignment_by_size(like, [CHUNK])  # DDP's: each of one type and device
    for chunk in chunks:
        parts = {leaf: [values[number] for number in chunk] for leaf, values in nodes.items()}
        for values in nodes.values():
            for number in chunk:
                values[number] = like[number]  # its memory is free once it has been sent
        sums |= zip(chunk, _exchange(parts, by_rank, [like[number] for number in chunk]), strict=True)
    return [sums[number] for number in range(len(like))]


def _exchange(nodes: dict[int, list[Tensor]], by_rank: list[list[int]], like: list[Tensor]) -> list[Tensor]:
    """Return the sums of tensors of one type and device over the nodes of all ranks, laid out as `like`."""
    size, width, count = len(by_rank), sum(tensor.numel() for tensor in like), len(nodes)
    slices = 1 if width * like[0].element_size() * size <= CHUNK // 8 else size  # small ones go faster as a whole
    part = -(-width // (slices * ALIGNED)) * ALIGNED  # values of a slice
    rows = like[0].new_empty(count, slices * part, requires_grad=False)
    for row, values in zip(rows, nodes.values(), strict=True):
        torch.cat([value.reshape(-1) for value in values], out=row[:width])
    nodes.clear()
    sent = rows.view(count, slices, part).transpose(0, 1).expand(size, -1, -1).contiguous()
    received = rows.new_empty(sum(map(len, by_rank)), part)
    counts = [len(firsts) * part for firsts in by_rank], [count * part] * size
    dist.all_to_all_single(received.view(-1), sent.view(-1), *counts)
    [total] = sum_nodes({first: [row] for first, row in zip(itertools.chain(*by_rank), received, strict=True)})
    if slices > 1:
        mine, total = total, rows.new_empty(size * part)
        dist.all_gather_into_tensor(total, mine)
    parts = total[:width].split([tensor.numel() for tensor in like])
    shaped = [(part.view(tensor.shape), tensor) for part, tensor in zip(parts, like, strict=True)]
    return [part if one.is_contiguous() else torch.empty_like(one).copy_(part) for part, one in shaped]


def add_leaf(nodes: dict[int, list[Tensor]], leaf: int, values: list[Tensor]) -> None:
    """Add a leaf to nodes, named by their first leaf. Leaves come in order; the values become the node's."""
    size = 1
    while leaf & size and leaf - size in nodes:
        left = nodes.pop(leaf - size)
        torch._foreach_add_(left, values)
        leaf, values = leaf - size, left
        size *= 2
    nodes[leaf] = values


def sum_nodes(nodes: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return the sum of nodes that cover all leaves; it takes their memory."""
    size = 1
    while len(nodes) > 1:
        for first in [first for first in nodes if first & size]:
            torch._foreach_add_(nodes[first - size], nodes.pop(first))
        size *= 2
    [total] = nodes.values()
    return total


@functools.lru_cache(maxsize=64)
def nodes_by_rank(leaves: int, size: int, round_robin: bool) -> list[list[int]]:
    """Return the nodes that each rank makes of its share of the leaves."""
    by_rank, nothing = [], torch.empty(0)
    for rank in range(size):
        nodes = {}
        for leaf in rank_share(leaves, rank, size, round_robin):
            add_leaf(nodes, leaf, [nothing])
        by_rank.append(list(nodes))
    return by_rank


class TreeReduceScatter:
    """FSDP2's reduce-scatter for one group of parameters.

    In turn t rank r has micro-batch t x ranks + r. The leaves of a turn move to the owners of their shards, who add
    them up as far as they make nodes. What it returns is whole in the step's last turn. A block that is called
    several times in a pass may be reduced several times: each time has nodes of its own, and FSDP adds up the sums.
    """

    def __init__(self, name: str):
        self.name = name  # of the block
        self.nodes: dict[int, dict[int, list[Tensor]]] = {}  # of each call within a turn
        self.turn = self.calls = self.leaves = 0
        self.turns: Counter[int] = Counter()  # in which there was each of the calls

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for the backward pass of a turn."""
        self.turn, self.calls = 0 if micro_batch.first else self.turn + 1, 0
        self.leaves = micro_batch.step_parts
        if micro_batch.first:
            self.nodes, self.turns = {}, Counter()

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what FSDP sends or receives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put the sum of this rank's shard into the output. Returns None: there is no work to wait for."""
        if self.turns[self.calls] != self.turn:
            raise UsageError(SKIPPED.format(self.name))
        self.turns[self.calls] += 1
        size, nodes = group.size(), self.nodes.setdefault(self.calls, {})
        self.calls += 1
        received, first = torch.empty_like(input_tensor), self.turn * size
        dist.all_to_all_single(received, input_tensor, group=group)
        for leaf, part in enumerate(received.view(size, -1)[: self.leaves - first], first):
            add_leaf(nodes, leaf, [part])
        if first + size >= self.leaves:
            output_tensor.copy_(sum_nodes(nodes)[0])
            del self.nodes[self.calls - 1]
        else:  # keep nothing but the nodes
            nodes.update({leaf: [part.clone()] for leaf, [part] in nodes.items() if leaf >= first})
