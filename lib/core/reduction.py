"""Sums over the micro-batches of a step whose bits do not depend on how many processes share them.

Micro-batch m is leaf m of one binary tree. A node is the sum of 2^k leaves from a multiple of 2^k on; leaves past the
last one are left out. Each rank adds up its own leaves as far as they make whole nodes. Between ranks nodes are only
moved, and then added in the tree's order: each rank gets one slice of all nodes (all_to_all), adds, and gives the sum
to all (all_gather). Of a small sum each gets all nodes. Where several machines have several ranks each, the ranks of
a machine do so first, as far as their nodes make whole ones, and then the ranks with the same local rank. Two ranks
with one node each let the library add a large sum (all_reduce): a + b has the bits of b + a.
"""

import bisect
import functools
import itertools
import os
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.utils.data.plan import MicroBatch, rank_share
from lib.utils.distributed import World

BUCKET = 8 << 20  # bytes of gradients that travel together
SMALL = 1 << 20  # bytes of a node of each rank, together, up to which all ranks get all nodes
ALIGNED = 64  # values: NCCL is slower where a part does not begin at a multiple of 16 bytes (its issue 413)


def add_leaf(nodes: dict[int, list[Tensor]], leaf: int, values: list[Tensor]) -> None:
    """Add a leaf to nodes, named by their first leaf. Leaves come in order; the values become the node's."""
    size = 1
    while leaf & size and leaf - size in nodes:
        leaf, size, right = leaf - size, size * 2, values
        values = nodes.pop(leaf)
        torch._foreach_add_(values, right)
    nodes[leaf] = values


