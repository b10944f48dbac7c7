"""Reads and collates the samples of micro-batches, here or in worker processes of torch's DataLoader."""

import contextlib
import fcntl
import functools
import itertools
import multiprocessing
import os
import reprlib
import signal
import stat
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from lib.utils import files, runtime, seeding, watchdog
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World
from lib.utils.errors import FAILED, STOP_SIGNALS, UsageError, load_optional, no_exit

MapDataset: TypeAlias = Any  # has len() and [index]; torch's Dataset does not declare its length
WORKERS = 8  # loader processes at most, without -workers


def option(dataset: Any, name: str, default: Any = None) -> Any:
    """Return an optional attribute of a dataset; a Subset has its own, or those of what it is a part of."""
    if isinstance(dataset, Subset) and name not in vars(dataset):
        return option(dataset.dataset, name, default)
    is_function = name in ("collate_fn", "on_device")
    if isinstance(dataset, ConcatDataset) and (is_function or name == "listing") and not hasattr(dataset, name):
        found = [option(part, name, default) for part in dataset.datasets]
        if is_function and any(one != found[0] for one in found):
            raise UsageError(f"the parts of a ConcatDataset have different {name}: set its own")
        return found[0] if is_function or all(one is None for one in found) else found
    if is_function and not hasattr(dataset, name):
        for inner in [one for one in nested(dataset) if getattr(one, name, None)]:
            fault = f"a {type(dataset).__name__} wraps a {type(inner).__name__}"
            raise UsageError(f"{fault}, whose {name} would not be used: set its own, maybe to None")
    return getattr(dataset, name, default)


def lists(dataset: Any, *names: str) -> bool:
    """Return whether a dataset, or one that it reads from, says something of its samples: `weights`, or `lengths`."""
    found = [getattr(one, name, None) for one in nested(dataset) for name in names]  # a model's may have this name
    return any(hasattr(one, "__len__") and not isinstance(one, str | Mapping) for one in found)


def nested(dataset: Any, wrapped: bool = True) -> list[Any]:
    """Return a dataset and those that it reads from: a Subset's, a ConcatDataset's, those that it has `wrapped`."""
    found, queue = {}, [dataset]
    while queue:
        whole = queue.pop()
        parts = [whole.dataset] if isinstance(whole, Subset) else getattr(whole, "datasets", ())
        parts = [*parts.values()] if isinstance(parts, Mapping) else [*parts]
        for value in getattr(whole, "__dict__", {}).values() if wrapped else ():
            several = value.values() if isinstance(value, dict) else value
            several = several if isinstance(value, dict | list | tuple) else [value]
            first = next(iter(several), None)  # of data: of torch's class, or with the methods of one
            is_data = isinstance(first, Dataset) or (hasattr(first, "set_epoch") and hasattr(first, "__getitem__"))
            parts += several if is_data else []
        found[id(whole)] = whole
        queue += [part for part in parts if id(part) not in found]
    return [*found.values()]


def gives_batches(dataset: Any) -> bool:
    """Return whether `__getitems__` reads all of a dataset: a subclass may have another `__getitem__` alone."""
    for one in nested(dataset, wrapped=False):
        found = [vars(kind) for kind in type(one).__mro__ if {"__getitem__", "__getitems__"} & vars(kind).keys()]
        if not (found and callable(found[0].get("__getitems__"))):  # the first class that has one of them decides
            return False
    return True


def draw_order(dataset: Any, seed: int, epoch: int) -> Tensor | None:
    """Return what a dataset's own `sampler` draws under a seed of the epoch, (samples,) int64; None without one.

    An index that comes again is higher by the number of samples each time, as each time is drawn under its own seed.
    Raises UsageError for one that scripts/sampling.py cannot draw by.
    """
    seeding.seed(seeding.SAMPLER, seed, epoch)  # for an `order` of one's own, too
    if getattr(dataset, "sampler", None) is not None:
        return load_optional("scripts.sampling", "a sampler of the training samples").draw(dataset, epoch)
    if any(getattr(one, "sampler", None) is not None for one in nested(dataset)) and "sampler" not in vars(dataset):
        raise UsageError("only a part of the training samples, or a larger whole, has a sampler: set their own")
    return None


