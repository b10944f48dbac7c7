"""Samplers that stop anywhere and go on exactly, on any number of processes; for anyone's own loop, and for code
written for cycling_utils, whose names, arguments and errors these are.

    sampler = InterruptableDistributedSampler(dataset)
    sampler.load_state_dict(saved)                 # if there is a checkpoint
    for epoch in range(sampler.epoch, epochs):
        with sampler.in_epoch(epoch):
            for batch in DataLoader(dataset, batch_size, sampler=sampler):
                ...                                # train
                sampler.advance(len(batch))        # what was trained on counts, not what workers have fetched ahead
                saved = sampler.state_dict()       # the same on all ranks that are in step: one rank's will do
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lib.utils.data.permutation import BLOCK, order


class AdvancedTooFarError(Exception):
    """More was said to be consumed than this rank's share of the epoch holds."""


class HasNotResetProgressError(Exception):
    """Another epoch was set while one was under way."""


class InterruptableDistributedSampler(DistributedSampler):
    """torch's DistributedSampler, its order to the index in every epoch, that goes on from where it stopped.

    `progress` counts the samples that this rank has consumed since the epoch began or, within an epoch, since the
    number of ranks changed; `len()` is what it ends at. Ranks in step have together consumed the first places of
    the epoch's order, and how many, is what the state keeps: loaded on another number of ranks, the rest of the same
    order is dealt out among those, so that no sample comes twice and none is missed. The one exception is torch's
    own: a tail that does not divide by the ranks is filled up from the front of the order or, with `drop_last`, left
    out. Beyond 2^24 samples the order is not torch's, but that of `permutation.KeyedPermutation`.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._begin(0)

    def __len__(self):
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        drawn = order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        for places in self._places():
            yield from drawn.take(places).tolist()

    def advance(self, n: int) -> None:
        """Record that this rank has consumed n more; past the end raises AdvancedTooFarError and records nothing."""
        self._check(self.progress + n, self.num_samples)
        self.progress += n

    @contextmanager
    def in_epoch(self, epoch: int):
        """The epoch as a `with` block; progress returns to 0 at its end, but not when an exception leaves it."""
        self.set_epoch(epoch)
        yield
        self.reset_progress()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; raises HasNotResetProgressError if another one is under way."""
        if epoch != self.epoch and (self.progress or self.start):
            raise HasNotResetProgressError(
                f"epoch {epoch} was set at progress {self.progress} of epoch {self.epoch}: "
                "call reset_progress() first, or use `with sampler.in_epoch(epoch)`"
            )
        self.epoch = epoch

    def reset_progress(self) -> None:
        """Go back to the start of the epoch."""
        self._begin(0)

    _reset_progress = reset_progress  # what most code that was written for cycling_utils calls

    def state_dict(self) -> dict[str, int]:
        """Where the epoch is: plain integers. `start` places were consumed before the ranks became `num_replicas`."""
        return {
            "epoch": self.epoch,
            "progress": self.progress,
            "start": self.start,
            "num_replicas": self.num_replicas,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a saved state, of any number of ranks; one of cycling_utils is taken to be of as many as now.

        Raises AdvancedTooFarError, and changes nothing, if the state is of more samples than the dataset has.
        """
        start, progress = state_dict.get("start", 0), state_dict["progress"]
        replicas = state_dict.get("num_replicas", self.num_replicas)
        self._check(progress, self._share(start, replicas))

        same = replicas == self.num_replicas
        self._begin(start if same else start + progress * replicas)
        self.progress = progress if same else 0
        self.epoch = state_dict["epoch"]

    def _units(self) -> int:
        return len(self.dataset)

    def _share(self, start: int, replicas: int) -> int:
        left = max(self._units() - start, 0)
        return left // replicas if self.drop_last else -(-left // replicas)

    def _begin(self, start: int) -> None:
        self.start, self.progress = start, 0
        self.num_samples = self._share(start, self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _check(self, progress: int, end: int) -> None:
        if not 0 <= progress <= end:
            raise AdvancedTooFarError(f"progress {progress} lies outside 0..{end}, this rank's share of the epoch")

    def _places(self) -> Iterator[Tensor]:
        units, ranks, first, end = self._units(), self.num_replicas, self.start + self.rank, self.num_samples
        for low in range(self.progress, end, BLOCK):
            yield (first + ranks * torch.arange(low, min(low + BLOCK, end), device="cpu")) % units


class InterruptableDistributedGroupedBatchSampler(InterruptableDistributedSampler):
    """Batches of samples of one group (of like aspect ratio, of like length): a DataLoader's `batch_sampler`.

    `group_ids` holds an integer per sample. The epoch's order is cut into batches for all ranks together: each is
    given out in the turn in which its group fills it, then the short ones that remain, so every sample comes once per
    epoch. `progress`, `advance()` and `len()` count this rank's batches, and the batches that are left are dealt out
    anew when the number of ranks changes. Where they do not divide by the ranks the first ones fill up; with
    `drop_last` the tail is left out instead, and so are short batches. Needs a few integers per sample in memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        group_ids: Sequence[int],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        if len(group_ids) != len(dataset):
            raise ValueError(f"{len(group_ids)} group_ids for {len(dataset)} samples: one for each is needed")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: at least 1 is needed")
        self.group_ids, self.batch_size = group_ids, batch_size
        self._groups, self._sizes = _numbered(group_ids)
        full = self._sizes // batch_size
        self._batches_of = full if drop_last else full + (self._sizes % batch_size > 0).long()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        samples, first, last = self._cut()
        for places in self._places():
            for place in places.tolist():
                yield samples[first[place] : last[place]].tolist()

    @property
    def num_batches(self) -> int:
        """The batches of this rank, as `len()`."""
        return self.num_samples

    def advance(self, n: int = 1) -> None:
        """Record that this rank has consumed n more batches; raises AdvancedTooFarError past the end."""
        super().advance(n)

    def _units(self) -> int:
        return int(self._batches_of.sum())

    def _cut(self) -> tuple[Tensor, Tensor, Tensor]:
        """All batches of the epoch in turn: batch k is samples[first[k]:last[k]]."""
        drawn = order(len(self.dataset), self.seed, self.epoch, self.shuffle)[:]
        by_group = torch.argsort(self._groups[drawn], stable=True)

        group = torch.repeat_interleave(self._batches_of)
        number = torch.arange(len(group), device="cpu") - (self._batches_of.cumsum(0) - self._batches_of)[group]
        end = self._sizes.cumsum(0)
        first = (end - self._sizes)[group] + number * self.batch_size
        last = torch.minimum(first + self.batch_size, end[group])

        short = last - first < self.batch_size
        turn = torch.argsort(by_group[last - 1] + len(drawn) * short)
        return drawn[by_group], first[turn], last[turn]


class InterruptableSampler(InterruptableDistributedSampler):
    """The same without distribution, for a dataset that is already this rank's shard.

    `num_replicas` and `rank` are taken, as cycling_utils does, and not used. A state belongs to its shard: load it on
    the same rank of the same number of ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        super().__init__(dataset, 1, 0, shuffle, seed, drop_last)


InterruptibleSampler = InterruptableSampler  # cycling_utils' README spells it so


def aspect_ratio_groups(sizes: Iterable[tuple[int, int]], k: int = 3) -> Tensor:
    """Group ids, (n,) int64 in 0..2k+1, of images by their aspect ratio, from n (width, height) in pixels.

    The bins part width / height at 2k + 1 edges from 1/2 to 2, evenly on a logarithmic scale, as torchvision's
    detection reference does; with k = 0 the only edge is 1: portrait or not.
    """
    ratios = torch.tensor([width / height for width, height in sizes], dtype=torch.float64, device="cpu")
    edges = 2 ** torch.linspace(-1, 1, 2 * k + 1, dtype=torch.float64, device="cpu") if k else ratios.new_ones(1)
    return torch.bucketize(ratios, edges, right=True)


def image_sizes(paths: Iterable[str | Path]) -> list[tuple[int, int]]:
    """(width, height) in pixels of each image file, from its header alone."""
    return [_image_size(path) for path in paths]


def _image_size(path: str | Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def _numbered(group_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The groups as numbers 0..g-1, (n,), and the samples in each, (g,)."""
    _, groups, sizes = torch.unique(torch.as_tensor(group_ids).cpu().long(), return_inverse=True, return_counts=True)
    return groups, sizes
