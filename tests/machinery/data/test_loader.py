"""The loaders: torch's order, split over steps and ranks, each sample once, with the same random numbers anywhere."""

import contextlib
import functools
import itertools
import multiprocessing
import random
import time

import numpy as np
import pytest
import torch
import truth
from command_line import parsed
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from items import Items
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from lib.utils.checkpoint import resume
from lib.utils.data import fetch, loader
from lib.utils.data.loader import Loader
from lib.utils.data.plan import Plan, order
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World

STEADY = settings(deadline=None, derandomize=True, max_examples=200)
SEEDS, EPOCHS, RANKS = st.integers(0, 2**31), st.integers(0, 40), st.integers(1, 9)


@st.composite
def plans(draw):
    """Plans as `resume.plan` makes them: the micro-batch divides the batch."""
    samples, batch = draw(st.integers(1, 150)), draw(st.integers(1, 40))
    micro = draw(st.sampled_from([part for part in range(1, batch + 1) if batch % part == 0]))
    plan = Plan(samples, batch, micro, draw(st.booleans()))
    assume(plan.steps)
    return plan


def new_loader(dataset, plan, rank, ranks=1, *, seed=0, shuffle=True, workers=0, round_robin=False):
    world = World(rank=rank, size=ranks)
    return Loader(dataset, plan, world, seed=seed, shuffle=shuffle, workers=workers, round_robin=round_robin)


def all_shares(plan, ranks, epoch=0, first_step=0, **options):
    all_ranks = [new_loader(range(plan.samples), plan, rank, ranks, **options) for rank in range(ranks)]
    return [list(one.micro_batches(epoch, first_step)) for one in all_ranks]


def without_padding(shares):
    """The micro-batches of all ranks without padding, in the order of the run."""
    return sorted((one for share in shares for one in share if one.count), key=lambda one: (one.step, one.number))


@STEADY
@given(plan=plans())
@example(plan=Plan(150, 64, 8))
@example(plan=Plan(5, 40, 40))
@example(plan=Plan(13, 8, 1))
@example(plan=Plan(7, 4, 2))
def test_a_step_is_cut_into_full_micro_batches_and_a_short_step_into_parts_of_at_least_two_samples(plan):
    end = plan.steps * plan.batch if plan.drop_last else plan.samples
    steps = [plan.cut(step) for step in range(plan.steps)]
    edges = [edge for parts in steps for part in parts for edge in (part.start, part.stop)]
    assert edges[0] == 0 and edges[-1] == end and edges[1:-1:2] == edges[2::2], "a sample is missing or there twice"
    for parts in steps:
        sizes = [len(part) for part in parts]
        if sum(sizes) == plan.batch:
            assert set(sizes) == {plan.micro}
        else:
            assert parts is steps[-1] and len(parts) <= plan.batch // plan.micro
            assert max(sizes) - min(sizes) <= 1 and max(sizes) <= plan.micro
            assert min(sizes) >= 2 or sizes == [1] or plan.micro <= 2, "BatchNorm needs two samples if possible"


