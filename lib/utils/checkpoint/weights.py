"""Weights alone, in a file that every reader of safetensors takes: written, read, and started from."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.checkpoint import atomic, pretrained, run_folder, shards
from lib.utils.checkpoint.shared_disk import Disk
from lib.utils.checkpoint.state import model_tensors, unwrap
from lib.utils.distributed import World
from lib.utils.errors import UsageError

ALONE = World()
IMAGENET = "imagenet"  # as -weights: no file, but what the architecture's get_weights(args) returns


def gather(tensors: dict[str, Tensor], disk: Disk) -> dict[str, Tensor]:
    """Return whole copies on the CPU of each disk's first rank; empty ones elsewhere. All ranks call this."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        full = tensor.full_tensor() if shards.is_sharded(tensor) else tensor
        whole[name] = full.to("cpu", copy=True) if disk.is_first else full.new_empty(0)
    return whole


def not_finite(model: nn.Module, world: World) -> list[str]:
    """Return the parameters that hold NaN or infinity on any rank, the same on all. All ranks call this together."""
    finite = {name: torch.isfinite(shards.local_part(value)).all() for name, value in model.named_parameters()}
    good = torch.stack([*finite.values()]).tolist() if finite else []  # waits for the device once
    mine = [name for name, one in zip(finite, good, strict=True) if not one]
    return distributed.reduce_json(sorted(mine), lambda ours, theirs: sorted({*ours, *theirs}), world)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write folder/weights.safetensors from whole tensors on the CPU, in place of an older one. Raises OSError."""
    run_folder.check_lock(folder.parent)
    folder.mkdir(exist_ok=True)
    with atomic.new_version(folder / "weights.safetensors") as partial:
        shards.write_weights(partial, dict(sorted(tensors.items())))  # in one order on each disk: one checksum


def find(run: Path) -> Path | None:
    """Return the file of a run's best weights, or else of its final ones. Raises UsageError if the best are lost."""
    best, final = (run / name / "weights.safetensors" for name in ("best", "final"))
    if not best.is_file() and run_folder.read_outcome(run).get("best"):
        raise UsageError(f"{best} is missing, though outcome.json knows best weights: take other ones by their path")
    return next((file for file in (best, final) if file.is_file()), None)


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file, or of a folder with one. Executes no code in it; see pretrained.py."""
    return pretrained.read(path)


def load_into(
    path: str, model: nn.Module, whole: bool = False, *, imagenet: Callable = dict, world: World = ALONE
) -> str:
    """Give the model the weights in a file, or of a run; return how many, and what is missing or not used.

    For the path "imagenet" they are what `imagenet()` returns, tensors by name. The first process of each node calls
    it before the others, which then find its downloads. All ranks of the world call this together.

    Raises:
        UsageError: the file cannot be read, nothing in it fits, a weight is not finite, a tied one has two values, or
            (`whole`) the model has something that it lacks.
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
    tensors = {name: tensor for tensor, aliases in names.items() for name in aliases}
    found = pretrained.match_names(given, tensors)
    misfits = {name: forms for name in found if (forms := pretrained.misfit(given[found[name]], tensors[name]))}
    values = {
        tensor: [given[found[name]] for name in aliases if name in found and name not in misfits]
        for tensor, aliases in names.items()
    }
    if not any(values.values()):
        shown = [f"{name} is {forms}" for name, forms in misfits.items()] or [_examples(given, tensors)]
        fault = f"none of its {len(given)} tensors fits this model by name and shape"
        raise UsageError(f"-weights {path}: {fault}: {shown[0]}")
    missing = sorted(names[tensor][0] for tensor in names if not values[tensor])
    missing = [f"{name} ({misfits[name]})" if name in misfits else name for name in missing]
    if whole and missing:
        lacks = f"{_list(missing)} is missing or of another shape"
        raise UsageError(f"-weights {path}: not the weights of this model: {lacks}")
    for tensor, (value, *others) in ((tensor, some) for tensor, some in values.items() if some):
        if any((value != other).any() for other in others):
            fault = f"{' and '.join(names[tensor])} are one tensor here, and differ in the file"
            raise UsageError(f"-weights {path}: {fault}")
        if isinstance(tensor, nn.Parameter) and not (whole or torch.isfinite(value).all()):
            raise UsageError(f"-weights {path}: {names[tensor][0]} is not finite")
        shards.copy_whole(tensor, value)
    renamed = [f"{other} is {name} here" for name, other in found.items() if name != other][:1]
    unused = sorted(given.keys() - found.values())
    parts = {"as": renamed, "not loaded, as missing or of another shape:": missing, "not used:": unused}
    more = "".join(f"; {title} {_list(one)}" for title, one in parts.items() if one)
    return f"{path}: {len(names) - len(missing)} tensors loaded{more}"


def _names_by_tensor(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of each parameter and saved buffer: several of a tied one, that in Baton's files first."""
    names = {tensor: [name] for name, tensor in model_tensors(model).items()}
    for name, tensor in unwrap(model).state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor in names and name not in names[tensor]:
            names[tensor].append(name)
    return names


def _examples(given: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    """Name a tensor of a file and one of a model."""
    theirs, ours = ([f"{name} {tuple(one.shape)}" for name, one in some.items()] for some in (given, tensors))
    return f"it has {theirs[0] if theirs else 'none'}, and the model {ours[0] if ours else 'none'}"


def _list(names: list[str]) -> str:
    """Return a few of the names, and how many others there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
