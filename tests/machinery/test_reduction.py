"""The same bits on any number of processes: the tree of sums, and whole runs, sharded or not."""

import json
import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import few, norm_net, plugins, run
from saves import SMALL, bits, log_of, refused
from test_parallel import NET, BlocksNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lib.core import reduction
from lib.trainer import trainer
from lib.utils.data.plan import rank_share
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World

SIZES = st.integers(1, 9)


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    made = {"blocks_net": lambda args: BlocksNet(), "turns_net": lambda args: Turns(), "norm_net": norm_net}
    with plugins(arch=made, dataset={"few": few, "pictures": pictures}):
        yield


def pictures(args):
    """The little data as images of 8 x 8 pixels."""
    parts = {name: part.tensors for name, part in few(args).items()}
    return {name: Tensors(inputs.view(-1, 1, 8, 8), labels) for name, (inputs, labels) in parts.items()}


# The tree


def joined(leaves: list[torch.Tensor], size: int, round_robin: bool) -> torch.Tensor:
    """The sum of all leaves, of nodes that so many ranks make."""
    nodes = {}
    for rank, names in enumerate(reduction.nodes_by_rank(len(leaves), size, round_robin)):
        own = {}
        for leaf in rank_share(len(leaves), rank, size, round_robin):
            reduction.add_leaf(own, leaf, [leaves[leaf].clone()])
        assert list(own) == names, "every rank knows what the others send"
        nodes |= own
    return reduction.sum_nodes(dict(sorted(nodes.items())))[0]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 40), SIZES, st.booleans(), st.integers(0, 99))
def test_a_sum_has_the_same_bits_whoever_has_which_leaves(count, size, round_robin, seed):
    leaves = list(torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)))
    wanted = joined(leaves, 1, round_robin=False)
    assert torch.equal(joined(leaves, size, round_robin), wanted)
    assert torch.allclose(wanted, torch.stack(leaves).sum(0), atol=1e-4)


@given(st.integers(1, 4096), st.integers(1, 12))
def test_a_rank_sends_few_nodes(count, size):
    for rank, nodes in enumerate(reduction.nodes_by_rank(count, size, round_robin=False)):
        own = len(rank_share(count, rank, size))
        assert len(nodes) <= max(1, 2 * (own.bit_length() - 1)) if own else not nodes


def test_a_sum_on_one_rank_keeps_layout_and_values():
    like = [torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(7), torch.empty(())]
    leaves = [[torch.randn_like(one) for one in like] for _ in range(3)]
    wanted = [(a + b) + c for a, b, c in zip(*leaves, strict=True)]
    one = reduction.Sum(like, World(), round_robin=False)
    one.begin(3)
    for number, values in enumerate(leaves):
        one.add(number, values)
    one.send()
    one.reduce()
    assert all(torch.equal(*pair) for pair in zip(one.result(), wanted, strict=True))


# Runs


