"""The samplers: torch's order, stops and changes of the number of ranks, the errors of cycling_utils, and groups."""

import itertools
import json
from collections import Counter

import pytest
import truth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lib.utils.compat import samplers as compat

STEADY = settings(deadline=None, derandomize=True, max_examples=150)
SIZES, WORLDS, SEEDS, EPOCHS = st.integers(0, 200), st.integers(1, 9), st.integers(0, 2**31), st.integers(0, 50)
OPTIONS = st.fixed_dictionaries({"shuffle": st.booleans(), "seed": SEEDS, "drop_last": st.booleans()})
RUNS = st.lists(st.tuples(WORLDS, st.integers(0, 30)), max_size=6)  # numbers of ranks, and of samples before the stop
GROUPS = st.lists(st.integers(-2, 4), max_size=120)


def samplers(ranks, n, cls=compat.InterruptableDistributedSampler, state=None, **options):
    made = [cls(range(n), num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    for sampler in made if state else ():
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return made


def take(sampler, count):
    taken = list(itertools.islice(sampler, count))
    sampler.advance(len(taken))
    return taken


@STEADY
@given(n=SIZES, ranks=WORLDS, epochs=st.lists(EPOCHS, max_size=4), options=OPTIONS)
def test_every_epoch_has_the_order_of_torchs_sampler(n, ranks, epochs, options):
    for rank in range(ranks):
        ours = compat.InterruptableDistributedSampler(range(n), ranks, rank, **options)
        theirs = DistributedSampler(range(n), ranks, rank, **options)
        for epoch in [0, *epochs]:
            theirs.set_epoch(epoch)
            with ours.in_epoch(epoch):
                assert take(ours, n + 1) == list(theirs)
            assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)


@STEADY
@given(n=SIZES, epoch=EPOCHS, options=OPTIONS, runs=RUNS, last=WORLDS)
def test_an_epoch_with_changing_numbers_of_ranks_has_each_sample_once(n, epoch, options, runs, last):
    state, seen = {"epoch": epoch, "progress": 0}, []
    for ranks, count in [*runs, (last, n)]:
        dealt = samplers(ranks, n, state=state, **options)
        seen += [index for turn in zip(*[take(sampler, count) for sampler in dealt], strict=True) for index in turn]
        assert len({json.dumps(sampler.state_dict()) for sampler in dealt}) == 1, "one rank's state will do"
        state = dealt[-1].state_dict()
        assert state["epoch"] == epoch
    wanted = truth.order(n, epoch=epoch, shuffle=options["shuffle"], seed=options["seed"])
    if options["drop_last"]:  # no sample comes twice, and fewer are left out than there are ranks
        assert seen == wanted[: len(seen)] and n - len(seen) < last
        return
    padding = seen[n:]
    assert seen[:n] == wanted
    assert len(padding) < 9 and padding == list(itertools.islice(itertools.cycle(wanted), n, n + len(padding)))


@STEADY
@given(n=st.integers(1, 200), seed=SEEDS, stop=st.integers(0, 250), epoch=EPOCHS)
def test_a_sampler_of_a_shard_visits_all_of_it(n, seed, stop, epoch):
    assert compat.InterruptibleSampler is compat.InterruptableSampler
    first = compat.InterruptableSampler(range(n), num_replicas=4, rank=3, seed=seed)
    first.set_epoch(epoch)
    seen = take(first, min(stop, n))
    second = compat.InterruptableSampler(range(n), seed=seed)
    second.load_state_dict(first.state_dict())
    assert seen + list(second) == truth.order(n, seed=seed, epoch=epoch) and len(second) == n


def test_advancing_past_the_end_is_an_error_and_changes_nothing():
    sampler = compat.InterruptableDistributedSampler(range(10), 3, 0)
    sampler.advance(3)
    for wrong in (2, -4):
        with pytest.raises(compat.AdvancedTooFarError, match=rf"progress {3 + wrong} .*0\.\.4"):
            sampler.advance(wrong)
    assert sampler.progress == 3
    sampler.advance(1)
    assert list(sampler) == []


def test_set_epoch_is_refused_during_an_epoch():
    sampler = compat.InterruptableDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(1)
    sampler.advance(4)
    sampler.set_epoch(1)
    for attempt in (lambda: sampler.set_epoch(2), lambda: sampler.in_epoch(2).__enter__()):
        with pytest.raises(compat.HasNotResetProgressError, match=r"epoch 2 .*progress 4 of epoch 1"):
            attempt()
    fewer = samplers(2, 10, state=sampler.state_dict())[0]
    assert fewer.progress == 0 and len(fewer) == 3
    with pytest.raises(ValueError, match="of 10 samples or batches, and there are 11"):
        samplers(1, 11, state=sampler.state_dict())
    fewer.reset_progress()
    fewer.set_epoch(2)
    assert list(fewer) == truth.order(10, 2, 0, epoch=2)


def grouped_samplers(ranks, groups, state=None, **options):
    kind = compat.InterruptableDistributedGroupedBatchSampler
    return samplers(ranks, len(groups), kind, state, group_ids=groups, **options)


@STEADY
@given(groups=GROUPS, batch=st.integers(1, 9), seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans())
def test_batches_of_one_group_are_in_torchs_order_and_contain_every_sample_once(groups, batch, seed, epoch, shuffle):
    (sampler,) = grouped_samplers(1, groups, batch_size=batch, seed=seed, shuffle=shuffle)
    expected = len(sampler)
    with sampler.in_epoch(epoch):
        batches = list(sampler)
    assert len(batches) == expected == sampler.num_batches
    assert all(len({groups[index] for index in part}) == 1 for part in batches)
    sizes = [len(part) for part in batches]
    assert all(size == batch for size in sizes[: sum(Counter(groups)[g] // batch for g in set(groups))])
    wanted = truth.order(len(groups), epoch=epoch, seed=seed, shuffle=shuffle)
    for group in set(groups):
        mine = [index for part in batches for index in part if groups[index] == group]
        assert mine == [index for index in wanted if groups[index] == group]


@STEADY
@given(groups=GROUPS, batch=st.integers(1, 9), seed=SEEDS, drop_last=st.booleans(), runs=RUNS, last=WORLDS)
def test_grouped_batches_with_changing_numbers_of_ranks_come_once(groups, batch, seed, drop_last, last, runs):
    options = {"batch_size": batch, "seed": seed, "drop_last": drop_last}
    wanted = list(grouped_samplers(1, groups, **options)[0])
    state, seen = {"epoch": 0, "progress": 0}, []
    for ranks, count in [*runs, (last, len(groups))]:
        dealt = grouped_samplers(ranks, groups, state=state, **options)  # a state loads before the first epoch
        assert len({len(sampler) for sampler in dealt}) == 1
        seen += [part for turn in zip(*[take(sampler, count) for sampler in dealt], strict=True) for part in turn]
        state = dealt[-1].state_dict()
    if drop_last:
        assert seen == wanted[: len(seen)] and len(wanted) - len(seen) < last
        assert all(len(part) == batch for part in seen)
        return
    assert seen[: len(wanted)] == wanted
    assert len(seen) - len(wanted) < 9 and all(part in wanted for part in seen)
