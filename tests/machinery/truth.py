"""Results of torch itself, for tests to compare with."""

from torch.utils.data import DistributedSampler


def order(n: int, ranks: int = 1, rank: int = 0, *, epoch: int = 0, **options) -> list[int]:
    """The indices that torch's sampler gives a rank in an epoch; options as it takes them."""
    sampler = DistributedSampler(range(n), ranks, rank, **options)
    sampler.set_epoch(epoch)
    return list(sampler)
