"""What a run's data are: how many samples, which classes, and a digest of three samples of each split.

A run continues on the same data only. The folder of the data may move, so paths in samples count from there.
"""

import contextlib
import functools
import hashlib
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.utils import distributed, seeding
from lib.utils.data import fetch, plan
from lib.utils.data.fetch import MapDataset, option
from lib.utils.data.plan import MicroBatch
from lib.utils.errors import UsageError

NEVER_THE_SAME = "another one each time"  # as a digest: samples that are not a function of their seeds


def describe(splits: dict[str, MapDataset], args: Namespace, world: distributed.World) -> dict[str, Any]:
    """Return the facts by which a later start knows the data again. All ranks call this, and all must have the same.

    A run with loader processes reads in one of its own: a file that a dataset opens at first use is shared by none.
    """
    facts: dict[str, Any] = {"classes": _class_names(splits["train"]), "sampler digest": "none"}
    seeding.seed(seeding.SAMPLER)
    facts["order digest"] = _digest([plan.order(99, 0, 0), torch.initial_seed()], "")  # of plan.py and seeding.py
    facts["steps digest"] = _digest([plan.Plan(10**9, 32, 8).steps, str(plan.Plan(99, 32, 9).cut(3))], "")
    workers = max(fetch.count_workers(args, name, part, world) for name, part in splits.items())
    for name, part in splits.items():
        names, of_train = (_class_names(one, wrapped=True) for one in (part, splits["train"]))
        if of_train and names != of_train[: len(names)]:  # the same number would be another class
            fault = f"the classes of {name} are {names!s:.80}, and those of train {of_train!s:.80}"
            raise UsageError(f"-dataset {args.dataset}: {fault}: number them alike, or set {name}.classes")
        own, listing = option(part, "fingerprint"), option(part, "listing")  # of all its files' names and classes
        read = functools.partial(_digest_of_three, part, args, min(2, workers))
        digest = own if isinstance(own, str | int) else distributed.attempt(read, world)
        order = fetch.draw_order(part, args.seed, 0) if name == "train" and args.shuffle else None
        count = len(part if order is None else order)
        if order is not None:
            if args.shuffle_block > 1:
                raise UsageError(f"-shuffle_block {args.shuffle_block}: training has a sampler, weights or lengths")
            drawn = [(0, order), *((epoch, fetch.draw_order(part, args.seed, epoch)) for epoch in (9, 0, 0, 5, 0))]
            if any(one is None or len(one) != count for _, one in drawn):
                raise UsageError(f"the sampler of {name} gives {count} samples at first, and others in a later epoch")
            marks = [(epoch, _digest(one, "")) for epoch, one in drawn]
            is_same = len({mark for epoch, mark in marks if epoch == 0}) == 1  # after other epochs, too
            facts["sampler digest"] = f"{marks[0][1]} {marks[1][1]}" if is_same else NEVER_THE_SAME
        all_ranks = distributed.gather((count, digest, listing, facts), world)
        odd = [rank for rank, theirs in enumerate(all_ranks) if theirs != all_ranks[0]]
        if odd:
            fault = f"-dataset {args.dataset}: the {name} samples of rank {odd[0]} are not those of rank 0"
            raise UsageError(f"{fault}: get_dataset must give the same on each; seed the generators that it makes")
        facts |= {} if listing is None else {f"{name} files digest": listing}
        facts |= {f"{name} digest": digest, "samples" if name == "train" else f"{name} samples": count}
    return facts


def _class_names(part: MapDataset, wrapped: bool = False) -> list[str]:
    """Return the names of a split's classes, or of its parts'; [] without, as where a library has a number there."""
    own = option(part, "classes")
    found = [getattr(one, "classes", None) for one in fetch.nested(part, wrapped)] if own is None else [own]
    found = [[*one] if one is not None and getattr(one, "ndim", 0) == 1 else one for one in found]
    named = [[*map(str, one)] for one in found if isinstance(one, Sequence | Mapping)]
    if not wrapped and any(one != named[0] for one in named):
        raise UsageError("joined data sets have different classes: number them alike, or set `classes` of the whole")
    return named[0] if named and all(one == named[0] for one in named) else []


def _digest_of_three(part: MapDataset, args: Namespace, workers: int) -> str:
    """Return the digest of the first, middle and last sample of a split, each fetched under its own seed."""
    draws = [[row + draw * len(part) for row in (0, len(part) // 2, len(part) - 1)] for draw in (0, 0, 1, 2, 0, 0)]
    keys = [MicroBatch(0, 0, rows, 3, 3, 1, first=True, last=True) for rows in draws]  # others may change a sample
    digest = functools.partial(digest_batch, collate_fn=option(part, "collate_fn", len), data=args.data)
    reader = fetch.Fetcher(part, args.seed, workers, pin=False, collate_fn=digest)
    with contextlib.closing(reader):
        first, second, _, _, *later = (_digest(batch, args.data) for _, batch in reader(0, keys))  # in turn
    return first if {second, *later} == {first} else NEVER_THE_SAME  # of four, as two may be alike


def digest_batch(items: list, collate_fn: Callable, data: str) -> str:
    """Return the digest of samples, and of the batch that a dataset's own collate_fn makes of them, if it can."""
    batch = None
    with contextlib.suppress(Exception):  # it may take another number of them
        batch = collate_fn(items)
    return _digest([items, batch], data)


def _digest(value: Any, data: str, depth: int = 9) -> str:
    """Return a digest of a sample. An object of an unknown kind counts by its attributes, nine levels deep."""
    if isinstance(value, Tensor) and not value.is_nested:
        whole = value.detach().cpu().to_dense().resolve_conj().clone(memory_format=torch.contiguous_format)
        content = f"{value.dtype} {tuple(value.shape)}", whole.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping | list | tuple | Tensor) or str(getattr(value, "dtype", "")) == "object":
        content = [_digest(one, data, depth - 1) for one in (value.items() if isinstance(value, Mapping) else value)]
    elif hasattr(value, "tobytes"):  # an array, or an image of Pillow
        about = [getattr(value, name, "") for name in ("dtype", "shape", "mode", "size")]
        content = *map(str, about), value.tobytes()
    elif isinstance(value, str | int | float | complex | bytes | os.PathLike | None):
        content = str(value)
        for folder in (os.path.realpath(data), os.path.normpath(data), data.rstrip("/")):
            content = content.removeprefix(f"{folder}/")
    elif isinstance(value, set | frozenset):
        content = sorted(_digest(one, data, depth - 1) for one in value)
    else:
        state: Any = ()
        with contextlib.suppress(Exception):  # whatever cannot be copied
            state = value.__reduce_ex__(2)[1:3] if depth > 0 else ()
        content = type(value).__name__, _digest(state, data, depth - 1)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]
