"""Reads and collates the samples of micro-batches, here or in worker processes of torch's DataLoader."""

import contextlib
import itertools
import multiprocessing
import reprlib
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lib.utils import distributed, seeding
from lib.utils.data.options import MapDataset, options_of
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World
from lib.utils.errors import STOPPING, UsageError, no_exit

WORKERS = 8  # loader processes at most, where -workers does not say


class Fetcher:
    """Collated samples of micro-batches, fetched here or in worker processes that live as long as the loader."""

    def __init__(self, dataset: MapDataset, seed: int, workers: int, pin: bool):
        self.fetch, self.requests, self.loader = Fetch(dataset, seed), _Requests(), None
        if workers:
            self.loader = DataLoader(
                self.fetch,
                batch_size=None,
                sampler=self.requests,
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=True,
                generator=torch.Generator(),  # or iter() would draw from the global one
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )

    def __call__(self, epoch: int, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the micro-batches in order, each with its collated samples."""
        if self.loader is None:
            for micro_batch in micro_batches:
                yield micro_batch, self.fetch[epoch, micro_batch.indices]
            return
        requests, fetched = itertools.tee(micro_batches)
        self.requests.keys = ((epoch, one.indices) for one in requests)
        with _stop_signals_blocked():
            batches = iter(self.loader)
        for batch, micro_batch in zip(batches, fetched):
            if isinstance(batch, UsageError):
                raise batch
            yield micro_batch, batch

    def close(self) -> None:
        """End the worker processes: idle ones by themselves, a busy one by force."""
        running = getattr(self.loader, "_iterator", None)
        if isinstance(running, _MultiProcessingDataLoaderIter):
            running._shutdown_workers()
            for worker in running._workers:
                worker.kill()  # SIGTERM is blocked
                worker.join()


class Fetch(Dataset):
    """A dataset of collated batches, looked up by (epoch, indices), each drawn under its own seed."""

    def __init__(self, dataset: MapDataset, seed: int):
        self.dataset: Any = dataset  # it may have __getitems__
        self.seed, self.options = seed, options_of(dataset)

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        self.current = indices  # the samples that are being fetched
        try:
            with no_exit():  # it would end a worker without a message
                batch = self._read(epoch, indices)
                return self.options.collate_fn(batch) if isinstance(batch, list) else batch
        except Exception as error:
            error.args = (f"{error} (while fetching sample {reprlib.repr(self.current)})",)
            if isinstance(error, UsageError) and get_worker_info():
                return error  # raised here, it would come with the worker's traceback in its message
            raise

    def _read(self, epoch: int, indices: list[int]) -> Any:
        """Return the dataset's items, or a whole batch if the dataset gives batches."""
        if self.options.whole_batches:
            self._seed(epoch, indices[0])
            return self.dataset.__getitems__(indices)
        items = []
        for index in indices:
            self.current = index
            self._seed(epoch, index)
            items.append(self.dataset[index])
        self.current = indices
        return items

    def _seed(self, epoch: int, index: int) -> None:
        if not self.options.fixed:
            seeding.for_sample(self.seed, epoch, index)


class _Requests:
    """The sampler of a DataLoader that lives for many epochs, each with keys of its own."""

    keys: Iterable[tuple[int, list[int]]] = ()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return iter(self.keys)


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Let child processes that start in the block never get the signals that stop a run; `close` ends them.

    If not all can start, all are killed: at its exit, Python would wait for them for ever.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOPPING))
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def workers(flag: int | None, dataset: MapDataset, world: World) -> int:
    """Return the number of loader processes: -workers, else this process's share of the cores but one.

    Without -workers it is 0 for datasets of whole batches and models on the CPU, which they would only slow down.
    """
    if flag is not None:
        return flag
    if world.device.type == "cpu" or options_of(dataset).whole_batches:
        return 0
    return max(1, min(WORKERS, distributed.cores_each(world) - 1))