@STEADY
@given(plan=plans(), ranks=RANKS, seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans(), round_robin=st.booleans())
def test_ranks_see_each_sample_once_in_torchs_order_in_equal_shares(plan, ranks, seed, epoch, shuffle, round_robin):
    shares = all_shares(plan, ranks, epoch, seed=seed, shuffle=shuffle, round_robin=round_robin)
    seen = [index for key in without_padding(shares) for index in key.indices]
    last = {key.step: (key.number, key.indices) for key in without_padding(shares)}
    padding = [key for share in shares for key in share if not key.count]
    assert all((key.number, key.indices) == last[key.step] for key in padding), "it may give what no other one does"
    wanted = truth.order(plan.samples, epoch=epoch, seed=seed, shuffle=shuffle)
    assert seen == (wanted[: plan.steps * plan.batch] if plan.drop_last else wanted)
    for step in range(plan.steps):
        here = [[key for key in share if key.step == step] for share in shares]
        size = sum(key.count for keys in here for key in keys)
        real = [len([key for key in keys if key.count]) for keys in here]
        assert max(real) - min(real) <= 1, "unequal shares"
        for keys in here:
            assert [key.first for key in keys] == [True] + [False] * (len(keys) - 1)
            assert [key.last for key in keys] == [False] * (len(keys) - 1) + [True]
            assert all(key.step_samples == size and 0 < len(key.indices) <= plan.micro for key in keys)
            assert all(key.count == len(key.indices) for key in keys if key.count)
            assert all(key.step_parts == len(plan.cut(step)) for key in keys)
            turns = [key.number // ranks for key in keys if key.count]
            assert not round_robin or turns == [*range(len(turns))], "with round robin each rank has one in each turn"
        assert len({len(keys) for keys in here}) == 1, "fsdp needs all ranks in every forward pass"


@STEADY
@given(samples=st.integers(1, 60), block=st.integers(1, 70), seed=SEEDS, epoch=EPOCHS)
def test_blocks_of_neighbours_stay_together_in_an_order_of_all_samples(samples, block, seed, epoch):
    drawn = order(samples, seed, epoch, block=block).tolist()
    assert sorted(drawn) == [*range(samples)]
    places = {index: place for place, index in enumerate(drawn)}
    assert all(places[index] == places[index - 1] + 1 for index in range(samples) if index % block)


@STEADY
@given(plan=plans(), ranks=RANKS, others=RANKS, seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_an_epoch_resumes_at_any_step_on_any_number_of_ranks(plan, ranks, others, seed, epoch, data):
    first = data.draw(st.integers(0, plan.steps))
    assert all_shares(plan, ranks, epoch, first, seed=seed) == [
        [key for key in share if key.step >= first] for share in all_shares(plan, ranks, epoch, seed=seed)
    ]
    before = [one for one in without_padding(all_shares(plan, ranks, epoch, seed=seed)) if one.step >= first]
    after = without_padding(all_shares(plan, others, epoch, first, seed=seed, round_robin=data.draw(st.booleans())))
    both = [[(one.step, one.number, one.indices) for one in ones] for ones in (before, after)]
    assert both[0] == both[1], "the micro-batches are the same on any rank"


@pytest.mark.parametrize(
    ("nodes", "before", "micro"),
    [(None, None, 32), ("1:4", None, 8), ("4", None, 8), ("1:4", 16, 16), (None, 16, 16), ("1:4", 48, 48)],
)
def test_the_default_micro_batch_fits_the_most_processes_or_is_the_first_starts(nodes, before, micro, monkeypatch):
    """With two processes on this machine and a batch of 64, also where 48 does not divide it."""
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    for name, value in {"TORCHELASTIC_MAX_RESTARTS": "9", "PET_NNODES": nodes}.items() if nodes else ():
        monkeypatch.setenv(name, value)
    args = parsed("-batch_size 64")
    config = {"batch_size": 64, "batch_per_gpu": None, "micro_batch": before}
    plan = resume.plan(args, {"samples": 1000}, World(size=2, local_size=2), config if before else {})
    assert (plan.samples, plan.batch, plan.micro) == (1000, 64, micro)


ROWS = Tensors(torch.arange(80).view(40, 2), torch.arange(40) % 3)
DICTS = [{"row": torch.full((2,), number), "more": (number, float(number))} for number in range(40)]
DATA = {
    "in memory": ROWS,
    "part of a part": Subset(Subset(ROWS, range(0, 40, 2)), [3, 1, 19, 7, 4]),
    "a list": [(number, float(number)) for number in range(23)],
    "part of dicts with a tuple": Subset(DICTS, [9, 8, 30, 2, 11, 4, 5]),
    "with its own collate_fn": Items([*range(9)], collate_fn=lambda items: (np.array(items), [1])),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", DATA.values(), ids=DATA)
def test_a_batch_has_the_samples_of_its_key_for_any_kind_of_dataset(dataset, workers):
    for rank in range(2):
        one = new_loader(dataset, Plan(len(dataset), 8, 2), rank, 2, workers=workers)
        for epoch, first in ((0, 0), (1, 0), (1, 2)):
            fetched = list(one.epoch(epoch, first))
            assert [key for key, _ in fetched] == list(one.micro_batches(epoch, first))
            for key, batch in fetched:
                wanted = getattr(dataset, "collate_fn", default_collate)([dataset[index] for index in key.indices])
                torch.testing.assert_close(batch, wanted, rtol=0, atol=0)
                assert type(batch) is type(wanted) or not hasattr(dataset, "collate_fn")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 3])
def test_an_epoch_that_is_left_early_affects_neither_the_next_nor_one_around_it(workers):
    one, around = new_loader(list(range(50)), Plan(50, 8, 4), 0, workers=workers), []

    def check(epoch, count):
        batches = itertools.islice(one.epoch(epoch), count)
        assert [row for _, batch in batches for row in batch.tolist()] == truth.order(50, epoch=epoch)[: 4 * count]

    check(0, 3)
    for number, (_, batch) in enumerate(one.epoch(1)):
        around += batch.tolist()
        if number in (0, 1, 5, 12):  # at the last one, nothing of it is left to read
            check(2, number + 1)
    assert around == truth.order(50, epoch=1)
    check(3, 0)
    check(4, 13)


def test_worker_processes_end_with_the_run_even_if_they_hang(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # seconds, for each process
    args = parsed("-workers 2 -shuffle no")
    before = multiprocessing.active_children()
    for data in (Items([0] + 19 * [lambda: time.sleep(600)]), ROWS):
        with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as stack:
            both = loader.open_loaders({"train": data, "val": ROWS}, Plan(20, 1, 1), World(), args, stack)
            batches = [one.epoch(0) for one in both.values()]
            first = [next(each) for each in batches]
            children = [one for one in multiprocessing.active_children() if one not in before]
            assert len(first) == 2 and len(children) == 4 and all(child.is_alive() for child in children)
            1 / 0  # noqa: B018
        assert not any(child.is_alive() for child in children)
    assert set(multiprocessing.active_children()) <= set(before)


def draw(index):
    """A sample that is drawn from every random generator."""
    return index, random.random(), np.random.random(), torch.rand(()).double(), random.getrandbits(40)


DRAWN = Items([functools.partial(draw, index) for index in range(30)])


class Whole(Items):
    """Has whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def random_samples(dataset, epoch, ranks=1, first=0, workers=0, seed=3):
    found = {}
    for rank in range(ranks):
        one = new_loader(dataset, Plan(30, 8, 2), rank, ranks, seed=seed, workers=workers)
        for key, batch in one.epoch(epoch, first):
            rows = zip(*(column.tolist() for column in batch), strict=True)
            found |= {row[0]: row[1:] for row in rows if key.count}
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@settings(deadline=None, derandomize=True, max_examples=4)
@given(epoch=EPOCHS, ranks=st.integers(2, 4), first=st.integers(1, 3), workers=st.integers(1, 3))
@pytest.mark.parametrize("dataset", [Whole(DRAWN.items), Subset(DRAWN, range(30))], ids=["all", "part"])
def test_a_random_sample_is_the_same_for_any_workers_ranks_and_first_step(dataset, epoch, ranks, first, workers):
    wanted = random_samples(dataset, epoch)
    torch.manual_seed(epoch)  # the state of the global generators must not matter
    random.seed(epoch)
    np.random.seed(epoch)
    assert len(wanted) == 30 and wanted == random_samples(dataset, epoch, ranks)
    assert wanted == random_samples(dataset, epoch, workers=workers)
    rest = random_samples(dataset, epoch, ranks, first, workers)
    assert len(rest) == 30 - 8 * first and rest.items() <= wanted.items()


class Curriculum(Dataset):
    """Knows its epoch, and draws on the device."""

    def __init__(self):
        self.epoch = -1

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([self.epoch, index, self.order])

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.order = epoch, torch.rand(()).item()

    def on_device(self, batch, draws):
        assert self.epoch == batch[0, 0], "also where loader processes read"
        return torch.cat([batch, torch.rand(len(batch), 1) + random.random() + np.random.random()], 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["whole", "subset", "joined"])
def test_a_dataset_knows_its_epoch_and_on_device_draws_the_same_on_any_number_of_ranks(workers, kind):
    parts = [Subset(Curriculum(), range(7)), Subset(Curriculum(), range(7, 12))]
    dataset = {"whole": Curriculum(), "subset": Subset(Curriculum(), range(12)), "joined": ConcatDataset(parts)}[kind]
    dataset.on_device = fetch.nested(dataset)[-1].on_device
    found = []
    for ranks in (1, 2, 3):
        loaders = [new_loader(dataset, Plan(12, 8, 2), rank, ranks, workers=workers) for rank in range(ranks)]
        done = [pair for one in loaders for epoch in (0, 1) for pair in one.epoch(epoch, epoch) if pair[0].count]
        for one in loaders:
            one.fetcher.close()
        rows = [batch for _, batch in sorted(done, key=lambda pair: (pair[1][0, 0], pair[0].step, pair[0].number))]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0][:, 0].tolist() == [0] * 12 + [1] * 4 and len(found[0][:, 3].unique()) == 16
