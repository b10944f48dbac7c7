"""Sums and whole runs have the same bits on any number of processes, sharded or not."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import NET, BlocksNet
from ranks import on_ranks
from runs import few, norm_net, plugins, run
from saves import SMALL, bits
from torch import nn

from lib.core import exact
from lib.utils.data.loader import Loader
from lib.utils.data.plan import Plan, rank_share
from lib.utils.distributed import World

SIZES = st.integers(1, 9)


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    made = {"blocks_net": lambda args: BlocksNet(), "turns_net": lambda args: Sometimes(), "norm_net": norm_net}
    with plugins(arch=made, dataset={"few": few}):
        yield


# The tree of sums


def tree_sum(leaves: list[torch.Tensor], size: int, round_robin: bool) -> torch.Tensor:
    """The sum of all leaves over `size` ranks."""
    nodes, count = {}, len(leaves)
    for rank, names in enumerate(exact.nodes_by_rank(count, size, round_robin)):
        own = {}
        for leaf in rank_share(count, rank, size, round_robin):
            exact.add_leaf(own, leaf, [leaves[leaf].clone()])
        assert list(own) == names, "every rank knows what the others send"
        nodes |= own
    return exact.sum_nodes(nodes)[0]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 40), SIZES, st.booleans(), st.integers(0, 99))
def test_a_sum_has_the_same_bits_for_any_distribution_of_the_leaves(count, size, round_robin, seed):
    leaves = list(torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)))
    wanted = tree_sum(leaves, 1, round_robin=False)
    assert torch.equal(tree_sum(leaves, size, round_robin), wanted)
    assert torch.allclose(wanted, torch.stack(leaves).sum(0), atol=1e-4)


# The gradients of a model, on several ranks

COUNTS = (8, 11, 12, 16, 3)  # micro-batches of a step; with 3, some machines have none
PARAMETERS = ((37, 5), (211,), (), (64, 3), (1000,))


class Wide(nn.Module):
    """Has parameters of odd sizes; one is frozen, one is never used, one is used in few micro-batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in PARAMETERS)
        self.frozen = nn.Parameter(torch.ones(100), requires_grad=False)
        self.never = nn.Parameter(torch.ones(100))
        self.gaps = nn.Parameter(torch.randn(10, 8)[:, :4].t())  # a transposed view that is not contiguous

    def forward(self, number):
        noise = torch.Generator().manual_seed(number)
        parts = [(one * torch.randn(one.shape, generator=noise)).square().sum() for one in self.all]
        gaps = (self.gaps * torch.randn(self.gaps.shape, generator=noise)).square().sum()
        return gaps + sum(parts[: 4 if number % 5 else 5]) * self.frozen.mean()


def gradients(world: World, parallel: str = "ddp") -> list[list[torch.Tensor | None]]:
    """The gradients of one step for each of COUNTS, from this rank's share of its micro-batches."""
    model, found = Wide(), []
    args, parameters = types.SimpleNamespace(seed=0, parallel=parallel), [*model.parameters()]
    engine = exact.Engine([model], world, args)
    for count in COUNTS:
        cut = Plan(count, count, 1)
        for key in Loader(
            range(count), cut, world, seed=0, shuffle=False, workers=0, round_robin=parallel == "fsdp"
        ).micro_batches(0):
            engine.begin_pass(key, parameters)
            loss = model(key.number) * key.count
            engine.backward(loss, key, key.count)
        engine.sum_gradients()
        found.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])
        model.zero_grad()
    return found


def same_gradients(ours: list[list], theirs: list[list]) -> bool:
    """Whether all gradients have the same bits, or are None on both sides."""
    pairs = [pair for both in zip(ours, theirs, strict=True) for pair in zip(*both, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def small_chunks(monkeypatch):
    """Treat no sum as small, and exchange the gradients in several chunks."""
    monkeypatch.setattr(exact, "SMALL", 0)
    monkeypatch.setattr(exact, "CHUNK", 700)


@pytest.mark.parametrize("ranks", [2, 5])
def test_gradients_have_the_same_bits_on_any_number_of_ranks(ranks, tmp_path, small_chunks):
    """In many chunks and in one, with consecutive micro-batches and in turn."""
    truth = gradients(World())

    def check(rank):
        world = World(rank=rank, local_rank=rank, size=ranks, local_size=ranks)
        for parallel in ("ddp", "fsdp"):
            assert same_gradients(gradients(world, parallel), truth)
        exact.SMALL = 1 << 20  # only in this process
        assert same_gradients(gradients(world), truth), "small sums"

    torch.set_num_threads(1)
    on_ranks(ranks, check, tmp_path)


# Runs


class Sometimes(nn.Module):
    """Uses one of its layers in some micro-batches only, and one in none."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, inputs):
        outputs = self.first(inputs)
        return outputs + self.sometimes(inputs) if inputs[0, 0] > 0.7 else outputs


def bits_after_starts(out, flags: str, *starts: str):
    """The bits of a run that is started with each of these extra flags. All starts but the last do 5 steps."""
    for number, more in enumerate(starts[:-1], 1):
        run(out, f"{flags} -model moved {more} -limit_steps {5 * number}", wanted=75)
    return bits(run(out, f"{flags} -model moved {starts[-1]}"))


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (f"{SMALL} -clip_grad 0.5 -batch_size 12", (2, 5)),  # 3 micro-batches
        (f"{NET} -epochs 3", (3,)),
        (f"{NET} -epochs 3 -bf16", (2,)),
        (f"{SMALL} -arch turns_net", (2, 4)),
    ],
    ids=["three", "tied", "bf16", "turns"],
)
def test_runs_have_the_same_bits_on_any_number_of_processes(flags, sizes, tmp_path):
    truth = bits(run(tmp_path, f"{flags} -cpu 1 -model alone"))
    for size in sizes:
        assert bits(run(tmp_path, f"{flags} -cpu {size} -model on_{size}")) == truth
    assert bits_after_starts(tmp_path, flags, "-cpu 2", "-cpu 3", "-cpu 1") == truth


def test_fsdp_runs_have_the_same_bits_on_any_number_of_processes(tmp_path):
    flags = f"{NET} -epochs 3 -parallel fsdp"
    truth = bits(run(tmp_path, f"{flags} -cpu 1 -model alone"))
    for more in ("-cpu 2", "-cpu 5 -recompute"):
        assert bits(run(tmp_path, f"{flags} {more} -model {more[5]}")) == truth
    assert bits_after_starts(tmp_path, flags, "-cpu 3", "-cpu 1", "-cpu 2") == truth


def test_a_deterministic_run_has_the_same_bits_with_and_without_fsdp(tmp_path):
    flags = f"{NET} -epochs 3 -deterministic"
    truth = bits(run(tmp_path, f"{flags} -cpu 2 -model whole"))
    assert bits_after_starts(tmp_path, flags, "-cpu 3 -parallel fsdp", "-cpu 2", "-cpu 2 -parallel fsdp") == truth


@pytest.mark.parametrize("more", ["-cpu 1", "-cpu 2", "-cpu 3 -find_unused", "-cpu 2 -parallel fsdp"])
def test_a_run_of_the_stock_engine_resumes_with_the_same_bits(more, tmp_path):
    flags = f"{NET} -epochs 3 -deterministic no {more}"
    truth = bits(run(tmp_path, f"{flags} -model whole"))
    assert bits_after_starts(tmp_path, flags, "", "") == truth
    run(tmp_path, f"{NET} -epochs 3 -deterministic -model moved {more}", wanted=2)
