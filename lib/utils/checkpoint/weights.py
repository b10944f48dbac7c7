"""Weights alone, in a file that every reader of safetensors takes: written, read, and started from."""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, shards
from lib.utils.checkpoint.state import model_tensors
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)


def keep(folder: Path, tensors: dict[str, Tensor], world: World, must: bool = True) -> bool:
    """Rank 0 writes folder/weights.safetensors, all ranks wait. False, with a warning, if writing failed and need not
    succeed (`must`). An error before that is one rank's own, and is always raised: the others would wait for it."""
    whole = _gathered(tensors, world)
    try:
        distributed.main_does(lambda: write(folder, whole), world)
    except OSError as error:  # and no other: a lost process is a RuntimeError
        if must:
            raise
        log.warning("%s: the run goes on without", error)
        return False
    return True


def _gathered(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The tensors with the sharded ones made whole, on rank 0's CPU; called by all ranks. Elsewhere: empty ones."""
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        whole[name] = full.cpu() if world.is_main else full.new_empty(0)
    return whole


def not_finite(model: torch.nn.Module, world: World) -> list[str]:
    """The names of the parameters that hold NaN or infinity on any rank; called by all ranks, the same on all."""
    local = {name: shards.local(value) for name, value in model.named_parameters()}
    mine = [name for name, value in local.items() if not torch.isfinite(value).all()]
    return sorted({name for names in distributed.gather_json(mine, world) for name in names})


def write(folder: Path, tensors: dict[str, Tensor]):
    """Writes folder/weights.safetensors from whole tensors on the CPU, in place of an older one. Raises OSError."""
    path = folder / "weights.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.staged(path) as partial:
            shards.write(partial, list(tensors.items()))
    except OSError as error:
        raise OSError(f"{path} could not be written ({error}, {run_folder.free_there(folder.parent)})") from error


def read(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a weights file: safetensors, or a torch file without code (`weights_only=True`). On "meta" only
    their shapes are read."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            if device == "meta":
                return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
            return {name: file.get_tensor(name) for name in names}
    loaded = torch.load(path, map_location=device, weights_only=True)
    while isinstance(loaded, dict) and not any(isinstance(value, Tensor) for value in loaded.values()):
        loaded = next((loaded[key] for key in ("model", "state_dict") if key in loaded), None)
    if not isinstance(loaded, dict):
        raise SafetensorError("it holds no tensors by name")
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def start_from(path: str, model: torch.nn.Module, whole: bool = False):
    """Starts from the weights in a file, on every rank; what is missing, of another shape or not used is told.

    Raises UsageError if it cannot be read, or nothing in it fits, or not all that the model has (`whole`).
    """
    weights, mine, fits = fitting(path, model, "cpu")
    if whole and fits != {*mine}:
        names = ", ".join(sorted({*mine} - fits)[:4])
        raise UsageError(f"-weights {path}: not the weights of this model: {names} is missing or of another shape")
    with torch.no_grad():
        for name in fits:
            shards.put(mine[name], weights[name])
    log.info("-weights %s: %d tensors taken", path, len(fits))
    both = {*mine} & {*weights}
    tied = {*model.state_dict()} - {*mine}  # other names of tensors that were taken
    for kind, names in (("missing there", {*mine} - both), ("not used", {*weights} - both - tied),
                        ("of another shape there", both - fits)):  # fmt: skip
        if names:
            log.warning("-weights %s: %s: %s", path, kind, ", ".join(sorted(names)))


def fitting(path: str, model: torch.nn.Module, device: str) -> tuple[dict, dict, set]:
    """The tensors in a file and those of the model, by name, and the names of those that fit by shape. Raises
    UsageError where it cannot be read or nothing fits."""
    try:
        weights = read(Path(path), device)
    except Exception as error:  # what a file that is none may raise, nobody lists
        raise UsageError(
            f"-weights {path}: cannot be read ({(str(error) or repr(error)).splitlines()[0]})"
        ) from error
    weights = {name.removeprefix("_orig_mod.").removeprefix("module."): value for name, value in weights.items()}
    mine = model_tensors(model)
    fits = {name for name in mine if name in weights and weights[name].shape == mine[name].shape}
    if not fits:
        raise UsageError(f"-weights {path}: none of its {len(weights)} tensors fits this model by name and shape")
    return weights, mine, fits
