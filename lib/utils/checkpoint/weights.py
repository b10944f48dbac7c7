"""Weights alone, in a file that every reader of safetensors takes: written, read, and started from."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.checkpoint import atomic, shards
from lib.utils.checkpoint.shared_disk import Disk
from lib.utils.checkpoint.state import model_tensors
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
    folder.mkdir(exist_ok=True)
    with atomic.new_version(folder / "weights.safetensors") as partial:
        shards.write(partial, sorted(tensors.items()))  # one order on each disk: one checksum


def find(run: Path) -> Path | None:
    """Return the file of a run's best weights, or else of its final ones."""
    files = [run / name / "weights.safetensors" for name in ("best", "final")]
    return next((file for file in files if file.is_file()), None)


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file: safetensors, or torch's without code (`weights_only=True`)."""
    if path.is_dir():
        raise IsADirectoryError("a run's folder with best or final weights, or a file, is needed")
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict"):  # as many save them
        if isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def load_into(
    path: str, model: nn.Module, whole: bool = False, *, imagenet: Callable = dict, world: World = ALONE
) -> str:
    """Give the model the weights in a file, or of a run; return how many, and what is missing or not used.

    For the path "imagenet" they are what `imagenet()` returns, tensors by name. The first process of each node calls
    it before the others, which then find its downloads. All ranks of the world call this together.

    Raises:
        UsageError: the file cannot be read, nothing in it fits, or (`whole`) the model has something that it lacks.
    """

    def load() -> dict[str, Tensor]:
        try:
            return imagenet() if path == IMAGENET else read(find(Path(path)) or Path(path))
        except Exception as error:  # a file that holds no weights may raise anything
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UsageError(f"-weights {path}: cannot be read ({reason})") from error

    waits = path == IMAGENET and world.local_rank > 0
    weights = distributed.attempt(None if waits else load, world) or load()
    weights = {name.removeprefix("_orig_mod.").removeprefix("module."): value for name, value in weights.items()}
    mine = model_tensors(model)
    fits = {name for name in mine if name in weights and weights[name].shape == mine[name].shape}
    missing, unused = sorted({*mine} - fits), sorted({*weights} - {*model.state_dict()})
    if not fits:
        raise UsageError(f"-weights {path}: none of its {len(weights)} tensors fits this model by name and shape")
    if whole and missing:
        names = ", ".join(missing[:4])
        raise UsageError(f"-weights {path}: not the weights of this model: {names} is missing or of another shape")
    with torch.no_grad():
        for name in fits:
            shards.copy_whole(mine[name], weights[name])
    text = f"{path}: {len(fits)} tensors loaded"
    text += f"; not loaded, as missing or of another shape: {', '.join(missing)}" if missing else ""
    return text + (f"; not used: {', '.join(unused)}" if unused else "")
