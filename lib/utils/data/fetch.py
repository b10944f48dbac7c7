"""Collated samples, fetched by key: here, or in worker processes."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import signal
import sys
from collections.abc import Iterator
from multiprocessing import connection

import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

from lib.utils import distributed, seeding
from lib.utils.distributed import World
from lib.utils.errors import STOPPING, UsageError, no_exit

WORKERS = 8  # loader processes at most, where -workers does not say


class Fetcher:
    """Collated samples by key, here or in worker processes that live as long as the loader."""

    def __init__(self, dataset: Dataset, seed: int, workers: int, pin: bool):
        self.fetch = Fetch(dataset, seed)
        self.source = _Source()
        self.loader, self.workers = None, workers
        if workers:
            self.loader = DataLoader(
                self.fetch,
                batch_size=None,
                sampler=self.source,
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=True,
                generator=torch.Generator(),  # or iter() would draw from the global one
                multiprocessing_context="fork" if sys.platform == "linux" else multiprocessing.get_start_method(),
                worker_init_fn=_one_thread,
            )

    def __call__(self, epoch: int, keys) -> Iterator:
        """The collated samples of each key, in order."""
        keys = ((epoch, key.indices) for key in keys)
        if self.loader is None:
            return map(self.fetch.__getitem__, keys)
        self.source.keys = keys
        with shielded():
            return self._taken(iter(self.loader))

    def _taken(self, batches) -> Iterator:
        try:
            for batch in batches:
                if isinstance(batch, UsageError):
                    raise batch
                yield batch
        except (OSError, EOFError) as error:  # the dataset's, or of tensors that went with their worker
            workers = {worker.sentinel: str(worker.pid) for worker in self.loader._iterator._workers}
            ended = [workers[one] for one in connection.wait(workers, timeout=1.0)]
            if not ended:
                raise
            raise RuntimeError(f"DataLoader worker (pid {', '.join(ended)}) ended unexpectedly") from error

    def close(self):
        """Ends the worker processes: those at rest by themselves, one that is busy all the same."""
        if self.loader is None or self.loader._iterator is None:
            return
        running, self.loader._iterator = self.loader._iterator, None
        running._shutdown_workers()
        for worker in running._workers:
            worker.kill()  # it has no ear for SIGTERM
            worker.join()


class Fetch(Dataset):
    """A dataset of collated batches, looked up by (epoch, indices), each drawn under its own seed."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed, self.fixed = dataset, seed, is_fixed(dataset)
        self.at = None  # the sample that is being fetched
        self.collate = getattr(inner(dataset), "collate_fn", default_collate)
        self.whole = callable(getattr(inner(dataset), "__getitems__", None))

    def __getitem__(self, key):
        epoch, indices = key
        self.at = None
        try:
            with no_exit():  # it would end a worker without a word
                batch = self._whole(epoch, indices) if self.whole else self._one_by_one(epoch, indices)
                return self.collate(batch) if isinstance(batch, list) else batch
        except Exception as error:
            where = f"samples {_short(indices)}" if self.at is None else f"sample {self.at}"
            error.args = (f"{error} (while fetching the {where})",)
            if isinstance(error, UsageError) and get_worker_info():
                return error  # raised here, it would come with the worker's traceback in its words
            raise

    def _whole(self, epoch, indices):
        if not self.fixed:
            seeding.for_sample(self.seed, epoch, indices[0])
        return self.dataset.__getitems__(indices)

    def _one_by_one(self, epoch, indices):
        batch = [self._sample(epoch, index) for index in indices]
        self.at = None
        return batch

    def _sample(self, epoch, index):
        self.at = index
        if not self.fixed:
            seeding.for_sample(self.seed, epoch, index)
        return self.dataset[index]


class _Source:
    keys = ()

    def __iter__(self):
        return iter(self.keys)


def is_fixed(dataset) -> bool:
    """Whether a dataset says that its items are the same every time, so that no generator needs a seed."""
    return bool(getattr(inner(dataset), "fixed", False))


def inner(dataset):
    """The dataset that a Subset, or a Subset of one, is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _one_thread(_worker):
    torch.set_num_threads(1)


def _short(indices):
    return f"{indices[:8]} and {len(indices) - 8} more" if len(indices) > 8 else str(indices)


@contextlib.contextmanager
def shielded():
    """Child processes started in the block never get the signals that stop a run; they are killed at its end.

    The resource tracker is started first, with its own signals open: it must not outlive the run.
    """
    multiprocessing.resource_tracker.ensure_running()
    there = multiprocessing.active_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOPPING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        started = [one for one in multiprocessing.active_children() if one not in there]
        if started:  # multiprocessing would end them with SIGTERM, and wait for ever
            multiprocessing.util.Finalize(None, _kill, args=(started,), exitpriority=0)
            atexit.register(_kill, started)  # before torch's, which waits too; a forked process has no atexit


def _kill(children):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or torch's handler raises what it takes for a failure
    for one in children:
        one.kill()


def workers(asked: int | None, dataset: Dataset, world: World) -> int:
    """-workers; where that is left open none for data that is fetched by whole batches, nor beside a model on the
    CPU, which they would only slow down, else this process's share of the cores but one."""
    if asked is not None:
        return asked
    if world.device.type == "cpu" or callable(getattr(inner(dataset), "__getitems__", None)):
        return 0
    return max(1, min(WORKERS, distributed.cores_each(world) - 1))
