"""Weights of other programs, for -weights: their files and folders, and tensors that have other names there."""

import argparse
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from numpy._core.multiarray import scalar
from torch import Tensor

from lib.utils import files
from lib.utils.checkpoint import shards
from lib.utils.data.tensors import named_tensors

# Classes without code of their own that files of others hold: flags, and NumPy's numbers.
PLAIN = [argparse.Namespace, np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i8", "?"))]
PLAIN += [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]  # before NumPy 2, and since
# What a folder's weights are called, best first.
FILES = ("*.safetensors.index.json", "model.safetensors", "*.safetensors", "*.bin.index.json", "pytorch_model.bin")
FILES += ("*.pt", "*.pth", "*.ckpt", "*.bin")
# Modules around the user's own: of DDP, torch.compile, FSDP1 and activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PREFIXES = {*WRAPPERS, "model", "backbone", "net", "network", "encoder", "state_dict", "model_state_dict"}


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of a folder with one, by name; of nested dicts as state_dict.head.bias.

    No code in a file is executed. What is wrong raises Damaged, ValueError, OSError, or an error of a library.
    """
    if path.is_dir():
        found = next(filter(None, (sorted(path.glob(pattern)) for pattern in FILES)), [])
        if len(found) != 1:
            wanted = "a run's folder with best or final weights, a file, or a folder with one weights file is needed"
            raise ValueError(f"{wanted}; in this folder are {', '.join(file.name for file in found[:3]) or 'none'}")
        path = found[0]
    if path.suffix != ".json":
        if (shard := re.search(r"-\d{5}-of-(\d{5})\.", path.name)) and int(shard[1]) > 1:
            raise ValueError(f"it is one of {int(shard[1])} shards: give their folder")
        return _read_file(path)
    tensors, places = {}, json.loads(files.read_bytes(path, follow=True))["weight_map"]  # an index of Hugging Face
    for file in sorted({Path(place).name for place in places.values()}):  # none outside the folder
        tensors |= _read_file(path.parent / file)
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors or torch file, whichever its content is."""
    with files.open_regular(path, "rb", follow=True) as file:
        start = file.read(9)
        named = path.suffix == ".safetensors" and start[:2] != b"PK"  # a zip archive is torch's
        if named or start[8:] == b"{":  # a length of 8 bytes, then JSON
            return shards.read_weights(path)
        file.seek(0)
        try:
            with torch.serialization.safe_globals(PLAIN):
                values = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            hint = "and no code in a file is executed: if you trust it, save its state_dict() alone"
            raise ValueError(f"it is damaged, or holds more than tensors, {hint}") from error
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__} and no tensors by name")
        return {name: value.detach() for name, value in named_tensors(values)}


def match_names(given: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Return the name in a file of each of a model's names that is there.

    It is the same one, or the only one that is the same without wrappers' names; or without the file's first parts,
    if more than half of the model is there then; or else without all of PREFIXES. If more fit one part of the model,
    as a base model's file fits it below a head, it is of that part.
    """
    found = _match(given, names, set())
    for left_out, first in ((WRAPPERS, 0), (WRAPPERS, 1), (WRAPPERS, 2), (PREFIXES, 0)):
        more = _match(given, names, left_out, first)
        if not first or 2 * len(more) > len(names):
            found = more | found
    for left_out in (WRAPPERS, PREFIXES):
        more = _match_part(given, names, left_out)
        if len(more) > len(found):
            found = more | found
    return found


def _match(given: Collection[str], names: Collection[str], left_out: set[str], first: int = 0) -> dict[str, str]:
    """Return the only given name of each name that is the same without some parts, and without its `first` ones."""
    theirs, ours = _by_short(given, left_out, first), _by_short(names, left_out)
    return {same[0]: theirs[short][0] for short, same in ours.items() if len(same) == len(theirs[short]) == 1}


def _match_part(given: Collection[str], names: Collection[str], left_out: set[str]) -> dict[str, str]:
    """Return the only given name of each name in one part of the model, as `bert` is one: without the part's name.

    In the file must be more than half of the part, and these more than half of the model, or of the file. None is
    returned if the file fits another part, too: it may be the student's, or the teacher's.
    """
    theirs, parts, sizes = _by_short(given, left_out), defaultdict(dict), Counter()
    for short, same in _by_short(names, left_out).items():
        part, _, rest = short.partition(".")
        sizes[part] += len(same)
        if len(same) == len(theirs[rest]) == 1:
            parts[part][same[0]] = theirs[rest][0]
    fitting = sorted((found for part, found in parts.items() if 2 * len(found) > sizes[part]), key=len)
    if not fitting or 2 * len(fitting[-1]) <= min(len(given), len(names)):
        return {}
    *others, largest = fitting
    is_clear = all({*largest.values()}.isdisjoint(found.values()) for found in others)
    return largest if is_clear else {}


def _by_short(names: Collection[str], left_out: set[str], first: int = 0) -> dict[str, list[str]]:
    """Return the names by what they are without some parts, and without the `first` ones of the others."""
    found = defaultdict(list)
    for name in names:
        parts = [part for part in name.split(".") if part not in left_out]
        found[".".join(parts[first:])].append(name)
    return found
