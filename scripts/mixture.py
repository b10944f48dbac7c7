"""-data A=0.3,B=0.7: what -dataset has in several places, mixed by shares. It imports no torch before it must."""

import os
import re
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.config import Args
from lib.config.types import DECIMAL
from lib.utils.errors import UsageError

PLACES = re.compile(r"(?:\{[^}]*\}|[^,{}])+")  # what stands between commas, but those in {a,b}


class MixedDataset:
    """What plugins of lib/dataset are: `describe` and `get_dataset`, for each of the places in `data`."""

    def __init__(self, module: ModuleType, data: str):
        self.module, self.shares, self.names = module, {}, {}
        for part in PLACES.findall(data):
            place, _, share = (one.strip() for one in part.rpartition("="))
            name = re.sub(r"\W", "_", place.rstrip("/").rpartition("/")[2])
            if not (place and re.fullmatch(DECIMAL, share) and float(share) >= 0):
                raise UsageError(
                    f"-data {data}: {part.strip()!r} is no PLACE=SHARE, with a number from 0 as its share"
                )
            if name in self.names.values():
                raise UsageError(
                    f"-data {data}: two places have the name {name}: they need others, behind the last /"
                )
            self.shares[place], self.names[place] = float(share), name
        if not any(self.shares.values()):
            raise UsageError(f"-data {data}: one share must be above 0")

    def describe(self, args: Args) -> dict[str, Any]:
        """Return the defaults that follow from the data. Raises UsageError if they differ from place to place."""
        found = {place: self.module.describe(of_place(args, place)) for place in self.shares}
        first, *others = found
        for place in others:
            if found[place] != found[first]:
                raise UsageError(f"{first} and {place} do not mix: {found[first]} and {found[place]} describe them")
        return found[first]

    def get_dataset(self, args: Args) -> dict[str, Any]:
        """Return a mixture for train, val_NAME for each place that has val, and what the places have for test.

        Raises UsageError under -skip_bad_files, which would leave out what is drawn, and under -shuffle no.
        """
        from lib.utils.data.loader import splits
        from scripts.sampling import Mixture

        if not args.shuffle:
            raise UsageError("-shuffle no: the samples of a mixture are drawn by their shares")
        if args.skip_bad_files:
            raise UsageError("-skip_bad_files: not in a mixture; -check_data lists the files to remove")
        files = [Path(of_place(args, place).data, "tokenizer.json") for place in self.names]
        first, *others = [file for file in files if file.is_file()] or files[:1]
        for other in others:
            if other.read_bytes() != first.read_bytes():
                hint = "take one for all: make_tokens.py -tokenizer FILE"
                raise UsageError(f"-data {args.data}: {first} and {other} differ; {hint}")
        parts = {}
        for place, name in self.names.items():
            parts[name] = splits(self.module.get_dataset(of_place(args, place)), args.dataset)
        shares = dict(zip(self.names.values(), self.shares.values(), strict=True))
        mixed: dict[str, Any] = {"train": Mixture({name: part["train"] for name, part in parts.items()}, shares)}
        for name, part in parts.items():
            mixed |= {f"val_{name}{split[3:]}": one for split, one in part.items() if split.startswith("val")}
        if tests := {name: part["test"] for name, part in parts.items() if "test" in part}:
            mixed["test"] = Mixture(tests, dict.fromkeys(tests, 1.0))
        return mixed


def of_place(args: Namespace, place: str) -> Args:
    """Return the flags with one of the places as -data."""
    return Args(**{**vars(args), "data": os.path.expanduser(place)})  # noqa: PTH111  # a URL stays as it is
