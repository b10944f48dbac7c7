"""cycling_utils' samplers, which stop anywhere and continue exactly on any number of processes."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lib.utils.data.plan import order


class AdvancedTooFarError(Exception):
    """More was consumed than this rank's share of the epoch."""


class HasNotResetProgressError(Exception):
    """Another epoch was set while one was under way."""


class InterruptableDistributedSampler(DistributedSampler):
    """torch's DistributedSampler, with its order in every epoch, that continues where it stopped.

    `progress` counts the samples that this rank has consumed since the epoch began or, within an epoch, since the
    number of ranks changed; `len()` is where it ends. A state that is loaded on another number of ranks deals the
    rest of the same order out among those: no sample comes twice, and none is missed. As in torch, a tail that does
    not divide by the ranks is filled up from the front of the order or, with `drop_last`, left out.
    """

    dataset: Sized  # torch declares no length

    def __init__(self, dataset: Dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False):
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
        self._advanced = True

    @contextmanager
    def in_epoch(self, epoch: int):
        """The epoch as a `with` block; progress returns to 0 at its end, but not when an exception leaves it."""
        self.set_epoch(epoch)
        yield
        self.reset_progress()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch and keep the progress; raises HasNotResetProgressError after `advance` in another one."""
        if epoch != self.epoch and self._advanced:
            place = f"progress {self.progress} of epoch {self.epoch}"
            raise HasNotResetProgressError(f"epoch {epoch} was set at {place}: call reset_progress() first")
        self.epoch = epoch

    def reset_progress(self) -> None:
        """Go back to the start of the epoch."""
        self._begin(0)

    _reset_progress = reset_progress  # what most code that was written for cycling_utils calls

    def state_dict(self) -> dict[str, int]:
        """Return the progress. `start` places were consumed before the number of ranks became `num_replicas`."""
        state = {name: getattr(self, name) for name in ("epoch", "progress", "start", "num_replicas")}
        return state if isinstance(self, InterruptableSampler) else {**state, "units": self._units()}  # shards differ

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state of any number of ranks; cycling_utils' own is taken to be of as many as now.

        Changes nothing and raises AdvancedTooFarError if the state is of more samples than there are, ValueError if
        it is of another number, within an epoch (of batches, where they are grouped).
        """
        start, progress = state_dict.get("start", 0), state_dict["progress"]
        replicas = state_dict.get("num_replicas", self.num_replicas)
        self._check(progress, self._share(start, replicas))
        units, has_begun = state_dict.get("units", self._units()), bool(start or progress)
        if has_begun and units != self._units():
            raise ValueError(f"the state is of {units} samples or batches, and there are {self._units()}")
        same = replicas == self.num_replicas
        self._begin(start if same else start + progress * replicas)
        self.progress, self.epoch, self._advanced = progress if same else 0, state_dict["epoch"], has_begun

    def _units(self) -> int:
        return len(self.dataset)

    def _share(self, start: int, replicas: int) -> int:
        left = max(self._units() - start, 0)
        return left // replicas if self.drop_last else -(-left // replicas)

    def _begin(self, start: int) -> None:
        self.start, self.progress, self._advanced = start, 0, False
        self.num_samples = self._share(start, self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _check(self, progress: int, end: int) -> None:
        if not 0 <= progress <= end:
            raise AdvancedTooFarError(f"progress {progress} lies outside 0..{end}, this rank's share of the epoch")

    def _places(self, block: int = 8192) -> Iterator[Tensor]:
        units, ranks, first, end = self._units(), self.num_replicas, self.start + self.rank, self.num_samples
        for low in range(self.progress, end, block):
            yield (first + ranks * torch.arange(low, min(low + block, end), device="cpu")) % units


class InterruptableDistributedGroupedBatchSampler(InterruptableDistributedSampler):
    """Batches whose samples are of one group, such as a length: a DataLoader's `batch_sampler`.

    `group_ids` has an integer for each sample. Each batch comes when its group fills it, the short ones last, so that
    every sample comes once in an epoch. `progress`, `advance()` and `len()` count this rank's batches. If the batches
    do not divide by the ranks, the first ones come again; `drop_last` leaves out the tail and short batches instead.
    """

    def __init__(
        self, dataset, group_ids, batch_size, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: at least 1 is needed")
        self.group_ids, self.batch_size = group_ids, batch_size
        ids = torch.as_tensor(group_ids).cpu().long()
        # The groups as numbers from 0, one for each sample, and the samples in each group.
        _, self._groups, self._sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        full = self._sizes // batch_size
        self._batches_of = full if drop_last else full + (self._sizes % batch_size > 0).long()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if len(group_ids) != len(self.dataset):
            raise ValueError(f"{len(group_ids)} group_ids for {len(self.dataset)} samples: one for each is needed")

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
        drawn = order(len(self.dataset), self.seed, self.epoch, self.shuffle)
        by_group = torch.argsort(self._groups[drawn], stable=True)
        group = torch.repeat_interleave(self._batches_of)
        number = torch.arange(len(group), device="cpu") - (self._batches_of.cumsum(0) - self._batches_of)[group]
        end = self._sizes.cumsum(0)
        first = (end - self._sizes)[group] + number * self.batch_size
        last = torch.minimum(first + self.batch_size, end[group])
        turn = torch.argsort(by_group[last - 1] + len(drawn) * (last - first < self.batch_size))  # short ones last
        return drawn[by_group], first[turn], last[turn]


class InterruptableSampler(InterruptableDistributedSampler):
    """The same for a dataset that is already this rank's shard. `num_replicas` and `rank` are not used."""

    def __init__(self, dataset: Dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False):
        super().__init__(dataset, 1, 0, shuffle, seed, drop_last)


InterruptibleSampler = InterruptableSampler  # cycling_utils' README spells it so
