"""Weights alone, in a file that every reader of safetensors takes: written, read, and started from.

Files and folders of other programs are read, too, whose tensors have other names.
"""

import argparse
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch
from numpy._core.multiarray import scalar
from torch import Tensor, nn

from lib.utils import distributed, files
from lib.utils.checkpoint import atomic, run_folder, shards
from lib.utils.checkpoint.state import model_tensors, unwrap
from lib.utils.data.tensors import named_tensors
from lib.utils.distributed import World
from lib.utils.errors import UsageError

ALONE = World()
# Classes without code of their own that files of others hold: flags, and NumPy's numbers.
PLAIN = [argparse.Namespace, np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i8", "?"))]
PLAIN += [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]  # before NumPy 2, and since
IMAGENET = "imagenet"  # as -weights: no file, but what the architecture's get_weights(args) returns
# What a folder's weights are called, best first.
FILES = ("*.safetensors.index.json", "model.safetensors", "*.safetensors", "*.bin.index.json", "pytorch_model.bin")
FILES += ("*.pt", "*.pth", "*.ckpt", "*.bin")
# Modules around the user's own: of DDP, torch.compile, FSDP1 and activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PREFIXES = {*WRAPPERS, "model", "backbone", "net", "network", "encoder", "state_dict", "model_state_dict"}


def gather(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return whole copies on the CPU, on the ranks that write them; {} elsewhere. All ranks call this."""
    whole = {}
    for name, tensor in tensors.items():
        full = (tensor.full_tensor() if shards.is_sharded(tensor) else tensor).detach()
        if world.is_writer:
            whole[name] = full.to("cpu", copy=True)
    return whole


def not_finite(model: nn.Module, world: World) -> list[str]:
    """Return the parameters that hold NaN or infinity on any rank, the same on all. All ranks call this together."""
    parameters = unwrap(model).named_parameters()
    finite = {name: torch.isfinite(shards.local_part(value)).all() for name, value in parameters}
    good = torch.stack([*finite.values()]).tolist() if finite else []  # waits for the device once
    mine = [name for name, one in zip(finite, good, strict=True) if not one]
    return sorted(set().union(*distributed.gather(mine, world)))


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write folder/weights.safetensors from whole tensors on the CPU, unless there are none. Raises OSError."""
    if not tensors:
        return
    run_folder.check_lock(folder.parent)
    folder.mkdir(exist_ok=True)
    with atomic.new_version(folder / "weights.safetensors") as partial:
        shards.write_weights(partial, dict(sorted(tensors.items())))  # in one order on each disk: one checksum


def find(run: Path) -> Path | None:
    """Return the file of a run's best weights, or else of its final ones. Raises UsageError if the best are lost."""
    best, final = (run / name / "weights.safetensors" for name in ("best", "final"))
    if not best.is_file() and run_folder.read_json(run / "outcome.json").get("best"):
        raise UsageError(f"{best} is missing, though outcome.json knows best weights: take other ones by their path")
    return next((file for file in (best, final) if file.is_file()), None)


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


def load_into(
    path: str, model: nn.Module, whole: bool = False, *, imagenet: Callable = dict, world: World = ALONE
) -> str:
    """Give the model the weights in a file, or of a run; return how many, and what is missing or not used.

    For the path "imagenet" they are what `imagenet()` returns, tensors by name. The first process of each node calls
    it before the others, which then find its downloads. All ranks of the world call this together.

    Raises:
        UsageError: the file cannot be read, nothing in it fits, a tied weight has two values, or (`whole`) the model
            has something that it lacks.
    """

    def load() -> dict[str, Tensor]:
        try:
            return imagenet() if path == IMAGENET else read(find(Path(path)) or Path(path))
        except Exception as error:  # a file that holds no weights may raise anything
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UsageError(f"-weights {path}: cannot be read ({reason})") from error

    waits = path == IMAGENET and world.local_rank > 0
    given = distributed.attempt(None if waits else load, world) or load()
    names = _names_by_tensor(model)
    found = match_names(given, [name for aliases in names.values() for name in aliases])
    missing, loaded = [], []
    for tensor, aliases in names.items():
        there = [given[found[name]] for name in aliases if name in found]
        fitting = [value for value in there if _fits(value, tensor)]
        if not fitting:
            missing.append(aliases[0] + (f" ({_form(there[0])} there, {_form(tensor)} here)" if there else ""))
            if isinstance(tensor, nn.Parameter) and any(one.shape == tensor.shape for one in there):
                raise UsageError(f"-weights {path}: {missing[-1]}: save quantized weights as floats first")
            continue
        if any((fitting[0] != value).any() for value in fitting[1:]):
            raise UsageError(f"-weights {path}: {' and '.join(aliases)} are one tensor here, and differ in the file")
        shards.copy_whole(tensor, fitting[0])
        loaded.append(tensor)
    if (whole and missing) or not (whole or any(isinstance(one, nn.Parameter) for one in loaded)):
        lacks = f"it has {_list([*given]) or 'none'}, and lacks {_list(missing)}"
        raise UsageError(f"-weights {path}: not the weights of this model: {lacks}")
    renamed = [f"{other} is {name} here" for name, other in found.items() if name != other][:1]
    unused = sorted(given.keys() - found.values())
    parts = {"as": renamed, "not loaded, as missing or of another shape:": sorted(missing), "not used:": unused}
    more = "".join(f"; {title} {_list(one)}" for title, one in parts.items() if one)
    return f"{path}: {len(loaded)} tensors loaded{more}"


def match_names(given: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Return the name in a file of each of a model's names that is there.

    It is the same one, or the only one that is the same without wrappers' names; or without the file's first parts,
    if more than half of the model is there then; or else without all of PREFIXES.
    """
    found = _match(given, names, set())
    for left_out, first in ((WRAPPERS, 0), (WRAPPERS, 1), (WRAPPERS, 2), (PREFIXES, 0)):
        more = _match(given, names, left_out, first)
        if not first or 2 * len(more) > len(names):
            found = more | found
    return found


def _match(given: Collection[str], names: Collection[str], left_out: set[str], first: int = 0) -> dict[str, str]:
    """Return the only given name of each name that is the same without some parts, and without its `first` ones."""
    theirs, ours = defaultdict(list), defaultdict(list)
    for by_short, some, start in ((theirs, given, first), (ours, names, 0)):
        for name in some:
            parts = [part for part in name.split(".") if part not in left_out]
            by_short[".".join(parts[start:])].append(name)
    return {same[0]: theirs[short][0] for short, same in ours.items() if len(same) == len(theirs[short]) == 1}


def _fits(given: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor can take given values.

    Floats of one byte and integers are quantized weights, which mean nothing without their scales.
    """
    both_floats = given.is_floating_point() and tensor.is_floating_point() and given.itemsize > 1
    return given.shape == tensor.shape and (both_floats or given.dtype == tensor.dtype)


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _names_by_tensor(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of each parameter and saved buffer: several of a tied one, that in Baton's files first."""
    names = {tensor: [name] for name, tensor in model_tensors(model).items()}
    for name, tensor in unwrap(model).state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor in names and name not in names[tensor]:
            names[tensor].append(name)
    return names


def _list(names: list[str]) -> str:
    """Return a few of the names, and how many others there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
