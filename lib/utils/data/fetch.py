"""Reads and collates the samples of micro-batches, here or in worker processes of torch's DataLoader."""

import contextlib
import multiprocessing
import reprlib
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lib.utils import runtime, seeding
from lib.utils.data.options import MapDataset, read_options
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World
from lib.utils.errors import STOP_SIGNALS, UsageError, no_exit

WORKERS = 8  # loader processes at most, without -workers


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
                generator=torch.Generator(),  # else iter() draws from torch's global one
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )

    def __call__(self, epoch: int, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the micro-batches in order, each with its collated samples."""
        requests = ((epoch, micro_batch) for micro_batch in micro_batches)
        if self.loader is None:
            for request in requests:
                with runtime.one_thread():  # as in a worker process: sums by another number have other bits
                    answer = self.fetch[request]
                yield answer
            return
        self.requests.keys = requests
        with _stop_signals_blocked():
            answers = iter(self.loader)
        for answer in answers:
            if isinstance(answer, UsageError):
                raise answer
            yield answer

    def close(self) -> None:
        """End the worker processes: idle ones by themselves, a busy one by force."""
        running = getattr(self.loader, "_iterator", None)
        if isinstance(running, _MultiProcessingDataLoaderIter):
            running._shutdown_workers()
            for worker in running._workers:
                worker.kill()  # SIGTERM is blocked
                worker.join()


class Fetch(Dataset):
    """A dataset of collated batches, looked up by (epoch, micro-batch), each drawn under its own seed."""

    def __init__(self, dataset: MapDataset, seed: int):
        self.dataset: Any = dataset  # it may have __getitems__
        self.seed, self.options = seed, read_options(dataset)

    def __getitem__(self, key: tuple[int, MicroBatch]) -> Any:
        epoch, micro_batch = key
        self.current = indices = micro_batch.indices  # for error messages: what is being fetched
        try:
            with no_exit():  # it would end a worker without a message
                batch = self._read(epoch, indices)
                return micro_batch, self.options.collate_fn(batch) if isinstance(batch, list) else batch
        except Exception as error:
            collating = self.current is indices and not self.options.whole_batches
            text = f"(while {'collating samples' if collating else 'fetching sample'} {reprlib.repr(self.current)})"
            error.args = (f"{error} {text}",)
            if isinstance(error, OSError):  # which shows this instead, if it has a number
                error.strerror = f"{error.strerror} {text}"
            if isinstance(error, UsageError) and get_worker_info():
                return error  # raised here, it would come with the worker's traceback in its message
            if isinstance(error, StopIteration):  # which would end the epoch, as if there were no more samples
                raise RuntimeError(repr(error)) from error
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
            seeding.seed_sample(self.seed, epoch, index)


class _Requests:
    """The sampler of a DataLoader that lives for many epochs, each with keys of its own."""

    keys: Iterable[tuple[int, MicroBatch]] = ()

    def __iter__(self) -> Iterator[tuple[int, MicroBatch]]:
        return iter(self.keys)


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Let child processes that start in the block never get the signals that stop a run; `close` ends them.

    If not all can start, all are killed: at its exit, Python would wait for them for ever.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS))
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def count_workers(flag: int | None, dataset: MapDataset, world: World) -> int:
    """Return the number of loader processes: -workers, else this process's share of the cores but one.

    Without -workers it is 0 for datasets of whole batches and models on the CPU, which they would only slow down.
    """
    if flag is not None:
        return flag
    if world.device.type == "cpu" or read_options(dataset).whole_batches:
        return 0
    return max(1, min(WORKERS, runtime.cores_per_process(world) - 1))