class Turns(nn.Module):
    """Uses one of its parts in some micro-batches alone, and one in none."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, inputs):
        outputs = self.first(inputs)
        return outputs + self.sometimes(inputs) if inputs[0, 0] > 0.7 else outputs


def moved(out, words: str, *starts: str):
    """The bits of a run whose starts have these further flags; all but the last end after 5 steps more."""
    for number, more in enumerate(starts[:-1], 1):
        run(out, f"{words} -model moved {more} -limit_steps {5 * number}", wanted=75)
    return bits(run(out, f"{words} -model moved {starts[-1]}"))


@pytest.mark.parametrize(("words", "sizes"), [
    (f"{SMALL} -clip_grad 0.5 -batch_size 12", (2, 5)),  # 3 micro-batches
    (f"{NET} -epochs 3", (3,)),
    (f"{NET} -epochs 3 -bf16", (2,)),
    (f"{SMALL} -arch turns_net", (2, 4)),
    (f"{SMALL} -trainer ema -optimizer sgd", (3,)),
    (f"{SMALL} -dataset pictures -trainer contrastive", (3,)),
], ids=["three", "tied", "bf16", "turns", "ema", "contrastive"])  # fmt: skip
def test_runs_end_at_the_same_bits_on_any_number_of_processes(words, sizes, tmp_path):
    truth = bits(run(tmp_path, f"{words} -cpu 1 -model alone"))
    for size in sizes:
        assert bits(run(tmp_path, f"{words} -cpu {size} -model on_{size}")) == truth
    assert moved(tmp_path, words, "-cpu 2", "-cpu 3", "-cpu 1") == truth


def test_sums_travel_in_several_buckets_and_end_at_the_same_bits(tmp_path, monkeypatch):
    words = f"{NET} -epochs 2 -batch_size 12"
    truth = bits(run(tmp_path, f"{words} -cpu 1 -model alone"))
    monkeypatch.setattr(reduction, "BUCKET", 20_000)
    for size in (2, 3, 5):
        assert bits(run(tmp_path, f"{words} -cpu {size} -model on_{size}")) == truth


def test_sharded_runs_end_at_the_same_bits_on_any_number_of_processes(tmp_path):
    words = f"{NET} -epochs 3 -parallel fsdp"
    truth = bits(run(tmp_path, f"{words} -cpu 1 -model alone"))
    for more in ("-cpu 2", "-cpu 3 -offload", "-cpu 5 -recompute"):
        assert bits(run(tmp_path, f"{words} {more} -model {more[5]}")) == truth
    assert moved(tmp_path, words, "-cpu 3", "-cpu 1", "-cpu 2") == truth


def test_sharded_or_not_a_deterministic_run_ends_at_the_same_bits(tmp_path):
    words = f"{NET} -epochs 3 -deterministic"
    truth = bits(run(tmp_path, f"{words} -cpu 2 -model whole"))
    assert moved(tmp_path, words, "-cpu 3 -parallel fsdp", "-cpu 2", "-cpu 2 -parallel fsdp") == truth


def test_sharded_runs_in_half_precision_end_at_the_same_bits(tmp_path):
    words = f"{NET} -epochs 3 -parallel fsdp -bf16"
    truth = bits(run(tmp_path, f"{words} -cpu 2 -model two"))
    assert bits(run(tmp_path, f"{words} -cpu 3 -model three")) == truth


@pytest.mark.slow
def test_eight_processes_end_at_the_bits_of_one(tmp_path):
    truth = bits(run(tmp_path, f"{SMALL} -cpu 1 -model alone"))
    assert moved(tmp_path, SMALL, "-cpu 8", "-cpu 5", "-cpu 8") == truth


@pytest.mark.parametrize("more", ["-cpu 3", "-cpu 2 -parallel fsdp"])
def test_sums_left_to_the_library_go_on_at_the_same_bits(more, tmp_path):
    words = f"{NET} -epochs 3 -reduction allreduce {more}"
    truth = bits(run(tmp_path, f"{words} -model whole"))
    assert moved(tmp_path, words, "", "") == truth
    run(tmp_path, f"{NET} -epochs 4 -model moved {more}", wanted=2)


class Gapped(nn.Module):
    """Has a parameter whose values do not lie next to each other."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(64, 4), nn.Parameter(torch.ones(64, 3)[:, 1])

    def forward(self, inputs):
        return self.head(inputs * self.scale)


class Guided(trainer.Trainer):
    """Has a second optimizer, which takes every other step, a part that is not trained, and rare metrics."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.guide = nn.Linear(4, 4)
        self.guide.bias.requires_grad_(False)
        self.guide_optimizer = torch.optim.SGD(self.guide.parameters(), lr=0.1)

    def training_step(self, batch):
        if batch[0][0, 0] > 0.7:
            self.metrics.update({f"above_{int(batch[0][0, 0])}": batch[0].sum()})
        return self.loss(self.guide(self.model(batch[0])), batch[1])

    def step(self, samples):
        super().step(samples)
        if self.state.step % 2 == 0:
            self.guide_optimizer.step()
            self.guide_optimizer.zero_grad()


def test_a_trainer_with_two_optimizers_and_metrics_that_few_batches_have_ends_at_the_same_bits(tmp_path):
    with plugins(arch={"gapped": lambda args: Gapped()}, trainer={"guided": Guided}):
        words = f"{SMALL} -arch gapped -trainer guided -log_every 1"
        truth = bits(run(tmp_path, f"{words} -cpu 1 -model alone"))
        assert any("train/above_2" in line for line in truth["figures"])
        for size in (2, 3, 5):
            assert bits(run(tmp_path, f"{words} -cpu {size} -model on_{size}")) == truth


class Apart(trainer.Trainer):
    """Has a part that it wraps itself, whose gradients it keeps over two steps."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.apart = nn.Linear(4, 4)
        wrapped = DistributedDataParallel(self.apart) if self.world.size > 1 else self.apart
        self.wrapped, self.slow = wrapped, torch.optim.SGD(self.apart.parameters(), lr=0.1)

    def training_step(self, batch):
        return self.loss(self.wrapped(self.model(batch[0])), batch[1])

    def step(self, samples):
        super().step(samples)
        if self.state.step % 2 == 0:
            self.slow.step()
            self.slow.zero_grad()
            logging.getLogger("lib.trainer").info("apart %s", self.apart.weight.flatten().tolist())


