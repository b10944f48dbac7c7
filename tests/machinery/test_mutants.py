"""A test of the tests: gradients are added in another order than along the tree, and the comparison must see it."""

import pytest
import saves
import torch
from runs import plugins, run

from lib.core import exact


def add_to_one_sum(nodes, leaf, values):
    """Add all values of a rank to one sum."""
    if nodes:
        torch._foreach_add_(next(iter(nodes.values())), values)
    else:
        nodes[leaf] = values


def add_in_order(nodes):
    first, *others = (values for _, values in sorted(nodes.items()))
    for values in others:
        torch._foreach_add_(first, values)
    return first


def in_rank_order(monkeypatch):
    """Break the order of sums: add the ranks one after the other."""
    monkeypatch.setattr(exact, "add_leaf", add_to_one_sum)
    monkeypatch.setattr(exact, "sum_nodes", add_in_order)
    exact.nodes_by_rank.cache_clear()
    monkeypatch.setattr(exact, "nodes_by_rank", exact.nodes_by_rank.__wrapped__)


@pytest.mark.parametrize("broken", [False, True])
def test_a_sum_of_gradients_in_rank_order_is_detected(broken, tmp_path, monkeypatch):
    if broken:
        in_rank_order(monkeypatch)
    with plugins(**saves.PLUGINS):
        runs = [run(tmp_path, f"{saves.SMALL} -cpu {size} -model on_{size}") for size in (1, 3)]
    assert (saves.bits(runs[0]) != saves.bits(runs[1])) == broken
