"""Results for tests to compare with, of torch itself and of a run on one process; plugins of a test file."""

from pathlib import Path

import pytest
from runs import plugins, run
from saves import bits
from torch.utils.data import DistributedSampler

from lib.core import loss as losses
from lib.utils.monitoring import metrics


def order(n: int, ranks: int = 1, rank: int = 0, *, epoch: int = 0, **options) -> list[int]:
    """The indices that torch's sampler gives a rank in an epoch; options as it takes them."""
    sampler = DistributedSampler(range(n), ranks, rank, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def measured(criterion, *batches) -> dict[str, float]:
    """The metrics of batches (outputs, targets), each a part of the same samples."""
    sums = metrics.Sums()
    for outputs, targets in batches:
        sums.update(losses.compute_metrics(criterion, outputs, targets))
    return metrics.means(sums.reduce())


def same_bits_everywhere(out: Path, flags: str, *stops: tuple[int, int]) -> Path:
    """A run on one process. Others, on three and on changing numbers of processes, must end with its bits.

    `stops`: the step of each, and the number of processes until then; by default two.
    """
    alone = run(out, f"{flags} -cpu 1 -model alone")
    assert bits(run(out, f"{flags} -cpu 3 -model three")) == bits(alone)
    for limit, processes in stops or ((3, 2), (6, 3)):
        run(out, f"{flags} -cpu {processes} -model moved -limit_steps {limit}", wanted=75)
    assert bits(run(out, f"{flags} -cpu 1 -model moved")) == bits(alone)
    return alone


def file_plugins(**files):
    """A fixture for all tests of a file: the plugins of SMALL and these, as `runs.plugins` takes them."""

    @pytest.fixture(scope="module", autouse=True)
    def added(small_plugins):
        with plugins(**files):
            yield

    return added
