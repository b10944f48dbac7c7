"""Reads a few samples at a start, for what a dataset's file has another effect on than its author expects.

What it reads comes from the run's own loaders, as an epoch 0 has it. Nothing of it may change a training's bits.
"""

import contextlib
import copy
import functools
import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, default_collate

from lib.core import loss
from lib.utils import seeding
from lib.utils.data import fetch, fingerprint
from lib.utils.data.fetch import option
from lib.utils.data.loader import Loader
from lib.utils.data.plan import MicroBatch
from lib.utils.data.tensors import named_tensors, to_device
from lib.utils.data.transforms import Pixels

log = logging.getLogger(__name__)
ROWS, FORK_S, LOST_S = 8, 0.1, 1.5  # in another order: samples, seconds to read them in, seconds to wait for that
DIFFERS = "what %s gives differs each time it is read: no resume is exact (own generators?)"
BATCHES = "training reads %s by __getitems__, which gives others than __getitem__"
DRAWN = "%s is a part of the training samples, and drawn at random like them (augmented?)"
ON_DEVICE = "on_device of %s gives others each time: let it draw by torch, or take `draws`"
ORDER = (
    "what %s gives for sample %d depends on what was read before it (numbers that it gives out, or values that it "
    "keeps, while samples are read?): then other numbers of processes and resumes get other samples"
)
UNUSED = "the %s of %s is not used: %s"
OVERLAP = "%d of %d samples of %s are training samples, too: its figures are not those of new data"
NUMBERS = "%s has its own %s (%d in all): %r is %s there and %s in training; if samples hold it, take the training's"
SCALES = "%s has its own %s (%d in all), %s, and training has %s: if it scales samples, take the training's"
SCALING = re.compile(r"(^|[._])(mean|std|var|mu|median)s?([._]|$)|\.(scale|min)_$")  # in names
LABELS = "%s goes by the dataset's list: there sample %d has the class %s, and itself it has %s"


def warn(trainer: Any) -> None:
    """Warn of samples that training does not get as their dataset gives them, or that their author may not expect."""
    for split, loader in trainer.loaders.items():
        if trainer.plan.data[f"{split} digest"] != fingerprint.NEVER_THE_SAME:  # which the start has named
            for check in (
                warn_of_samplers,
                warn_of_overlap,
                warn_of_own,
                warn_of_batches,
                warn_of_draws,
                warn_of_order,
                warn_of_device,
                warn_of_labels,
            ):
                with contextlib.suppress(Exception):  # of a user's code, which is called as training does not call it
                    check(trainer, split, loader)


def read(loader: Loader, rows: list[int], draw: int = 0) -> Any:
    """Return a batch of these rows, of epoch 0, as the loader's processes read it; `draw`: its random numbers."""
    indices = [row + draw * len(loader.dataset) for row in rows]
    one = MicroBatch(0, 0, indices, len(rows), len(rows), 1, first=True, last=True)
    return next(loader.fetcher(0, [one]))[1]


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two batches have the same numbers, of any type, up to rounding."""
    parts, others = (dict(named_tensors(batch)) for batch in (one, other))
    both = [(part.to(torch.complex128), others[name].to(torch.complex128)) for name, part in parts.items()]
    return all(is_close(a, b) for a, b in both)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same type have the same shape, and the same numbers up to rounding."""
    return one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


def warn_of_batches(trainer: Any, split: str, loader: Loader) -> None:
    """Compare the two ways of a dataset that gives batches; not if its single samples are drawn."""
    dataset, collate_fn = loader.dataset, option(loader.dataset, "collate_fn")
    if loader.workers or not fetch.gives_batches(dataset):
        return
    seeding.seed(seeding.SAMPLE, 0, 0, 0)
    batch = dataset.__getitems__([0])
    if collate_fn and not isinstance(batch, list):  # then single samples are read
        return
    collate = collate_fn or default_collate
    batch = collate(batch) if isinstance(batch, list) else batch
    singles = []
    for seed in (0, 1):
        seeding.seed(seeding.SAMPLE, seed, 0, 0)
        singles.append(collate([dataset[0]]))
    if are_alike(*singles) and not are_alike(singles[0], batch):
        log.warning(BATCHES, type(fetch.nested(dataset, wrapped=False)[-1]).__name__)


def warn_of_draws(trainer: Any, split: str, loader: Loader) -> None:
    """Read a sample again if nothing has yet, and with other draws if a validation set is cut from the training's."""
    of_train = {id(one) for one in fetch.nested(trainer.loaders["train"].dataset, wrapped=False)}
    is_shared = any(id(one) in of_train for one in fetch.nested(loader.dataset, wrapped=False))
    is_unread = isinstance(option(loader.dataset, "fingerprint"), str | int)  # the start took its word for it
    if is_unread and not are_alike(read(loader, [0]), read(loader, [0])):
        log.warning(DIFFERS, split)
        return
    is_cut = split != "train" and is_shared and not trainer.args.overfit
    if is_cut and not are_alike(read(loader, [0]), read(loader, [0], draw=1)):
        log.warning(DRAWN, split)


