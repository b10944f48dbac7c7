"""Sums over the micro-batches of a step whose bits do not depend on how many processes share them.

Micro-batch m is leaf m of one binary tree. A node is the sum of 2^k leaves from a multiple of 2^k on; leaves past the
last one are left out. Each rank adds up its own leaves as far as they make whole nodes. Between ranks nodes are only
moved, and then added in the tree's order: each rank gets one slice of all nodes (all_to_all), adds, and gives the sum
to all (all_gather). Small sums take one all_gather of all nodes.
"""

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.utils.data.plan import MicroBatch, rank_share
from lib.utils.distributed import World

BUCKET = 8 << 20  # bytes of gradients that travel together
SMALL = 1 << 20  # bytes of a node of each rank, together, up to which all ranks get all nodes


def grow(nodes: dict[int, list[Tensor]], leaf: int, values: list[Tensor]):
    """Add a leaf to nodes, named by their first leaf. Leaves come in order; the values become the node's."""
    size = 1
    while leaf & size and leaf - size in nodes:
        leaf, size, right = leaf - size, size * 2, values
        values = nodes.pop(leaf)
        torch._foreach_add_(values, right)
    nodes[leaf] = values


def total(nodes: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return the sum of nodes that hold all leaves; it takes their memory."""
    size = 1
    while len(nodes) > 1:
        for first in [first for first in nodes if first & size]:
            torch._foreach_add_(nodes[first - size], nodes.pop(first))
        size *= 2
    return nodes[0]


@functools.lru_cache(maxsize=64)
def nodes_by_rank(leaves: int, size: int, by_turns: bool) -> list[list[int]]:
    """Return the nodes that each rank makes of its share of the leaves."""
    found, nothing = [], torch.empty(0)
    for rank in range(size):
        nodes = {}
        for leaf in rank_share(leaves, rank, size, by_turns):
            grow(nodes, leaf, [nothing])
        found.append(list(nodes))
    return found


class Sum:
    """The sum of a list of tensors: `begin` a step, `add` each own micro-batch, `send`, `settle`, `wait`.

    Between the last three other work may go on. All ranks call them in the same order.
    """

    def __init__(self, like: list[Tensor], world: World, by_turns: bool):
        self.like, self.world, self.by_turns = like, world, by_turns
        self.sizes, self.strides = [tensor.numel() for tensor in like], [_strides(tensor) for tensor in like]
        self.count = sum(self.sizes)
        self.slice = -(-self.count // world.size)
        self.small = self.count * like[0].element_size() * world.size <= SMALL
        self.nodes: dict[int, list[Tensor]] = {}
        self.work: Any = None  # of the library, under way

    def begin(self, leaves: int):
        """Begin a step of so many micro-batches over all ranks."""
        self.by_rank, self.nodes = nodes_by_rank(leaves, self.world.size, self.by_turns), {}

    def add(self, leaf: int, values: list[Tensor]):
        """Add what this rank's next micro-batch made; the tensors become this sum's."""
        grow(self.nodes, leaf, values)

    def send(self):
        """Begin to move the nodes."""
        ranks = self.world.size
        if ranks == 1:
            return
        own, self.nodes = list(self.nodes.values()), {}
        if self.small:
            most = max(map(len, self.by_rank))
            sent = self.like[0].new_zeros(most, self.count)
            for row, values in zip(sent, own, strict=False):
                torch.cat([_flat(value) for value in values], out=row)
            self.got = sent.new_empty(ranks, most, self.count)
            self.work = dist.all_gather_into_tensor(self.got.view(-1), sent.view(-1), async_op=True)
            return
        gap = self.like[0].new_zeros(self.slice * ranks - self.count)
        sent = gap.new_empty(ranks, len(own), self.slice)
        for number, values in enumerate(own):
            row = sent.view(-1) if len(own) == 1 else gap.new_empty(ranks * self.slice)
            torch.cat([*map(_flat, values), gap], out=row)
            if len(own) > 1:
                sent[:, number] = row.view(ranks, -1)
        self.got = gap.new_empty(sum(map(len, self.by_rank)), self.slice)
        splits = [len(nodes) * self.slice for nodes in self.by_rank], [len(own) * self.slice] * ranks
        self.sum = sent.view(-1)
        self.work = dist.all_to_all_single(self.got.view(-1), self.sum, *splits, async_op=True)

    def settle(self):
        """Add up what has come, and begin to give the sum of this rank's slice to the others."""
        if self.world.size == 1:
            return
        self.work.wait()
        if self.small:
            rows = [row for part, nodes in zip(self.got, self.by_rank, strict=True) for row in part[: len(nodes)]]
        else:
            rows = list(self.got)
        [own] = total({first: [row] for first, row in zip(itertools.chain(*self.by_rank), rows, strict=True)})
        if self.small:
            self.sum = own
        else:
            whole = self.slice * self.world.size
            self.sum = self.sum[:whole] if len(self.sum) >= whole else own.new_empty(whole)  # what was sent is there
            self.work = dist.all_gather_into_tensor(self.sum, own, async_op=True)

    def wait(self) -> list[Tensor]:
        """Return the sums, laid out in memory like the tensors that they are the sums of."""
        if self.world.size == 1:
            return total(self.nodes)
        self.work.wait()
        parts = self.sum[: self.count].split(self.sizes)
        del self.got, self.sum
        layouts = zip(parts, self.like, self.strides, strict=True)
        return [part.as_strided(one.shape, strides) for part, one, strides in layouts]


def _strides(tensor):
    """The strides of its gradient: its own where its values lie without gaps, else those of a contiguous tensor."""
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


def _flat(tensor):
    """Its values in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class AllReduce(Sum):
    """The same sum in the order that the communication library chooses, which depends on the number of ranks."""

    def send(self):
        first, *others = self.nodes.values() or [[torch.zeros_like(one) for one in self.like]]
        for values in others:
            torch._foreach_add_(first, values)
        self.sum = torch.cat([_flat(value) for value in first])
        self.got = self.nodes = {}
        self.work = dist.all_reduce(self.sum, async_op=True)

    def settle(self):
        pass


class Gradients:
    """Sums the gradients of a step's micro-batches over all ranks: `before` and `after` each pass, then `finish`.

    Sharded parameters (FSDP) are summed in each backward pass, see Scatter. The others travel in buckets, which
    begin to move while the last backward pass is still under way. A parameter that no micro-batch uses gets no
    gradient. A module that the trainer itself wraps in DistributedDataParallel has averages, which are multiplied by
    the number of ranks.
    """

    def __init__(self, parameters: list, model: nn.Module, own: list[nn.Module], world: World, args):
        wrapped = {p for one in own if isinstance(one, DistributedDataParallel) for p in one.parameters()}
        sharded = [p for p in parameters if hasattr(p, "placements")]
        plain = [p for p in parameters if p not in wrapped and not hasattr(p, "placements")]
        self.world, self.averaged, self.sharded = world, [p for p in parameters if p in wrapped], sharded
        groups: Any = [one for one in model.modules() if hasattr(one, "set_custom_reduce_scatter")]
        self.scatters = [Scatter() for _ in groups if args.reduction == "tree"]
        for group, scatter in zip(groups, self.scatters, strict=False):
            group.set_custom_reduce_scatter(scatter)
        kind = AllReduce if args.reduction == "allreduce" and world.size > 1 else Sum
        self.buckets = [_Bucket(part, kind, world, args.parallel == "fsdp") for part in _parts(plain)]
        # Other collectives in a backward pass would meet these in another order on a rank that has nothing to do.
        self.early = world.size > 1 and not (wrapped or sharded or args.sync_bn)
        self.active, self.sent = False, 0
        for bucket in self.buckets if self.early else ():
            for parameter in filter(lambda parameter: parameter.requires_grad, bucket.parameters):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

    def before(self, key: MicroBatch):
        """Prepare for the backward pass of a micro-batch."""
        self.key, self.alone = key, self.world.size == key.step_parts == 1
        if key.first:
            self.sent = 0
            for bucket in self.buckets:
                bucket.begin(key.step_parts)
        for scatter in self.scatters:
            scatter.begin(key)
        self.active = self.early and key.last and key.count > 0
        for bucket in self.buckets if self.active else ():
            bucket.awaited = len(bucket.parameters)

    def after(self):
        """Take the gradients of the micro-batch, unless it is the only one of all: then they are the sum."""
        self.active = False
        if self.alone:
            return
        for bucket in self.buckets:
            bucket.take(self.key)
        if self.scatters and not self.key.last:
            for parameter in self.sharded:
                parameter.grad = None  # what is whole comes with the last pass

    def finish(self):
        """Set each parameter's gradient to the sum over the step's micro-batches."""
        if not self.alone:
            self._send(len(self.buckets))
            for bucket in self.buckets[-1:]:
                bucket.sum.settle()
            for bucket in self.buckets:
                bucket.finish()
        used = [parameter.grad for parameter in self.averaged if parameter.grad is not None]
        if used:
            torch._foreach_mul_(used, self.world.size)

    def _arrived(self, bucket, _):
        if self.active:
            bucket.awaited -= 1
            if bucket.awaited == 0:
                bucket.take(self.key)
                ready = itertools.takewhile(lambda bucket: bucket.awaited == 0, self.buckets)
                self._send(sum(1 for _ in ready))

    def _send(self, ready: int):
        """Send the buckets up to this one, and settle those that were sent before: in one order on all ranks."""
        for number in range(self.sent, ready):
            self.buckets[number].sum.send()
            if number:
                self.buckets[number - 1].sum.settle()
        self.sent = max(self.sent, ready)


def _parts(parameters):
    """Lists of parameters of one dtype and device, in the order in which a backward pass meets them."""
    parts = {}
    for parameter in reversed(parameters):
        group = parts.setdefault((parameter.dtype, parameter.device), [[]])
        if sum(one.nbytes for one in group[-1]) >= BUCKET:
            group.append([])
        group[-1].append(parameter)
    return [part for group in parts.values() for part in group]


class _Bucket:
    """Parameters whose gradients travel together, each with a flag that says whether any micro-batch used it."""

    def __init__(self, parameters, kind, world, by_turns):
        self.parameters, self.flags = parameters, parameters[0].detach().new_ones(len(parameters))
        self.sum = kind([*parameters, self.flags], world, by_turns)
        self.awaited = 0  # gradients still to come in this backward pass

    def begin(self, leaves):
        self.sum.begin(leaves)
        self.unused = {*range(len(self.parameters))}  # by all micro-batches of this rank
        self.taken = None

    def take(self, key):
        """Move the gradients of a micro-batch into the sum, or drop those of padding."""
        if self.taken is key:
            if any(parameter.grad is not None for parameter in self.parameters):
                raise RuntimeError("a parameter got two gradients in one backward pass, as from checkpoint(..., "
                                   "use_reentrant=True): use_reentrant=False gives it one")  # fmt: skip
            return
        self.taken, gradients = key, [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if key.count == 0:
            return
        flags = self.flags.clone()
        missing = {number for number, gradient in enumerate(gradients) if gradient is None}
        for number in missing:
            gradients[number] = torch.zeros_like(self.parameters[number])
            flags[number] = 0
        self.unused &= missing
        self.sum.add(key.number, [*gradients, flags])

    def finish(self):
        *gradients, flags = self.sum.wait()
        used = flags.tolist() if self.unused else [1] * len(gradients)
        for parameter, gradient, one in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if one else None


class Scatter:
    """FSDP2's reduce-scatter for one group of parameters.

    In turn t rank r has micro-batch t x ranks + r. The leaves of a turn move to the owners of their shards, who add
    them up as far as they make nodes. What it returns is whole in the step's last turn.
    """

    def __init__(self):
        self.nodes, self.turn, self.leaves = {}, 0, 0

    def begin(self, key: MicroBatch):
        """Prepare for the backward pass of a turn."""
        self.turn = 0 if key.first else self.turn + 1
        self.leaves = key.step_parts
        self.nodes = {} if key.first else self.nodes

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        size = group.size()
        got, first = torch.empty_like(input_tensor), self.turn * size
        dist.all_to_all_single(got, input_tensor, group=group)
        for leaf, part in enumerate(got.view(size, -1)[: self.leaves - first], first):
            grow(self.nodes, leaf, [part])
        if first + size >= self.leaves:
            output_tensor.copy_(total(self.nodes)[0])
            self.nodes = {}
        else:  # keep nothing but the nodes
            self.nodes = {leaf: [part.clone()] if leaf >= first else [part] for leaf, [part] in self.nodes.items()}
