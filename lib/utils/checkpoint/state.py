"""What a checkpoint holds: its manifest, how far a run is, its tensors, and what else the parts of a trainer keep."""

import itertools
import json
import logging
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map, tree_structure

from lib.utils import files
from lib.utils.checkpoint import shards
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
FORMAT = 4
# The end of every manifest, whatever its format: the checksum of all before it.
CHECKSUM_LINE = b',\n"crc32": %d\n}\n'
NOT_RESTORED = ("params", "fused", "foreach", "lr_set", "as_made")  # of an optimizer's groups: they are this start's


@dataclass(slots=True)
class State:
    """How far the run is, over all processes, and what it has counted. It has no room for others' attributes."""

    epoch: int = 0  # epochs finished
    step: int = 0  # optimizer steps
    evaluations: int = 0  # validations
    validated: int = 0  # the step of the last one
    evaluated: bool = True  # whether what is due after the last step, as a validation, is done
    samples: int = 0  # training samples
    grad_norm: float = float("nan")  # of the last step, as far as it was read from the device
    bad_steps: int = 0  # steps that were skipped, as far as they were read from the device
    bad_row: int = 0  # of these, in a row until now
    best: dict | None = None  # metric, value, epoch and number of the validation of the weights in best/
    sums: dict[str, float] = field(default_factory=dict)  # of the epoch's training loss up to its last log line
    unlogged: dict[str, list[float]] = field(default_factory=dict)  # since then, as exact terms; as of the last save


def encode_manifest(manifest: dict) -> bytes:
    """Return a manifest as it is written: a line for each entry, the checksum in the last."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()]
    if tree_structure(json.loads(json.dumps(manifest["state"]))) != tree_structure(manifest["state"]):
        raise TypeError("State has what JSON changes, as keys that are numbers, or tuples")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + CHECKSUM_LINE % zlib.crc32(body)


def read_manifest(folder: Path) -> dict:
    """Return a checkpoint's manifest. Raises Damaged if no run wrote it, UsageError for another format, OSError."""
    path = folder / "manifest.json"
    data = files.read_bytes(path)
    body = data.rpartition(CHECKSUM_LINE[:10])[0]
    if data != body + CHECKSUM_LINE % zlib.crc32(body):
        raise shards.Damaged(f"{path}: its checksum is wrong")
    try:
        manifest = json.loads(data)
        if manifest.get("format") != FORMAT:
            other = f"is of format {manifest.get('format')}, written by {manifest.get('about')}"
            raise UsageError(f"{path}: {other}; this code reads format {FORMAT}: take that version, or -reset")
        State(**manifest["state"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise shards.Damaged(f"{path}: no run writes what is in it ({error!r})") from error
    return manifest


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, a tied one once, under its first name."""
    model = unwrap(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # each tensor under one name
    saved = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if name in saved}


def unwrap(module: Any) -> Any:
    """Return the module that the user wrote, without DDP and torch.compile; anything else as it is."""
    while isinstance(module, DistributedDataParallel) or type(module).__name__ == "OptimizedModule":
        module = module.module if isinstance(module, DistributedDataParallel) else module._orig_mod
    return module


@dataclass(frozen=True)
class Parts:
    """What has a state among the attributes of a trainer, by the prefix of its names in a checkpoint."""

    modules: dict[str, nn.Module]  # "model", and trainer.NAME of others
    optimizers: dict[str, torch.optim.Optimizer]  # "optim", and trainer.NAME of others
    others: dict[str, Any] = field(default_factory=dict)  # trainer.NAME: schedulers, whatever else has a state_dict

    def weights(self) -> dict[str, Tensor]:
        """Return the live tensors of the modules by name: model.head.weight, trainer.teacher.bias."""
        found = {}
        for part, module in self.modules.items():
            for name, tensor in model_tensors(module).items():
                found.setdefault(tensor, f"{part}.{name}")
        return {name: tensor for tensor, name in found.items()}

    def states(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the states of optimizers and others as JSON has them, and which parameters are frozen.

        Tensors go to `tensors`, as optim.head.weight.exp_avg. Raises UsageError for what a checkpoint cannot hold.
        """
        states = {part: encode(other.state_dict(), part, tensors) for part, other in self.others.items()}
        for part, optimizer in self.optimizers.items():
            try:
                more = dict(optimizer.state_dict())
                kept, groups, by_group = more.pop("state"), more.pop("param_groups"), self.trained(part)
            except KeyError as error:
                fault = f"no state and param_groups, or a state of what is in none of its groups ({error})"
                raise UsageError(f"{part}: the state_dict() of a {type(optimizer).__name__} has {fault}") from None
            names = [*itertools.chain(*by_group)]
            # Some keep what belongs to no parameter under a name of their own.
            memory = {names[key] if isinstance(key, int) else key: one for key, one in kept.items()}
            groups = [{**group, "params": own} for group, own in zip(groups, by_group, strict=True)]
            named = {part: memory, f"{part}.groups": groups, f"{part}.more": more}
            states[part] = [encode(one, name, tensors) for name, one in named.items()]
        frozen = [name for name, parameter in self.parameters().items() if not parameter.requires_grad]
        return {**states, "frozen": frozen}

    def load(self, states: dict[str, Any], tensors: dict[str, Tensor], allowed: Collection[str] = ()) -> None:
        """Give optimizers and others what `states` returned, and freeze what was frozen.

        Groups that training added are added again. A number of a group whose name is in `allowed` stays as it is.
        """
        parameters = self.parameters()
        for name, parameter in parameters.items():
            if parameter.requires_grad == (name in states["frozen"]):
                log.warning("%s is %s, as it was saved", name, "frozen" if parameter.requires_grad else "trained")
            parameter.requires_grad_(name not in states["frozen"])
        for part, other in self.others.items():
            if (state := decode(states[part], tensors)) or not isinstance(other, torch.amp.GradScaler):  # off: {}
                other.load_state_dict(state)
        for part, optimizer in self.optimizers.items():
            memory, groups, more = (decode(one, tensors) for one in [*states[part], None][:3])
            own, members = optimizer.param_groups, [group["params"] for group in groups]
            if (names := self.trained(part)) != members[: len(own)]:
                lost = {*itertools.chain(*names)} - {*itertools.chain(*members)}
                log.warning("%s has the groups of the checkpoint, and does not train %s", part, sorted(lost)[:3])
                del own[len(groups) :]
                for group, saved in zip(own, members, strict=False):
                    group["params"] = [parameters[name] for name in saved]
            for group in groups[len(own) :]:
                optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})
            now, names = optimizer.state_dict()["param_groups"], [*itertools.chain(*self.trained(part))]
            for group, saved in zip(now, groups, strict=False):
                if other := sorted(optimizer.defaults.keys() - saved.keys()):
                    raise UsageError(f"the checkpoint is of another optimizer: its {part} has no {other[0]}")
                made, before, mine = group.get("as_made", {}), saved.get("as_made", {}), {*NOT_RESTORED, *allowed}
                for key in [key for key, one in before.items() if made.get(key, one) != one and key not in mine]:
                    log.warning("%s has the %s of the checkpoint, %s, and not %s", part, key, before[key], made[key])
                group |= {key: value for key, value in saved.items() if key not in mine}
            numbers = {name: number for number, name in enumerate(names)}
            state = {numbers.get(name, name): one for name, one in memory.items()}
            optimizer.load_state_dict({**(more or {}), "state": state, "param_groups": now})
            for name in memory.keys() & parameters.keys():  # torch has cast floats to the parameter's type
                as_saved = lambda was, now: was.to(now.device) if torch.is_tensor(was) else now  # noqa: E731
                kept = optimizer.state.get(parameters[name], {})  # an optimizer around another has none
                kept.update(tree_map(as_saved, memory[name], dict(kept)) if kept else {})

    def make_empty(self, schema: dict[str, list]) -> dict[str, Tensor]:
        """Return tensors for the states in a checkpoint with this schema, laid out and sharded as parameters are."""
        prefixes = tuple(f"{part}." for part in [*self.optimizers, *self.others])
        empty = shards.make_empty({name: about for name, about in schema.items() if name.startswith(prefixes)})
        trained = {f"{part}.{name}": one for part in self.optimizers for name, one in self.parameters().items()}
        for name, tensor in empty.items():
            parameter = trained.get(name.rpartition(".")[0])
            if parameter is not None and parameter.shape == tensor.shape:  # fused kernels want its layout, too
                empty[name] = torch.empty_like(parameter, dtype=tensor.dtype)
        return empty

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return each parameter by its name: that in the model, or else trainer.NAME and that in a module."""
        named = self.weights()
        return {name.removeprefix("model."): one for name, one in named.items() if isinstance(one, nn.Parameter)}

    def trained(self, part: str) -> list[list[str]]:
        """Return the parameters' names by group, in torch's order. Raises UsageError for one that no module has."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        groups = [group["params"] for group in self.optimizers[part].param_groups]
        if not names.keys() >= {*itertools.chain(*groups)}:
            stray = "trains a parameter that neither the model nor a module of the trainer has"
            raise UsageError(f"{part} ({type(self.optimizers[part]).__name__}) {stray}: no checkpoint would hold it")
        return [[names[parameter] for parameter in group] for group in groups]