def warn_of_order(trainer: Any, split: str, loader: Loader) -> None:
    """Read some training samples in two forked processes, in order, and backwards after other draws."""
    dataset, world = loader.dataset, loader.world
    if split != "train" or not world.is_main or sys.platform != "linux" or fetch.gives_batches(dataset):
        return
    rows = list(dict.fromkeys(number * (len(dataset) - 1) // ROWS for number in range(ROWS + 1)))
    found = read_in_fork(loader, rows, trainer.args.data, FORK_S)
    back = [*found][::-1] if len(found) > 2 else []  # fewer take long to read
    others = [row + len(dataset) for row in back]
    again = read_in_fork(loader, [*others, *back], trainer.args.data, 3 * FORK_S) if back else {}
    if odd := [row for row in found if again.get(row, found[row]) != found[row]]:
        log.warning(ORDER, split, odd[0])


def read_in_fork(loader: Loader, indices: list[int], data: str, seconds: float) -> dict[int, str]:
    """Return the digests of samples that a forked process reads, the first one and as many as it can in `seconds`."""
    digest = functools.partial(fingerprint.digest_batch, collate_fn=fetch.option(loader.dataset, "collate_fn", len))
    reader = fetch.Fetch(loader.dataset, loader.seed, functools.partial(digest, data=data))
    return in_fork(digests, reader, indices, seconds) or {}


def in_fork(function: Callable, *arguments: Any) -> Any:
    """Return what a function returns in a forked process; None if it takes too long, or fails."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(theirs, os.getpid(), function, *arguments), daemon=True)
    with fetch.stop_signals_blocked():
        process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LOST_S) else None  # it may wait for a thread that only this process has
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
        ours.close()


def send(pipe: Connection, parent: int, function: Callable, *arguments: Any) -> None:
    """Send what a function returns in a process that `parent` has forked."""
    fetch.begin_worker(parent, 0)
    with contextlib.suppress(Exception):  # what fails here fails in training, too, with its message
        pipe.send(function(*arguments))


def digests(reader: fetch.Fetch, indices: list[int], seconds: float) -> dict[int, str]:
    """Return the digests of samples, of as many as can be read in this time."""
    found, end = {}, None
    with contextlib.suppress(Exception):
        for index in indices:
            found[index] = str(reader[0, MicroBatch(0, 0, [index], 1, 1, 1, first=True, last=True)][1])
            end = end or time.monotonic() + seconds  # the first read may open files
            if time.monotonic() > end:
                break
    return found


def warn_of_samplers(trainer: Any, split: str, loader: Loader) -> None:
    """Warn of samplers that nothing draws by."""
    if getattr(loader.dataset, "batch_sampler", None) is not None:
        log.warning(UNUSED, "batch_sampler", split, "micro-batches are cut from the order of a sampler")
    if split != "train" and getattr(loader.dataset, "sampler", None) is not None:
        log.warning(UNUSED, "sampler", split, "all its samples are read, in their order; take a Subset")


def warn_of_overlap(trainer: Any, split: str, loader: Loader) -> None:
    """Warn of a validation or test set with rows of a dataset that training draws."""
    of_train = trainer.loaders["train"].dataset
    shared = {id(one) for one in fetch.nested(of_train, wrapped=False)}
    shared &= {id(one) for one in fetch.nested(loader.dataset, wrapped=False)}
    if split not in ("val", "test") or not shared or trainer.args.overfit:
        return
    order = fetch.draw_order(of_train, trainer.args.seed, 0)
    drawn = torch.arange(len(of_train)) if order is None else torch.as_tensor(order) % len(of_train)
    trained = [*places(of_train, drawn)]
    count = 0
    for key, rows in places(loader.dataset, torch.arange(len(loader.dataset))):
        others = [one for other, one in trained if other == key]
        count += int(torch.isin(rows, torch.cat(others)).sum()) if others else 0
    if count:
        log.warning(OVERLAP, count, len(loader.dataset), split)


def places(dataset: Any, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the datasets from which a Subset or a ConcatDataset reads these rows, by their ids, and rows in them."""
    if isinstance(dataset, Subset):
        yield from places(dataset.dataset, torch.as_tensor(dataset.indices)[rows])
    elif isinstance(dataset, ConcatDataset):
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            begin = end - len(part)  # pyright: ignore[reportArgumentType]
            yield from places(part, rows[(rows >= begin) & (rows < end)] - begin)
    else:
        yield id(dataset), rows


def warn_of_own(trainer: Any, split: str, loader: Loader) -> None:
    """Warn of what each split's dataset has made from its own samples, and should share: numbers of names, scales."""
    of_train = {type(one): one for one in fetch.nested(trainer.loaders["train"].dataset)}
    numbers, scales = {}, {}
    for one in fetch.nested(loader.dataset) if split != "train" else ():
        own, others = own_values(one), own_values(of_train.get(type(one)))
        for name in sorted(own.keys() & others.keys()):
            value, other, where = own[name], others[name], f"{type(one).__name__}.{name}"
            if isinstance(value, dict) and isinstance(other, dict):
                odd = [(key, value[key], other.get(key, "none")) for key in renumbered(value, other)]
                if 2 * len(value.keys() & other.keys()) >= len(value):  # else names of its files, or the like
                    numbers |= {where: odd[0]} if odd else {}
            elif isinstance(value, Tensor) and isinstance(other, Tensor) and not is_close(value, other):
                scales[where] = [part.flatten()[:3].tolist() for part in (value, other)]
    for text, found in ((NUMBERS, numbers), (SCALES, scales)):
        for where, facts in [*found.items()][:1]:
            log.warning(text, split, where, len(found), *facts)


def renumbered(own: dict[str, int], others: dict[str, int]) -> list[str]:
    """Return the names that have another number, or whose number another name has."""
    names = {number: name for name, number in others.items()}
    return [one for one, number in own.items() if others.get(one, number) != number or names.get(number, one) != one]


def own_values(dataset: Any) -> dict[str, dict[str, int] | Tensor]:
    """Return the attributes that number names, as {name: number}, and means and scales, as tensors."""
    found = {}
    for name, value in attributes(dataset):
        if numbers := numbering(value, len(dataset)):
            found[name] = numbers
        elif SCALING.search(name.lower()):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a function, None
                found[name] = torch.as_tensor(value, dtype=torch.float64)
    return found


def attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield a dataset's attributes; of a table of pandas its categories, of a part of scikit-learn what is fitted."""
    for name, value in getattr(dataset, "__dict__", {}).items():
        if hasattr(value, "select_dtypes"):
            columns = value.select_dtypes("category")
            yield from ((f"{name}[{key!r}]", [*map(str, columns[key].cat.categories)]) for key in columns)
        elif hasattr(value, "fit"):
            for key, part in vars(value).items():
                if key == "categories_":
                    yield from ((f"{name}.{key}[{number}]", [*map(str, one)]) for number, one in enumerate(part))
                elif key.endswith("_"):
                    yield f"{name}.{key}", [*map(str, part)] if key == "classes_" else part
        else:
            yield name, value


def numbering(value: Any, count: int) -> dict[str, int] | None:
    """Return {name: number} of a vocabulary or the like, None for what is none. `count`: of samples, not of names."""
    if isinstance(value, list | tuple) and len(value) != count:
        names = [one for one in value if isinstance(one, str)]
        value = {one: number for number, one in enumerate(names)} if len(names) == len(value) else None
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value):
        return None
    return value if {*value.values()} in ({*range(len(value))}, {*range(1, len(value) + 1)}) else None


def warn_of_device(trainer: Any, split: str, loader: Loader) -> None:
    """Let `on_device` change one batch twice, under the same seed."""
    on_device, device = option(loader.dataset, "on_device"), loader.world.device
    if on_device is None or isinstance(on_device, Pixels) or not (device.type == "cpu" or trainer.args.deterministic):
        return
    rows, found = [*range(len(loader.plan.cut(0)[0]))], []
    batch, draws = read(loader, rows), seeding.uniform(loader.seed, 0, rows)
    loader.fetcher.fetch.set_epoch(0)
    for _ in range(2):
        seeding.seed(loader.stream, loader.seed, 0, 0, 1, device=device)
        found.append(on_device(to_device(copy.deepcopy(batch), device), to_device(draws.clone(), device)))
    if not are_alike(*found):
        log.warning(ON_DEVICE, split)


def warn_of_labels(trainer: Any, split: str, loader: Loader) -> None:
    """Compare the classes that -balance and -class_weights balanced count with the targets of three samples."""
    args, on_device = trainer.args, option(loader.dataset, "on_device")
    is_counted = args.balance or args.class_weights == "balanced"
    if split != "train" or not is_counted or not isinstance(on_device, Pixels | None):
        return
    from scripts import sampling  # not in each project

    flag = "-balance" if args.balance else "-class_weights balanced"
    listed = sampling.class_numbers(loader.dataset, flag).tolist()
    for row in (0, len(listed) // 2, len(listed) - 1):
        targets = [loss.split_batch(read(loader, [row], draw))[1] for draw in (0, 1)]  # which noise may change
        given = [one.tolist() for one in targets if isinstance(one, Tensor) and not one.is_floating_point()]
        if given and all(len(one) == 1 and one[0] != listed[row] for one in given):
            log.warning(LABELS, flag, row, listed[row], given[0][0])
            return
