"""-data A=0.3,B=0.7: what -dataset has in several places, mixed by shares. It imports no torch before it must."""

import os
import re
from argparse import Namespace
from types import ModuleType
from typing import Any

from lib.config import Args
from lib.utils.errors import UsageError

SHARE = re.compile(
    r"((?:\{[^}]*\}|[^,{}])+)=(\d+\.?\d*|\.\d+)(?:,|$)"
)  # a place, which may have {a,b}, and its share


class Mixed:
    """A module of lib/dataset that reads each of the places in `data`. What else it has is as in `module`."""

    def __init__(self, module: ModuleType, data: str):
        self.module, self.shares = module, {place: float(share) for place, share in SHARE.findall(data)}
        self.names = {place: re.sub(r"\W", "_", place.rstrip("/").rpartition("/")[2]) for place in self.shares}
        if len({*self.names.values()}) < len(SHARE.findall(data)) or not any(self.shares.values()):
            raise UsageError(
                f"-data {data}: give each place a name of its own, behind its last /, and a share above 0"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def describe(self, args: Args) -> dict[str, Any]:
        """Return the defaults that follow from the data. Raises UsageError if they differ from place to place."""
        found = {place: self.module.describe(of_place(args, place)) for place in self.shares}
        first, *others = found
        for place in others:
            if found[place] != found[first]:
                raise UsageError(f"{first} and {place} do not mix: {found[first]} and {found[place]} describe them")
        return found[first]

    def get_dataset(self, args: Args) -> dict[str, Any]:
        """Return a mixture for train; val_NAME for each place that has val; all of test, if each has it."""
        from lib.utils.data.loader import splits
        from scripts.sampling import Mixture

        parts = {}
        for place, name in self.names.items():
            parts[name] = splits(self.module.get_dataset(of_place(args, place)), args.dataset)
        shares = dict(zip(self.names.values(), self.shares.values(), strict=True))
        mixed: dict[str, Any] = {"train": Mixture({name: part["train"] for name, part in parts.items()}, shares)}
        for name, part in parts.items():
            mixed |= {f"val_{name}{split[3:]}": one for split, one in part.items() if split.startswith("val")}
        if all("test" in part for part in parts.values()):
            mixed["test"] = Mixture({name: part["test"] for name, part in parts.items()}, shares)
        return mixed


def of_place(args: Namespace, place: str) -> Args:
    """Return the flags with one of the places as -data."""
    return Args(**{**vars(args), "data": os.path.expanduser(place)})  # noqa: PTH111  # a URL stays as it is
