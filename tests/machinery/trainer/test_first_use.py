"""What a dataset opens or computes for a sample: in each process that reads, by one thread."""

import os

import pytest
import torch
from runs import plugins, run
from torch import nn
from torch.utils.data import Dataset, Subset

FLAGS = "-arch first -dataset first -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 2 -cpu 2 -threads 2"
ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


class Lazy(Dataset):
    """Opens something at the first sample, as a file, whose place two processes would share."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        self.opener = getattr(self, "opener", os.getpid())
        assert self.opener == os.getpid(), "another process reads this file"
        assert torch.get_num_threads() == 1, "sums by another number of threads have other bits"
        return ROWS[index], index % 4


@pytest.mark.parametrize("flags", ["-workers 2", "-workers 0 -val_workers 2", "-workers 2 -val_workers 0"])
def test_what_a_dataset_makes_at_its_first_sample_is_made_in_each_process_that_reads_samples(flags, tmp_path):
    model, whole = {"first": lambda args: nn.Linear(64, 4)}, Lazy()
    data = {"train": Subset(whole, range(16)), "val": Subset(whole, range(16, 32))}
    with plugins(arch=model, dataset={"first": lambda args: data}):
        run(tmp_path, f"{FLAGS} {flags} -hang_minutes 0.5")
