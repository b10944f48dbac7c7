"""Weights that other programs saved: their files, folders of shards, and the names of their tensors."""

import argparse
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lib.utils import files
from lib.utils.checkpoint import shards

# What a folder's weights are called, best first.
FILES = ("*.safetensors.index.json", "model.safetensors", "*.safetensors", "*.bin.index.json", "pytorch_model.bin")
FILES += ("*.pt", "*.pth", "*.ckpt", "*.bin")
# Modules around the user's own: of DDP, torch.compile, FSDP1 and activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PREFIXES = {*WRAPPERS, "model", "backbone", "net", "network", "encoder", "state_dict", "model_state_dict"}


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of a folder with one, by name; of nested dicts as state_dict.head.bias.

    No code in a file is executed. What is wrong raises ValueError, OSError, or an error of a library.
    """
    path = find_file(path) if path.is_dir() else path
    if path.suffix != ".json":
        if shard := re.search(r"-\d{5}-of-(\d{5})\.", path.name):
            raise ValueError(f"it is one of {int(shard[1])} shards: give their folder")
        return read_file(path)
    tensors, places = {}, json.loads(path.read_text())["weight_map"]  # an index of Hugging Face
    for file in sorted({*places.values()}):
        if Path(file).name != file:
            raise ValueError(f"{path.name} names {file}, which is outside its folder")
        tensors |= read_file(path.parent / file)
    if missing := sorted(places.keys() - tensors.keys()):
        raise ValueError(f"{path.name} names {len(missing)} tensors, as {missing[0]}, that its files do not hold")
    return tensors


def find_file(folder: Path) -> Path:
    """Return the weights file in a folder, or the index of several. Raises ValueError unless there is one."""
    if (folder / "manifest.json").exists():
        raise ValueError("it is a checkpoint: -resume continues it, and scripts/export.py -from takes its weights")
    found = next((found for pattern in FILES if (found := sorted(folder.glob(pattern)))), [])
    if len(found) == 1:
        return found[0]
    wanted = "a run's folder with best or final weights, a file, or a folder with one weights file is needed"
    raise ValueError(f"{wanted}; in this folder are {', '.join(file.name for file in found[:3]) or 'none'}")


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors or torch file, whichever its content is."""
    with files.open_regular(path, "rb", follow=True) as file:
        start = file.read(9)
    named = path.suffix == ".safetensors" and start[:2] != b"PK"  # a zip archive is torch's
    if named or start[8:] == b"{":  # a length of 8 bytes, then JSON
        return shards.read_weights(path)
    try:
        with (
            path.open("rb") as file,
            torch.serialization.safe_globals([argparse.Namespace]),
        ):  # it only has attributes
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        unknown = re.search(r"TorchScript|(?<=GLOBAL )\S+", str(error))
        if not unknown:
            raise
        hint = "and no code in a file is executed: if you trust it, save its state_dict() alone"
        raise ValueError(f"it holds {unknown[0]}, {hint}") from None
    found = dict(flatten(loaded))
    if not found:
        raise ValueError("it holds no tensors by name")
    return found


def flatten(values: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, each under its dotted name."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(name, str) and isinstance(value, Tensor):
            yield prefix + name, value.detach()
        elif isinstance(name, str):
            yield from flatten(value, f"{prefix}{name}.")


def misfit(given: Tensor, tensor: Tensor) -> str:
    """Return why a tensor cannot take the values of a given one, "" if it can: shapes, or types.

    Floats of one byte and integers are quantized weights, which mean nothing without their scales.
    """
    if given.shape != tensor.shape:
        return f"{tuple(given.shape)} there, {tuple(tensor.shape)} here"
    both_floats = given.is_floating_point() and tensor.is_floating_point() and given.itemsize > 1
    return "" if both_floats or given.dtype == tensor.dtype else f"{given.dtype} there, {tensor.dtype} here"


def match_names(given: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the name in a file of each of a model's tensors that is there, whatever its shape.

    Wrappers' names are left out. So are one prefix of the file's names and one of the model's: those with which most
    tensors fit. They are usual ones (PREFIXES), or more than half of the model fits.
    """
    inner = {part for name in tensors for part in name.split(".")}
    short = {".".join(part for part in name.split(".") if part not in WRAPPERS - inner): name for name in given}
    without_prefix = defaultdict(list)
    for name in tensors:
        child, dot, rest = name.partition(".")
        without_prefix[name].append("")
        without_prefix[rest].append(child + dot)
    votes = Counter({("", ""): 0})
    for name, full in short.items():
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            for ours in without_prefix.get(name[start:], ()):
                votes[name[:start], ours] += not misfit(given[full], tensors[ours + name[start:]])

    def is_likely(pair: tuple[str, str]) -> bool:
        parts = {part for prefix in pair for part in prefix.split(".") if part}
        return parts <= PREFIXES or 2 * votes[pair] > len(tensors)

    theirs, ours = max(filter(is_likely, votes), key=lambda pair: (votes[pair], -len("".join(pair))))
    pairs = {name: theirs + name.removeprefix(ours) for name in tensors if name.startswith(ours)}
    return {name: short[other] for name, other in pairs.items() if other in short}
