"""Sums and whole runs have the same bits on any number of processes, sharded or not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import NET, BlocksNet
from runs import run
from saves import SMALL, bits
from torch import nn
from truth import file_plugins

from lib.core import exact
from lib.utils.data.plan import rank_share

_plugins = file_plugins(arch={"blocks_net": lambda args: BlocksNet(), "turns_net": lambda args: Sometimes()})
# In many chunks and slices: of 12 micro-batches, and of two in the last step, where most of five processes have none.
CHUNKED = f"{SMALL} -arch turns_net -batch_size 12 -micro_batch 1"


def tree_sum(leaves: list[torch.Tensor], size: int, round_robin: bool) -> torch.Tensor:
    nodes, count = {}, len(leaves)
    for rank, names in enumerate(exact.nodes_by_rank(count, size, round_robin)):
        own = {}
        assert rank or rank_share(count, rank, size, round_robin), "its buffers are those of all"
        for leaf in rank_share(count, rank, size, round_robin):
            exact.add_leaf(own, leaf, [leaves[leaf].clone()])
        assert list(own) == names, "every rank knows what the others send"
        nodes |= own
    return exact.sum_nodes(nodes)[0]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_a_sum_has_the_same_bits_for_any_distribution_of_the_leaves(count, size, round_robin, seed):
    leaves = list(torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)))
    wanted = tree_sum(leaves, 1, round_robin=False)
    assert torch.equal(tree_sum(leaves, size, round_robin), wanted)
    assert torch.allclose(wanted, torch.stack(leaves).sum(0), atol=1e-4)


class Sometimes(nn.Module):
    """Uses one of its layers in some micro-batches only, and one in none."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(64, 4)
        self.first.weight = nn.Parameter(torch.randn(64, 9)[:, :4].t() / 8)  # a view that is not contiguous

    def forward(self, inputs):
        outputs = self.first(inputs)
        return outputs + self.sometimes(inputs) if inputs[0, 0] > 0.7 else outputs


def bits_after_starts(out, flags: str, *starts: str):
    """The bits of a run that is started with each of these extra flags. All starts but the last do 5 steps."""
    for number, more in enumerate(starts[:-1], 1):
        run(out, f"{flags} -model moved {more} -limit_steps {5 * number}", wanted=75)
    return bits(run(out, f"{flags} -model moved {starts[-1]}"))


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        (f"{NET} -epochs 3", ("-cpu 3",)),
        (f"{NET} -epochs 3 -bf16", ("-cpu 2",)),
        (f"{NET} -epochs 3 -parallel fsdp", ("-cpu 2", "-cpu 5 -recompute")),
        (f"{SMALL} -arch turns_net", ("-cpu 2", "-cpu 4")),
        pytest.param(CHUNKED, ("-cpu 2", "-cpu 5"), marks=pytest.mark.slow),
    ],
    ids=["tied", "bf16", "fsdp", "turns", "chunks"],
)
def test_runs_have_the_same_bits_on_any_number_of_processes(flags, others, tmp_path, monkeypatch):
    truth = bits(run(tmp_path, f"{flags} -cpu 1 -model alone"))
    monkeypatch.setattr(exact, "CHUNK", 700 if flags == CHUNKED else exact.CHUNK)
    for more in others:
        assert bits(run(tmp_path, f"{flags} {more} -model on_{more[5]}")) == truth
    assert bits_after_starts(tmp_path, flags, "-cpu 3", "-cpu 1", "-cpu 2") == truth


@pytest.mark.parametrize("more", ["-cpu 1", "-cpu 2", "-cpu 3 -find_unused", "-cpu 2 -parallel fsdp"])
def test_a_run_of_the_stock_engine_resumes_with_the_same_bits(more, tmp_path):
    flags = f"{NET} -epochs 3 -deterministic no {more}"
    assert bits_after_starts(tmp_path, flags, "", "") == bits(run(tmp_path, f"{flags} -model whole"))
    run(tmp_path, f"{NET} -epochs 3 -deterministic -model moved {more}", wanted=2)
