"""What a dataset opens or computes for a sample: in each process that reads, and with the same bits."""

import os

import pytest
import torch
from runs import plugins, run, same_tensors, weights
from torch import nn
from torch.utils.data import Dataset, Subset

from lib.utils import runtime

FLAGS = "-arch first -dataset first -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 2 -cpu 2"
ROWS = 32


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Each process has two cores, and nobody sets the number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(runtime, "cores_per_process", lambda world: 2)


class Rows(Dataset):
    """Rows of random numbers in 4 classes."""

    def __init__(self, folder=None):
        self.folder = folder
        self.rows = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[index], index % 4


class LazyFile(Rows):
    """Opens a file at the first sample; two processes that shared it would move each other's place in it."""

    file = opener = None

    def __getitem__(self, index):
        if self.file is None:
            self.file, self.opener = (self.folder / "rows").open("rb", buffering=0), os.getpid()
        assert self.opener == os.getpid(), "another process reads this file"
        self.file.seek(index * 256)
        row = torch.frombuffer(bytearray(self.file.read(256)), dtype=torch.float32)
        assert row.equal(self.rows[index]), "a piece of another row"
        return row, index % 4


class LargeSums(Rows):
    """Items whose last bits depend on the number of threads that sum a large tensor."""

    def __getitem__(self, index):
        large = torch.rand(1 << 18, generator=torch.Generator().manual_seed(index))
        return self.rows[index] + large.sum() / 1e5, index % 4


@pytest.mark.parametrize("flags", ["-workers 2", "-workers 0 -val_workers 2", "-workers 2 -val_workers 0"])
def test_what_a_dataset_makes_at_its_first_sample_is_made_in_each_process_that_reads_samples(flags, tmp_path):
    (tmp_path / "rows").write_bytes(Rows().rows.numpy().tobytes())
    model, whole = {"first": lambda args: nn.Linear(64, 4)}, LazyFile(tmp_path)
    data = {"train": Subset(whole, range(16)), "val": Subset(whole, range(16, ROWS))}
    with plugins(arch=model, dataset={"first": lambda args: data}):
        run(tmp_path, f"{FLAGS} {flags} -hang_minutes 0.5")


def test_items_have_the_same_bits_in_loader_processes_and_in_the_rank(tmp_path):
    model = {"first": lambda args: nn.Linear(64, 4)}
    with plugins(arch=model, dataset={"first": lambda args: LargeSums()}):
        here, there = [run(tmp_path, f"{FLAGS} -workers {number} -model run_{number}") for number in (0, 1)]
    assert "threads:     2\n" in (here / "logs" / "rank_0.log").read_text()
    assert same_tensors(weights(here), weights(there))
    assert os.environ.get("OMP_NUM_THREADS") is None and torch.get_num_threads() == 1
