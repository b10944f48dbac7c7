"""The order of an epoch: that of torch, any part of it, its scale, and the quality of the keyed permutation."""

import itertools
import json
import math
import random
from collections import Counter

import pytest
import torch
import truth
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.utils.compat.samplers import InterruptableDistributedSampler
from lib.utils.data import permutation
from lib.utils.data.permutation import KeyedPermutation, order
from scripts.bench import samplers as samplers_bench


@settings(deadline=None, derandomize=True)
@given(
    n=st.integers(1, 5000),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 99),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_any_part_of_an_order_is_that_part_of_torchs(n, seed, epoch, shuffle, data):
    whole = truth.order(n, epoch=epoch, seed=seed, shuffle=shuffle)
    drawn = order(n, seed, epoch, shuffle)
    assert len(drawn) == n and drawn[:].tolist() == whole
    start, stop = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 5))
    assert drawn[start:stop].tolist() == whole[start:stop]
    assert drawn[start:stop:3].tolist() == whole[start:stop:3]
    assert drawn.take(torch.arange(n)[start:stop]).tolist() == whole[start:stop]


def test_an_order_is_torchs_up_to_2_to_the_24_samples_and_keyed_for_more(monkeypatch):
    monkeypatch.setattr(permutation, "TORCH_UP_TO", 1000)
    assert order(1000, 1, 2)[:].tolist() == truth.order(1000, seed=1, epoch=2)
    beyond = order(1001, 1, 2)[:]
    assert torch.equal(beyond, KeyedPermutation(1001, 1, 2).take(torch.arange(1001)))


def test_the_keyed_order_is_split_over_ranks(monkeypatch):
    monkeypatch.setattr(permutation, "TORCH_UP_TO", 1000)
    beyond = order(1001, 1, 2)[:]
    ranks = [InterruptableDistributedSampler(range(1001), 3, rank, seed=1) for rank in range(3)]
    for sampler in ranks:
        sampler.set_epoch(2)
    dealt = [index for turn in zip(*ranks, strict=True) for index in turn]
    assert dealt == [*beyond.tolist(), beyond[0]]


