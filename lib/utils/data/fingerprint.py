"""What a run's data are: how many samples, which classes, and a digest of three samples of each split.

A run continues on the same data only. The folder of the data may move, and so paths in samples count from there.
"""

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from lib.utils import distributed
from lib.utils.data import fetch
from lib.utils.data.options import MapDataset, read_options
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World

NEVER_THE_SAME = "another one each time"  # as a digest: samples that are not a function of their seeds


def describe(
    splits: dict[str, MapDataset], args: Namespace, world: World, before: dict[str, dict] | None = None
) -> dict[str, dict]:
    """Return what the data are, by split: samples, classes, digest. All ranks call this, and rank 0 reads.

    A run with loader processes reads in one of its own: a file that a dataset opens at first use is shared by none.
    Data that differ from those of `before` are read twice, to find samples that are never the same.
    """
    flags = (0,) if args.debug else (args.workers, args.workers if args.val_workers is None else args.val_workers)
    workers = max(fetch.count_workers(flag, part, world) for flag in flags for part in splits.values())

    def read(times: int) -> dict[str, dict]:
        return {name: _describe(part, args, min(1, workers), times) for name, part in splits.items()}

    def read_until_known() -> dict[str, dict]:
        facts = read(1)
        return read(2) if compare(before or {}, facts) else facts

    return distributed.run_on_main(read_until_known, world)


def compare(before: dict[str, dict], now: dict[str, dict]) -> str:
    """Describe how data differ from those that a run began with; "" if they do not, or nothing is known of them."""
    lines = []
    for split in sorted({*before, *now}) if before else ():
        old, new = ({"samples": 0, "digest": "", **facts.get(split, {})} for facts in (before, now))
        names = [[*facts.get("classes", ()), None] for facts in (old, new)]
        renamed = [n for n, (one, other) in enumerate(zip(*names, strict=False)) if one != other]
        if old["samples"] != new["samples"]:
            lines.append(f"the number of {split} samples was {old['samples']} and is {new['samples']}")
        elif renamed:
            first = renamed[0]
            lines.append(f"class {first} of {split} was {names[0][first]} and is {names[1][first]}")
        elif old["digest"] != new["digest"] and NEVER_THE_SAME not in (old["digest"], new["digest"]):
            lines.append(f"the digest of {split} was {old['digest']} and is {new['digest']}")
    return ", ".join(lines)


def _describe(part: MapDataset, args: Namespace, workers: int, times: int) -> dict[str, Any]:
    options, count = read_options(part), len(part)
    facts: dict[str, Any] = {"samples": count}
    if options.classes is not None:
        facts["classes"] = [str(name) for name in options.classes]
    if options.fingerprint is not None:
        return facts | {"digest": _digest([options.fingerprint, *_indices(part)], args.data)}
    keys = [MicroBatch(0, n, [n], 1, 1, 1, first=True, last=True) for n in sorted({0, count // 2, count - 1})]
    reader = fetch.Fetcher(part, args.seed, workers, pin=False, collate_fn=lambda items: _digest(items, args.data))
    try:
        batches = [batch for _, batch in reader(0, keys * times)]
    finally:
        reader.close()
    found = [batch if isinstance(batch, str) else _digest(batch, args.data) for batch in batches]  # some are whole
    same = found == found[: len(keys)] * times
    return facts | {"digest": "-".join(found[: len(keys)]) if same else NEVER_THE_SAME}


def _indices(part: Any) -> Iterator[list[int]]:
    """Yield the indices of a Subset, and of what it is a Subset of."""
    while isinstance(part, Subset):
        yield [int(index) for index in part.indices]
        part = part.dataset


def _digest(sample: Any, data: str) -> str:
    total = hashlib.sha256()
    for piece in _pieces(sample):
        if isinstance(piece, str):
            for root in (os.path.realpath(data), str(Path(data).absolute()), data):
                piece = piece.replace(root, "")
            piece = piece.encode(errors="surrogateescape")
        total.update(b"%d:" % len(piece) + piece)
    return total.hexdigest()[:8]


def _pieces(value: Any) -> Iterator[str | bytes]:
    """Yield texts and bytes that a value is made of. An object of an unknown kind counts by its class alone."""
    if isinstance(value, Tensor):
        whole = value.detach().cpu().to_dense().resolve_conj().contiguous()
        yield f"{value.dtype} {tuple(value.shape)}"
        yield whole.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from _pieces([*value.items()])
    elif isinstance(value, list | tuple) or str(getattr(value, "dtype", "")) == "object":
        yield str(len(value))
        for part in value:
            yield from _pieces(part)
    elif hasattr(value, "tobytes"):  # an array, or an image of Pillow
        yield " ".join(str(getattr(value, name, "")) for name in ("dtype", "shape", "mode", "size"))
        yield value.tobytes()
    else:
        known = isinstance(value, str | int | float | complex | bytes | os.PathLike | None)
        yield str(value) if known else type(value).__name__
