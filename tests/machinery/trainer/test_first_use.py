"""What a dataset opens or computes for a sample: in each process that reads, by one thread."""

import os

import pytest
import torch
from runs import plugins, run
from torch import nn
from torch.utils.data import Dataset, Subset

FLAGS = "-arch first -dataset first -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 2 -cpu 2 -threads 2"
ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


class LazyFile(Dataset):
    """Opens a file at the first sample; two processes that shared it would move each other's place in it."""

    file = opener = None

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if self.file is None:
            self.file, self.opener = self.path.open("rb", buffering=0), os.getpid()
        assert self.opener == os.getpid(), "another process reads this file"
        assert torch.get_num_threads() == 1, "sums by another number of threads have other bits"
        self.file.seek(index * 256)
        row = torch.frombuffer(bytearray(self.file.read(256)), dtype=torch.float32)
        assert row.equal(ROWS[index]), "a piece of another row"
        return row, index % 4


@pytest.mark.parametrize("flags", ["-workers 2", "-workers 0 -val_workers 2", "-workers 2 -val_workers 0"])
def test_what_a_dataset_makes_at_its_first_sample_is_made_in_each_process_that_reads_samples(flags, tmp_path):
    (tmp_path / "rows").write_bytes(ROWS.numpy().tobytes())
    model, whole = {"first": lambda args: nn.Linear(64, 4)}, LazyFile(tmp_path / "rows")
    data = {"train": Subset(whole, range(16)), "val": Subset(whole, range(16, 32))}
    with plugins(arch=model, dataset={"first": lambda args: data}):
        run(tmp_path, f"{FLAGS} {flags} -hang_minutes 0.5")