def test_the_order_of_a_large_dataset_starts_anywhere_at_once_in_little_memory():
    n = 10**12
    sampler = InterruptableDistributedSampler(range(n), num_replicas=8, rank=3, seed=1)
    sampler.load_state_dict({"epoch": 4, "progress": n // 8 * 9 // 10, "start": 0, "num_replicas": 8})
    first = order(n, 1, 4)[n // 10 * 9 + 3 : n // 10 * 9 + 3 + 8 * 20 : 8].tolist()
    assert list(itertools.islice(sampler, 20)) == first and len(set(first)) == 20 and max(first) < n
    assert len(sampler) == n // 8


def test_the_benchmark_of_the_samplers_runs_in_new_processes(tmp_path, capsys):
    samplers_bench.main(["-n", "1e12", "-rounds", "1", "-json", str(tmp_path / "table.json")])
    mine, *others = json.loads((tmp_path / "table.json").read_text())
    for seconds, megabytes in (mine["first"], mine["resume"]):
        assert seconds < 20 and megabytes < 10
    assert [other["reason"] for other in others] == ["does not fit"] * 3
    assert len(capsys.readouterr().out.splitlines()) == 5


# The quality of the keyed permutation and of torch's: at most five standard deviations from pure chance


def keyed(n, seed, places):
    return KeyedPermutation(n, seed, 0).take(places)


def by_torch(n, seed, places):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[places]


def rotated(n, seed, places):
    return (places + random.Random(seed).randrange(n)) % n


def deviations(counts):
    """The distance of counts from uniform: their chi-squared, in standard deviations of chance."""
    even, freedom = counts.double().mean(), counts.numel() - 1
    return float((((counts - even) ** 2 / even).sum() - freedom) / math.sqrt(2 * freedom))


def positions(draw, n, bins, seeds=4000):
    """Where one place is sent, over many seeds."""
    drawn = torch.stack([draw(n, seed, torch.tensor([n // 3])) for seed in range(seeds)])
    return deviations(torch.bincount(drawn.flatten() * bins // n, minlength=bins))


def pairs(draw, n, bins, seeds=8000):
    """Where two neighbouring places are sent together, over many seeds; n is a multiple of bins."""
    drawn = torch.stack([draw(n, seed, torch.tensor([n // 2, n // 2 + 1])) for seed in range(seeds)]) * bins // n
    return deviations(torch.bincount(drawn[:, 0] * bins + drawn[:, 1], minlength=bins**2))


def steps(draw, n, bins, stride=1, count=400_000):
    """The distance, modulo n, of the indices of each place and the place `stride` further on, in one epoch."""
    drawn = draw(n, 1, torch.arange(count) * stride % n)
    return deviations(torch.bincount((drawn.diff() % n) * bins // n, minlength=bins))


def strides(draw, n, bins):
    """The same for places about the square root of n apart, the weakest direction of a network."""
    return steps(draw, n, bins, stride=math.isqrt(n))


def neighbours(draw, n, bins, seeds=4000):
    """How often indices that differ by 1 are adjacent: by chance 2 (n - 1) / n times an epoch."""
    drawn = torch.stack([draw(n, seed, torch.arange(n)) for seed in range(seeds)])
    found, chance = (drawn.diff(dim=1).abs() == 1).sum(), seeds * 2 * (n - 1) / n
    return float((found - chance) / math.sqrt(chance))


TESTS = [
    *((positions, n, bins) for n, bins in [(1000, 10), (10**6, 50), (10**12, 50)]),
    *((pairs, n, 10) for n in (10**6, 10**12)),
    *((test, n, 500) for test in (steps, strides) for n in (2**24 + 43, 10**12)),
    *((neighbours, n, 0) for n in (64, 300)),
]


def test_the_keyed_permutation_is_exact_for_every_n_to_1000():
    for n in [*range(1, 1001), 4096, 65_537, 100_003]:
        places = torch.arange(n)
        drawn = KeyedPermutation(n, seed=n, epoch=1).take(places)
        assert drawn.dtype == torch.int64 and torch.equal(drawn.sort().values, places), n
    assert KeyedPermutation(2**62, 0, 0).take(torch.tensor([2**62 - 1, 0])).max() < 2**62


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_permutation_of_a_few_is_drawn_equally_often(n):
    drawn = Counter(
        tuple(keyed(n, seed, torch.arange(n)).tolist()) for seed in range(max(200, 4 * math.factorial(n)))
    )
    counts = torch.tensor([drawn[each] for each in itertools.permutations(range(n))])
    assert abs(deviations(counts)) < 5


@pytest.mark.parametrize(("test", "n", "bins"), TESTS)
def test_the_keyed_permutation_is_as_uniform_as_chance(test, n, bins):
    assert abs(test(keyed, n, bins)) < 5


@pytest.mark.parametrize("test", [positions, pairs, neighbours])
def test_torchs_permutation_passes_the_same_tests(test):
    assert abs(test(by_torch, 100, 10, seeds=2000)) < 5


def test_poor_permutations_fail_the_same_tests(monkeypatch):
    assert abs(pairs(rotated, 10**6, 10)) > 5 and abs(steps(rotated, 10**12, 500)) > 5
    assert abs(positions(lambda n, seed, places: places, 1000, 10)) > 5
    monkeypatch.setattr(permutation, "ROUNDS", 2)
    assert abs(neighbours(keyed, 64, 0)) > 5 and abs(strides(keyed, 10**12, 500)) > 5


def test_epochs_and_seeds_draw_unrelated_orders():
    n = 100_000
    orders = [KeyedPermutation(n, seed, epoch).take(torch.arange(n)) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for one, other in itertools.combinations([torch.arange(n), *orders], 2):
        assert int((one == other).sum()) < 10  # by chance one place in n is the same
        both = (one * 10 // n) * 10 + other * 10 // n
        assert abs(deviations(torch.bincount(both, minlength=100))) < 5
