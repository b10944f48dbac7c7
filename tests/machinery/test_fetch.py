"""Batches: what goes wrong while one is fetched names the sample, and one of any form keeps it."""

import collections
import multiprocessing
import signal
import types

import pytest
import torch
from torch.utils.data import Dataset

from lib.utils.data import tensors
from lib.utils.data.fetch import Fetcher
from lib.utils.data.loader import Key


class Holed(Dataset):
    """Fails at one sample, and gives None for another."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return None if index == 13 else 1 // (index - 5)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_sample_that_cannot_be_fetched_is_named(workers):
    for indices, said in (([3, 5, 4], r"\(while fetching the sample 5\)"), ([12, 13], r"the samples \[12, 13\]\)")):
        fetched = Fetcher(Holed(), 0, workers, pin=False)
        with pytest.raises((ZeroDivisionError, RuntimeError), match=said):
            next(iter(fetched(0, [Key(0, 0, 2, 8, True, True, indices)])))
        fetched.close()


@pytest.mark.parametrize("change", [torch.zeros_like, torch.Tensor.double])
def test_a_batch_of_any_form_is_changed_to_its_last_tensor(change):
    Pair, Own = collections.namedtuple("Pair", "image label"), type("Own", (dict,), {})
    one = torch.ones(2)
    batch = {"pair": Pair(one, [one, (one, "name")]), "own": Own(x=one)}
    now = tensors.each(batch, change)
    assert [tensor.tolist() for _, tensor in tensors.tensors(now)] == [change(one).tolist()] * 4
    assert all(tensor.dtype == change(one).dtype for _, tensor in tensors.tensors(now))
    assert type(now["pair"]) is Pair and type(now["pair"].label) is list and now["pair"].label[1][1] == "name"


class Ragged(Dataset):
    """Sequences of differing length, which a way of its own puts into a batch."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.arange(index), index

    @staticmethod
    def collate_fn(items):
        return torch.nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True), len(items)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_say_how_its_samples_make_a_batch(workers):
    fetched = Fetcher(torch.utils.data.Subset(Ragged(), range(9)), 0, workers, pin=False)
    rows, count = next(iter(fetched(0, [Key(0, 0, 2, 8, True, True, [2, 3])])))
    assert rows.tolist() == [[0, 1, 0], [0, 1, 2]] and count == 2
    fetched.close()


@pytest.mark.parametrize("killed", [True, False])
def test_a_tensor_that_went_with_its_worker_tells_of_the_worker(killed):
    """Its file descriptor is asked of the worker, who does not answer. An error of the dataset stays what it is."""

    def batches():
        yield 1
        raise ConnectionResetError("by peer")

    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    fetcher = Fetcher(range(3), 0, 0, pin=False)
    fetcher.loader = types.SimpleNamespace(_iterator=types.SimpleNamespace(_workers=[worker]))
    if killed:
        worker.kill()
    with pytest.raises(RuntimeError if killed else ConnectionResetError) as caught:
        list(fetcher._taken(batches()))
    worker.kill()
    worker.join()
    assert not killed or str(caught.value) == f"DataLoader worker (pid {worker.pid}) ended unexpectedly"