def find_parts(trainer: Any) -> Parts:
    """Return what has a state: the trainer, and its attributes, also in lists, tuples and dicts, each thing once."""
    named = {"model": trainer.model, "optim": trainer.optimizer}
    for name, value in vars(trainer).items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            named |= {f"trainer.{name}.{key}": entry for key, entry in value.items()}
        else:
            named[f"trainer.{name}"] = value
    parts, seen = Parts({}, {}), set()
    for name, value in {**named, "self": trainer}.items():
        if id(value) in seen or not (callable(getattr(value, "state_dict", 0)) and hasattr(value, "load_state_dict")):
            continue
        seen.add(id(value))
        is_module, is_optimizer = isinstance(value, nn.Module), isinstance(value, torch.optim.Optimizer)
        (parts.modules if is_module else parts.optimizers if is_optimizer else parts.others)[name] = value
    return parts


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it; tensors go to `tensors`, named after it. Raises UsageError for other objects."""
    if torch.is_tensor(value):
        if name in tensors:
            raise UsageError(f"two tensors of a state have the name {name}: no checkpoint could tell them apart")
        tensors[name] = value
        has_rows = shards.is_sharded(value) or value.layout is not torch.strided or value.is_contiguous()
        return {"tensor": name, **({} if has_rows or 0 in value.stride() else {"stride": value.stride()})}
    if isinstance(value, dict):
        pairs = [[encode(key, name, {}), encode(one, f"{name}.{key}", tensors)] for key, one in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"{name} is a {type(value).__name__}: a checkpoint has tensors, numbers, strings, lists, dicts")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `encode` returned as JSON."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        one, stride = tensors[value["tensor"]], value.get("stride")
        return one.new_empty_strided(one.shape, stride).copy_(one) if stride else one
    [(kind, content)] = value.items()
    if kind in ("dict", "counter"):  # as torch's MultiStepLR has one
        found = {decode(key, tensors): decode(one, tensors) for key, one in content}
        return Counter(found) if kind == "counter" else found
    return (list if kind == "list" else tuple)(decode(one, tensors) for one in content)
