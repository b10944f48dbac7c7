"""What goes wrong while a batch is fetched names the sample, here and in worker processes."""

import pytest
from torch.utils.data import Dataset

from lib.utils.fetch import Fetcher
from lib.utils.loader import Key


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
