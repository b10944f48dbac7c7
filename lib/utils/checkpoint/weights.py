"""Weights alone, in a file that every reader of safetensors takes: written, read, and started from."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, shards
from lib.utils.checkpoint.state import model_tensors, unwrap
from lib.utils.errors import UsageError, load_optional

ALONE = distributed.World()
FILE = "weights.safetensors"
FEW = ", less than half of the model"
OTHERS = "scripts.other_weights", "weights of other programs"
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # smaller ones have scales next to them
IMAGENET = "imagenet"  # as -weights: no file, but what the architecture's get_weights(args) returns


def gather(tensors: dict[str, Tensor], wanted: bool) -> dict[str, Tensor]:
    """Return whole copies on the CPU, on the ranks where they are `wanted`; {} elsewhere. All ranks call this."""
    whole = ((name, one.full_tensor() if shards.is_sharded(one) else one) for name, one in tensors.items())
    return shards.copy_to_cpu((name, one.detach()) for name, one in whole if wanted)


def not_finite(model: nn.Module, world: distributed.World) -> list[str]:
    """Return the parameters that hold NaN or infinity on any rank, the same on all. All ranks call this together."""
    finite = {name: torch.isfinite(shards.local_part(one)).all() for name, one in unwrap(model).named_parameters()}
    good = torch.stack([*finite.values()]).tolist() if finite else []  # waits for the device once
    mine = [name for name, one in zip(finite, good, strict=True) if not one]
    return sorted(set().union(*distributed.gather(mine, world)))


def write(folder: Path, tensors: dict[str, Tensor] | None, best: dict | None = None) -> None:
    """Write whole CPU tensors, if any, to folder/weights.safetensors, with the step of `best`. Raises OSError."""
    if not tensors:
        return
    run_folder.check_lock(folder.parent)
    folder.mkdir(exist_ok=True)
    with atomic.new_version(folder / FILE) as partial:
        about = best and {"step": str(best["step"])}
        shards.write_weights(partial, dict(sorted(tensors.items())), about)  # in one order on each disk: one checksum


def find(run: Path) -> Path | None:
    """Return the file of a run's best weights, or else of its final ones. Raises UsageError if the best are lost."""
    best, final = (run / name / FILE for name in ("best", "final"))
    if not best.is_file() and run_folder.read_json(run / "outcome.json").get("best"):
        raise UsageError(f"{best} is missing, though outcome.json knows best weights: take other ones by their path")
    return next((file for file in (best, final) if file.is_file()), None)


def load_into(
    path: str, model: nn.Module, whole: bool = False, *, imagenet: Callable = dict, world: distributed.World = ALONE
) -> str:
    """Give the model the weights in a file, or of a run; return how many, and what is missing or not used.

    For the path "imagenet" they are what `imagenet()` returns, tensors by name. The first process of each node calls
    it before the others, which then find its downloads. All ranks of the world call this together. Raises UsageError
    if the file cannot be read, nothing in it fits, a tied weight has two values, or (`whole`) the model has more.
    """

    def load() -> dict[str, Tensor]:
        try:
            if path == IMAGENET:
                return imagenet()
            file = find(Path(path)) or Path(path)
            file.stat()  # a wrong path is the fault then, and not a script that is missing
            return shards.read_weights(file) if file.name == FILE else load_optional(*OTHERS).read(file)
        except Exception as error:  # a file that holds no weights may raise anything
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UsageError(f"-weights {path}: cannot be read ({reason})") from error

    given = distributed.attempt(None if path == IMAGENET and world.local_rank > 0 else load, world) or load()
    names = _names_by_tensor(model)
    found = {name: name for aliases in names.values() for name in aliases if name in given}
    if not all(found.keys() & {*aliases} for aliases in names.values()):
        found = load_optional(*OTHERS).match_names(given, [name for aliases in names.values() for name in aliases])
    missing, loaded = [], []
    for tensor, aliases in names.items():
        there = [given[found[name]] for name in aliases if name in found]
        same = [one for one in there if one.shape == tensor.shape]
        fitting = [one for one in same if one.dtype == tensor.dtype or {one.dtype, tensor.dtype} <= FLOATS]
        if not fitting:
            kinds = [f"{one.dtype} {tuple(one.shape)}" for one in (*there[:1], tensor)]
            missing.append(aliases[0] + (f" ({kinds[0]} there, {kinds[1]} here)" if there else ""))
            if isinstance(tensor, nn.Parameter) and same:
                raise UsageError(f"-weights {path}: {missing[-1]}: save quantized weights as floats first")
            continue
        if any((fitting[0] != value).any() for value in fitting[1:]):
            raise UsageError(f"-weights {path}: {' and '.join(aliases)} are one tensor here, and differ in the file")
        shards.copy_whole(tensor, fitting[0])
        loaded.append(tensor)
    if (whole and missing) or not (whole or any(isinstance(one, nn.Parameter) for one in loaded)):
        lacks = f"it has {_list([*given]) or 'none'}, and lacks {_list(missing)}"
        raise UsageError(f"-weights {path}: not the weights of this model: {lacks}")
    if not whole and (odd := not_finite(model, world)):
        raise UsageError(f"-weights {path}: {odd[0]} ({len(odd)} in all) is not finite")
    renamed = [f"{other} is {name} here" for name, other in found.items() if name != other][:1]
    unused = sorted(given.keys() - found.values())
    parts = {"as": renamed, "not loaded, as missing or of another shape:": sorted(missing), "not used:": unused}
    more = "".join(f"; {title} {_list(one)}" for title, one in parts.items() if one)
    filled, whole_size = (sum(p.numel() for p in some if isinstance(p, nn.Parameter)) for some in (loaded, names))
    return f"{path}: {len(loaded)} tensors loaded{FEW if 2 * filled < whole_size else ''}{more}"


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