def test_gradients_that_a_part_wrapped_by_the_trainer_keeps_over_steps_count_once(tmp_path):
    with plugins(trainer={"apart": Apart}):
        logs = [log_of(run(tmp_path, f"{SMALL} -trainer apart -cpu {n} -model on_{n}")) for n in (1, 2, 3)]
    alone, *others = [[json.loads(one) for one in re.findall(r"apart (\[.*\])", log)] for log in logs]
    assert len(alone) == 6
    for other in others:
        assert torch.allclose(torch.tensor(other), torch.tensor(alone), rtol=1e-4, atol=1e-6)


def test_another_micro_batch_gives_idle_processes_work_at_the_same_bits(tmp_path):
    def two_starts(before: int, after: int):
        words = f"{SMALL} -model from_{before}_to_{after}"
        first = run(tmp_path, f"{words} -micro_batch 8 -limit_steps 5 -cpu {before}", wanted=75)
        idle = "1 of 3 processes idle" in log_of(first)
        return bits(run(tmp_path, f"{words} -allow_change micro_batch -cpu {after}")), idle

    truth, _ = two_starts(1, 1)
    assert two_starts(3, 4) == (truth, True)
    assert two_starts(2, 3) == (truth, False)


class Twice(nn.Module):
    """Recomputes a part by the old way, whose backward pass is one inside another."""

    def __init__(self):
        super().__init__()
        self.part, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, inputs):
        inputs = inputs.requires_grad_()
        for _ in range(2):
            inputs = torch.utils.checkpoint.checkpoint(self.part, inputs, use_reentrant=True)
        return self.head(inputs)


def test_a_parameter_with_two_gradients_in_one_pass_is_refused_or_summed(tmp_path, capfd):
    with plugins(arch={"twice": lambda args: Twice()}):
        run(tmp_path, f"{SMALL} -arch twice -cpu 1 -model alone")
        run(tmp_path, f"{SMALL} -arch twice -cpu 2 -model two", wanted=1)
    assert "use_reentrant=False" in capfd.readouterr().err


class Halves(nn.Module):
    """Uses one half of its parameters."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, inputs, half):
        return inputs + self.halves[half](inputs).tanh()


class Shared(nn.Module):
    """Calls each of its blocks twice in a pass."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(64, 64), Halves()]), nn.Linear(64, 4)

    def forward(self, inputs):
        linear, halves = self.blocks
        return self.head(halves(linear(halves(linear(inputs).tanh(), 0)).tanh(), 1))


def test_sharded_blocks_that_are_called_twice_in_a_pass_end_at_the_same_bits(tmp_path):
    with plugins(arch={"shared": lambda args: Shared()}):
        words = f"{SMALL} -arch shared -parallel fsdp"
        truth = bits(run(tmp_path, f"{words} -cpu 1 -model alone"))
        for more in ("-cpu 2", "-cpu 3 -recompute", "-cpu 5"):
            assert bits(run(tmp_path, f"{words} {more} -model on_{more[5]}")) == truth


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 64, sparse=True), nn.Linear(64, 4)

    def forward(self, inputs):
        return self.head(inputs + self.embedding((inputs[:, 0] > 0).long()))


def test_a_module_may_call_anything_else_sparse(tmp_path):
    class Attention(nn.Sequential):
        sparse = True

    with plugins(arch={"windows": lambda args: Attention(*norm_net(args))}):
        run(tmp_path, f"{SMALL} -arch windows -cpu 1 -epochs 1")


def test_sparse_gradients_are_refused_with_what_helps(tmp_path, capfd):
    with plugins(arch={"sparse": lambda args: Sparse()}):
        assert "use sparse=False" in refused(tmp_path, f"{SMALL} -arch sparse -cpu 2", capfd)
        assert "use sparse=False" in refused(tmp_path, f"{SMALL} -arch sparse -cpu 1", capfd)