def prefetch(dataset: Any, indices: list[int]) -> None:
    """Call a dataset's `prefetch_samples` with those that are read next; a Subset's is that of its dataset."""
    if isinstance(dataset, Subset):
        prefetch(dataset.dataset, [dataset.indices[index] for index in indices])
    elif hasattr(dataset, "prefetch_samples"):
        dataset.prefetch_samples(indices)


class Fetcher:
    """Collated samples of micro-batches, fetched here or in worker processes that live as long as the loader."""

    def __init__(self, dataset: MapDataset, seed: int, workers: int, pin: bool, collate_fn: Callable | None = None):
        self.fetch, self.loader = Fetch(dataset, seed, collate_fn), None
        if workers:
            self.loader = DataLoader(
                self.fetch,
                batch_size=None,
                sampler=self.fetch,
                collate_fn=tuple,  # (micro-batch, batch): torch's would make tensors of arrays, and lists of tuples
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=True,
                generator=torch.Generator(),  # else iter() draws from torch's global one
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                worker_init_fn=functools.partial(begin_worker, os.getpid()),
            )
            with stop_signals_blocked():
                iter(self.loader)  # before this process reads: forked ones would share a file that it has open

    def __call__(self, epoch: int, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the micro-batches in order, each with its collated samples. Another call may come between two."""
        source = "this process" if self.loader is None else f"{self.loader.num_workers} loader processes (-workers)"
        if len(self.fetch.dataset) != (count := self.fetch.length):
            raise UsageError(f"a dataset of {count} samples has {len(self.fetch.dataset)} now: it must keep them")
        unread, answers, mine = iter(micro_batches), iter(()), None  # unread: whose batches were not yielded yet
        while True:
            watchdog.begin(f"waiting for a batch of {type(self.fetch.dataset).__name__} from {source}")
            if self.fetch.requests is not mine:  # at first, and after another call, which the workers served
                unread, again = itertools.tee(unread)
                self.fetch.requests = mine = ((epoch, one) for one in again)
                answers = map(self.fetch.__getitem__, self.fetch) if self.loader is None else iter(self.loader)
            if (answer := next(answers, None)) is None:
                return
            if isinstance(answer[1], UsageError):
                raise answer[1]
            if answer[0].indices != (one := next(unread)).indices:
                raise UsageError("loader processes answer in another order: the DataLoader needs in_order=True")
            yield one, answer[1]

    def close(self) -> None:
        """End the worker processes: idle ones by themselves, a busy one by force."""
        running = getattr(self.loader, "_iterator", None)
        if running is not None:
            running._shutdown_workers()
            for worker in running._workers:
                worker.kill()  # SIGTERM is blocked
                worker.join()


class Fetch(Dataset):
    """A dataset of collated batches, looked up by (epoch, micro-batch), each drawn under its own seed."""

    def __init__(self, dataset: MapDataset, seed: int, collate_fn: Callable | None = None):
        self.dataset: Any = dataset  # it may have __getitems__
        self.seed, self.length = seed, len(dataset)
        self.by_epoch = [one for one in nested(dataset) if hasattr(one, "set_epoch")][::-1]  # the whole comes last
        self.requests: Iterable[tuple[int, MicroBatch]] = ()  # of the epoch that is read
        self.collate_fn = collate_fn or option(dataset, "collate_fn") or default_collate

    def __iter__(self) -> Iterator[tuple[int, MicroBatch]]:
        """Be also the sampler of a DataLoader that lives for many epochs."""
        return iter(self.requests)

    def __getitem__(self, key: tuple[int, MicroBatch]) -> Any:
        epoch, micro_batch = key
        rows = [index % self.length for index in micro_batch.indices]
        self.current = rows  # for error messages: what is being fetched, one sample or several
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as torch's loader processes do: sums by another number have other bits
        try:
            with no_exit():  # sys.exit would end a worker without a message
                self.set_epoch(epoch)
                batch = files.retry(lambda: self._read(epoch, micro_batch.indices, rows))
                return micro_batch, self.collate_fn(batch) if isinstance(batch, list) else batch
        except Exception as error:
            place = f"fetching sample {reprlib.repr(self.current)}"
            if "utils/collate" in str(traceback.extract_tb(error.__traceback__)[-1]) and "memory" not in str(error):
                error = UsageError(f"{error}: give the dataset a collate_fn that joins these samples")
            if isinstance(error, UsageError):
                return micro_batch, UsageError(f"{error} (while {place})")  # raised, it would show a worker's
            text = traceback.format_exception_only(error)[0].strip()  # whatever its __str__ does, without its notes
            raise RuntimeError(f"{text} (while {place})") from error
        finally:
            torch.set_num_threads(threads)

    def set_epoch(self, epoch: int) -> None:
        """Let the dataset, and those that it reads from, know the epoch of the next batch."""
        for part in self.by_epoch:
            seeding.seed(seeding.SAMPLE, self.seed, epoch)
            part.set_epoch(epoch)
            if len(self.dataset) != self.length:
                raise UsageError(f"set_epoch({epoch}) changes the number of samples, {self.length} before")

    def _read(self, epoch: int, indices: list[int], rows: list[int]) -> Any:
        """Return the dataset's items in these rows, or a whole batch if the dataset gives batches."""
        if gives_batches(self.dataset):
            seeding.seed(seeding.SAMPLE, self.seed, epoch, indices[0])
            batch = self.dataset.__getitems__(rows)
            if isinstance(batch, list) or not option(self.dataset, "collate_fn"):
                return batch
        prefetch(self.dataset, rows)
        items = []
        for index, row in zip(indices, rows, strict=True):
            self.current = row
            seeding.seed(seeding.SAMPLE, self.seed, epoch, index)
            items.append(self.dataset[row])
        self.current = rows
        return items


def begin_worker(parent: int, number: int) -> None:
    """End this worker process with its parent, at once, as torch (2.15) may not; open its files again."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # that is, with the thread that started it: the main one
    if os.getppid() != parent:  # it was gone before that
        os._exit(FAILED)
    for file in [*files_to_read()]:  # whose place it would share with other processes
        path, flags = f"/dev/fd/{file}", fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        may_read = os.access(path, os.R_OK)
        again = os.open(path, flags) if may_read else os.open(os.devnull, os.O_WRONLY)  # where a read is an error
        os.lseek(again, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(again, file, inheritable=False)
        os.close(again)


def files_to_read() -> Iterator[int]:
    """Yield the descriptors of files to read that are open here: forked processes share their places."""
    for number in sorted(int(one.name) for one in Path("/dev/fd").iterdir()):
        with contextlib.suppress(OSError):
            flags, about = fcntl.fcntl(number, fcntl.F_GETFL), os.fstat(number)
            is_log = flags & os.O_RDWR and os.lseek(number, 0, os.SEEK_CUR) == about.st_size  # to which all write
            if number > 2 and not (is_log or flags & (os.O_WRONLY | os.O_APPEND)) and stat.S_ISREG(about.st_mode):
                yield number


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Let no child that starts in the block get the signals that stop a run; kill all if not all can start."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS))
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():  # Python's exit would wait for them for ever
            child.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def count_workers(args: Namespace, split: str, dataset: MapDataset, world: World) -> int:
    """Return the number of a split's loader processes: by the flags, or its share of the cores but one."""
    if args.debug:
        return 0
    flag = args.workers if split == "train" or args.val_workers is None else args.val_workers
    if flag is not None:
        return flag
    if world.device.type == "cpu" or gives_batches(dataset):  # they would only slow these down
        return 0
    return max(1, min(WORKERS, runtime.cores_per_process(world) - 1))