def sum_nodes(nodes: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return the sum of nodes that cover all leaves, or those of one node; it takes their memory."""
    size = 1
    while len(nodes) > 1:
        for first in [first for first in nodes if first & size]:
            torch._foreach_add_(nodes[first - size], nodes.pop(first))
        size *= 2
    [total] = nodes.values()
    return total


def join_nodes(by_rank: list[list[int]], rows: Iterable[Tensor], joined: list[int]) -> dict[int, list[Tensor]]:
    """Return the nodes that are to be `joined` of these rows, one for each node of each rank."""
    parts = {first: {} for first in joined}
    for first, row in zip(itertools.chain(*by_rank), rows, strict=True):
        parts[joined[bisect.bisect(joined, first) - 1]][first] = [row]
    return {first: sum_nodes(nodes) for first, nodes in parts.items()}


@functools.lru_cache(maxsize=64)
def nodes_by_rank(leaves: int, size: int, round_robin: bool, together: int = 1) -> list[list[int]]:
    """Return the nodes that each rank makes of its share of the leaves, or each so many ranks `together`."""
    by_rank, nothing = [], torch.empty(0)
    for first in range(0, size, together):
        nodes = {}
        shares = (rank_share(leaves, rank, size, round_robin) for rank in range(first, first + together))
        for leaf in sorted(itertools.chain(*shares)):
            add_leaf(nodes, leaf, [nothing])
        by_rank.append(list(nodes))
    return by_rank


class TreeSum:
    """The sum of tensors like `templates`: `begin` a step, `add` each own micro-batch, `send`, get the `result`.

    Between the last two other work may go on. All ranks call them in the same order. With `by_library` the
    communication library chooses the order of additions, which depends on the number of ranks.
    """

    def __init__(self, templates: list[Tensor], world: World, round_robin: bool, by_library: bool = False):
        self.templates, self.world, self.round_robin, self.by_library = templates, world, round_robin, by_library
        *starts, self.count = itertools.accumulate((one.numel() for one in templates), initial=0)
        # autograd lays a gradient out like its parameter, but row by row where that has gaps.
        dense = [(one, torch.empty_like(one, device="meta")) for one in templates]
        strides = [(like if like.stride() == one.stride() else like.contiguous()).stride() for one, like in dense]
        self.layouts = list(zip((one.shape for one in templates), strides, starts, strict=True))
        self.small = self.count * templates[0].element_size() * world.size <= SMALL

    def begin(self, leaves: int) -> None:
        """Begin a step of so many micro-batches over all ranks."""
        self.shares, self.nodes = (leaves, self.world.size, self.round_robin), {}
        self.exchanges = self._exchange() if self.world.size > 1 else iter(())

    def add(self, leaf: int, values: list[Tensor]) -> None:
        """Add what this rank's next micro-batch made; the tensors become this sum's."""
        add_leaf(self.nodes, leaf, values)

    def send(self) -> None:
        """Begin to move the nodes. Later calls add up what has arrived and begin the next exchange, if any."""
        next(self.exchanges, None)

    def result(self) -> list[Tensor]:
        """Return the sums, laid out in memory like the templates."""
        if self.world.size == 1:
            return sum_nodes(self.nodes)
        for _ in self.exchanges:
            pass
        begin = self.sum.storage_offset()
        sums = [self.sum.as_strided(shape, strides, begin + start) for shape, strides, start in self.layouts]
        del self.sum
        return sums

    def _exchange(self) -> Iterator[None]:
        """Set `sum`, all values side by side. Pauses after each exchange that it begins."""
        one_each = not self.small and [len(nodes) for nodes in nodes_by_rank(*self.shares)] == [1, 1]
        tree = self._along_tree(self.nodes, self.count, self.world.groups)
        self.sum = yield from (self._by_library() if self.by_library or one_each else tree)

    def _by_library(self) -> Generator[None, None, Tensor]:
        first, *others = self.nodes.values() or [[torch.zeros_like(one) for one in self.templates]]
        self.nodes = {}
        for other in others:
            torch._foreach_add_(first, other)
        [total] = _fill_rows(first[0].new_empty(1, self.count), {0: first})
        work: Any = dist.all_reduce(total, async_op=True)
        yield
        _wait(work, total)
        return total

    def _along_tree(
        self, nodes: dict[int, list[Tensor]], width: int, groups: tuple, joined: int = 1
    ) -> Generator[None, None, Tensor]:
        """Return the sum of `width` values over the ranks of all groups; each node is that of `joined` ranks.

        The ranks of the first group send each other slices of their nodes. Each adds up one slice, also through the
        other groups. Then they gather the slices, into the memory of what was sent, which has arrived.
        """
        if not groups:
            return sum_nodes(nodes)[0]
        group, size, count = groups[0], dist.get_world_size(groups[0]), len(nodes)
        place = self.world.rank // (joined * size)
        by_rank = nodes_by_rank(*self.shares, joined)[place * size : (place + 1) * size]
        slices = 1 if self.small else size  # of a small sum each rank gets and adds up the whole
        part = -(-width // (slices * ALIGNED)) * ALIGNED
        rows = _fill_rows(self.templates[0].new_empty(max(1, count), slices * part), nodes)
        sent = rows[:count].view(count, slices, part).transpose(0, 1).expand(size, -1, -1).contiguous()
        received = rows.new_empty(sum(map(len, by_rank)), part)
        splits = [len(names) * part for names in by_rank], [count * part] * size
        work: Any = dist.all_to_all_single(received.view(-1), sent.view(-1), *splits, group=group, async_op=True)
        yield
        _wait(work, rows)
        joined *= size
        nodes = join_nodes(by_rank, received, nodes_by_rank(*self.shares, joined)[place])
        total = yield from self._along_tree(nodes, part, groups[1:], joined)
        if slices > 1:
            work = dist.all_gather_into_tensor(rows[0], total, group=group, async_op=True)
            yield
            _wait(work, rows)
            total = rows[0]
        return total[:width]


def _wait(work: Any, values: Tensor) -> None:
    """Wait for an exchange. On the CPU, first stay awake for a moment: a thread that sleeps is woken late."""
    for _ in range(500 if values.device.type == "cpu" else 0):  # half a millisecond: docs/benchmarks.md
        if work.is_completed():
            break
        os.sched_yield()
    work.wait()


def _fill_rows(rows: Tensor, nodes: dict[int, list[Tensor]]) -> Tensor:
    """Move the nodes into rows: each its values side by side, as they lie in memory. The rest of a row stays."""
    for row, first in zip(rows, [*nodes], strict=False):
        parts = [value.as_strided((value.numel(),), (1,)) for value in nodes.pop(first)]
        torch.cat(parts, out=row[: sum(map(len, parts))])
    return rows


class GradientReducer:
    """Sums the gradients of a step's micro-batches over all ranks: `before` and `after` each pass, then `finish`.

    Sharded parameters (FSDP) are summed in each backward pass, see TreeReduceScatter. The others travel in buckets,
    which begin to move while the last backward pass is still under way. A parameter that no micro-batch uses gets no
    gradient.
    """

    def __init__(self, parameters: list, model: nn.Module, world: World, args: Namespace):
        self.world, self.sharded = world, [p for p in parameters if hasattr(p, "placements")]
        plain = [p for p in parameters if not hasattr(p, "placements")]
        groups: Any = [one for one in model.modules() if hasattr(one, "set_custom_reduce_scatter")]
        self.scatters = [TreeReduceScatter() for _ in groups if args.reduction == "tree"]
        for group, scatter in zip(groups, self.scatters, strict=False):
            group.set_custom_reduce_scatter(scatter)
        how = {"round_robin": args.parallel == "fsdp", "by_library": args.reduction == "allreduce"}
        self.buckets = [_Bucket(part, world, **how) for part in _group_parameters(plain)]
        # Other collectives in a backward pass would meet these in another order on a rank that has nothing to do.
        others = self.sharded or any(isinstance(one, nn.SyncBatchNorm) for one in model.modules())
        self.overlaps = world.size > 1 and not others
        self.active, self.sent = False, 0
        self.max_in_flight = 2 * len(world.groups) - 1  # buckets at most, while the next one is sent
        for bucket in self.buckets[:-1] if self.overlaps else ():  # the last one is whole when the pass is over
            for parameter in filter(lambda parameter: parameter.requires_grad, bucket.parameters):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, bucket))

    def before(self, micro_batch: MicroBatch) -> None:
        """Prepare for the backward pass of a micro-batch."""
        self.micro_batch, self.alone = micro_batch, self.world.size == micro_batch.step_parts == 1
        if micro_batch.first:
            self.sent = 0
            for bucket in () if self.alone else self.buckets:
                bucket.begin(micro_batch)
        for scatter in self.scatters:
            scatter.begin(micro_batch)
        self.active = self.overlaps and micro_batch.last and micro_batch.count > 0

    def after(self) -> None:
        """Take the gradients of the micro-batch, unless it is the only one of all: then they are the sum."""
        self.active = False
        if self.alone:
            return
        for bucket in self.buckets:
            bucket.take(self.micro_batch)
        if self.scatters and not self.micro_batch.last:
            for parameter in self.sharded:
                parameter.grad = None  # what is whole comes with the last pass

    def finish(self) -> None:
        """Set each parameter's gradient to the sum over the step's micro-batches."""
        if not self.alone:
            self._send(len(self.buckets) + self.max_in_flight)
            for bucket in self.buckets:
                bucket.finish()

    def _on_gradient(self, bucket: "_Bucket", _: Tensor) -> None:
        if self.active:
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.take(self.micro_batch)
                ready = itertools.takewhile(lambda bucket: bucket.pending == 0, self.buckets)
                self._send(sum(1 for _ in ready))

    def _send(self, ready: int) -> None:
        """Send the buckets up to this one, and go on with those before it: in one order on all ranks."""
        for number in range(self.sent, ready):
            for bucket in reversed(self.buckets[max(0, number - self.max_in_flight) : number + 1]):
                bucket.sum.send()
        self.sent = max(self.sent, ready)


def _group_parameters(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
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

    def __init__(self, parameters: list[nn.Parameter], world: World, *, round_robin: bool, by_library: bool):
        self.parameters, self.flags = parameters, parameters[0].detach().new_ones(len(parameters))
        self.sum = TreeSum([*parameters, self.flags], world, round_robin, by_library)

    def begin(self, micro_batch: MicroBatch) -> None:
        self.sum.begin(micro_batch.step_parts)
        self.unused = {*range(len(self.parameters))}  # by all micro-batches of this rank
        self.collected, self.pending = None, len(self.parameters)  # gradients still to come in the last backward pass
        for parameter in self.parameters if micro_batch.number else ():
            parameter.grad = None  # what a trainer keeps from the step before counts once, in the first micro-batch

    def take(self, micro_batch: MicroBatch) -> None:
        """Move the gradients of a micro-batch into the sum, or drop those of padding."""
        if self.collected is micro_batch:
            if any(parameter.grad is not None for parameter in self.parameters):
                raise RuntimeError("two gradients of a parameter in a backward pass: checkpoint(use_reentrant=False)")
            return
        self.collected = micro_batch
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if micro_batch.count == 0:
            return
        flags = self.flags.clone()
        missing = {number for number, gradient in enumerate(gradients) if gradient is None}
        for number in missing:
            gradients[number] = torch.zeros_like(self.parameters[number])
            flags[number] = 0
        self.unused &= missing
        self.sum.add(micro_batch.number, [*gradients, flags])

    def finish(self) -> None:
        *gradients, flags = self.sum.result()
        used = flags.tolist() if self.unused else [1] * len(gradients)
        for parameter, gradient, one in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if one else None


class TreeReduceScatter:
    """FSDP2's reduce-scatter for one group of parameters.

    In turn t rank r has micro-batch t x ranks + r. The leaves of a turn move to the owners of their shards, who add
    them up as far as they make nodes. What it returns is whole in the step's last turn. A block that is called
    several times in a pass may be reduced several times: each time has nodes of its own, and FSDP adds up the sums.
    """

    def __init__(self):
        self.nodes: dict[int, dict[int, list[Tensor]]] = {}  # of each call within a turn
        self.turn = self.calls = self.leaves = 0

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for the backward pass of a turn."""
        self.turn, self.calls = 0 if micro_batch.first else self.turn + 1, 0
        self.leaves = micro_batch.step_parts
        self.nodes = {} if micro_batch.first else self.nodes

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what FSDP sends or receives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put the sum of this rank's shard into the output. Returns None: there is no work to wait for."""
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
