"""What a run's data are: how many samples, which classes, and a digest of three samples of each split.

A run continues on the same data only. The folder of the data may move, and so paths in samples count from there.
"""

import contextlib
import functools
import hashlib
import os
import reprlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.utils import distributed
from lib.utils.data import fetch
from lib.utils.data.options import MapDataset, read_options
from lib.utils.data.plan import MicroBatch
from lib.utils.distributed import World

NEVER_THE_SAME = "another one each time"  # as a digest: samples that are not a function of their seeds


def describe(splits: dict[str, MapDataset], args: Namespace, world: World) -> dict[str, dict]:
    """Return what the data are, by split: samples, classes, digest. All ranks call this, and rank 0 reads.

    A run with loader processes reads in one of its own: a file that a dataset opens at first use is shared by none.
    """
    flags = (0,) if args.debug else (args.workers, args.workers if args.val_workers is None else args.val_workers)
    workers = max(fetch.count_workers(flag, part, world) for flag in flags for part in splits.values())
    return distributed.run_on_main(
        lambda: {name: _describe(part, args, min(1, workers)) for name, part in splits.items()}, world
    )


def compare(before: dict[str, dict], now: dict[str, dict]) -> str:
    """Describe how data differ from those that a run began with; "" if they do not, or nothing is known of them."""
    lines = []
    for split in sorted({*before, *now}) if before else ():
        old, new = before.get(split, {}), now.get(split, {})
        for what in ("samples", "classes", "digest"):
            if old.get(what) != new.get(what) and NEVER_THE_SAME not in (old.get(what), new.get(what)):
                was, now_is = (reprlib.repr(facts.get(what)) for facts in (old, new))
                lines.append(f"{what} of {split}: {was} then, {now_is} now")
                break
    return "; ".join(lines)


def _describe(part: MapDataset, args: Namespace, workers: int) -> dict[str, Any]:
    options, count = read_options(part), len(part)
    facts: dict[str, Any] = {"samples": count}
    if options.classes is not None:
        facts["classes"] = [str(name) for name in options.classes]
    if options.fingerprint is not None:
        return facts | {"digest": options.fingerprint}
    keys = [MicroBatch(0, n, [n], 1, 1, 1, first=True, last=True) for n in sorted({0, count // 2, count - 1})]
    digest = functools.partial(_digest, data=args.data)
    with contextlib.closing(fetch.Fetcher(part, args.seed, workers, pin=False, collate_fn=digest)) as reader:
        batches = [batch for _, batch in reader(0, keys * 2)]
    found = [batch if isinstance(batch, str) else _digest(batch, args.data) for batch in batches]  # some are whole
    first, again = found[: len(keys)], found[len(keys) :]
    return facts | {"digest": "-".join(first) if first == again else NEVER_THE_SAME}


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
