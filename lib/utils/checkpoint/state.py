"""What a checkpoint holds: how far a run is, its tensors, and what else the parts of a trainer keep."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.utils.checkpoint import shards
from lib.utils.data.plan import Plan
from lib.utils.errors import UsageError


@dataclass
class State:
    """How far the run is, over all processes, and what it has counted."""

    epoch: int = 0  # epochs finished, their evaluation included
    step: int = 0  # optimizer steps
    samples: int = 0  # training samples
    bad_steps: int = 0  # steps that were skipped, as far as they were read from the device
    bad_row: int = 0  # of these, in a row until now
    best: dict | None = None  # metric, value and epoch of the weights in best/
    sums: dict[str, float] = field(default_factory=dict)  # the epoch's training metrics up to its last log line
    unlogged: dict[str, list[float]] = field(default_factory=dict)  # since then, as exact terms; as of the last save

    def count_bad(self, norms: list[Tensor]) -> None:
        """Count the steps whose gradient norm (0-d tensors) is not finite. Waits for the device."""
        finite = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        self.bad_row = next((i for i, good in enumerate(reversed(finite)) if good), len(finite) + self.bad_row)
        self.bad_steps += finite.count(False)


def read_manifest(folder: Path) -> dict:
    """Return what `shards.read_manifest` does. Raises Damaged also if a run could not go on from its content."""
    try:
        manifest = shards.read_manifest(folder)
        state, config = State(**manifest["state"]), manifest["config"]
        plan = Plan(config["samples"], config["batch_size"], config["micro_batch"], config["drop_last"])
        counts = [state.step, state.epoch, state.samples, plan.samples - 1, plan.batch - 1, plan.micro - 1]
        counts += [file["bytes"] for file in manifest["shards"].values()]
        shards.make_empty(manifest["tensors"], "meta")
        if not (
            min(counts) >= 0
            and plan.step_in_epoch(state) in range(plan.steps + 1)
            and _types(manifest["state"]) == _types(vars(State()))
            and (state.best is None or state.best.keys() >= {"metric", "value", "score", "epoch"})
            and all(map(shards.FILE_NAME.fullmatch, manifest["shards"]))  # none in another folder
        ):
            raise ValueError("a number or a name is none of a run's")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise shards.Damaged(f"{folder / 'manifest.json'}: no run writes what is in it ({error!r})") from error
    return manifest


def _types(state: dict) -> dict[str, type]:
    return {name: type(value) for name, value in state.items() if name != "best"}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, a tied one once, under its first name."""
    model = unwrap(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # each tensor under one name
    saved = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if name in saved}


def unwrap(module: Any) -> Any:
    """Return the module that the user wrote, with its own names; anything else as it is."""
    return module.module if isinstance(module, DistributedDataParallel) else module


@dataclass(frozen=True)
class Parts:
    """What has a state among the attributes of a trainer, by the prefix of its names in a checkpoint."""

    modules: dict[str, nn.Module]  # "model", and trainer.NAME of others
    optimizers: dict[str, torch.optim.Optimizer]  # "optim", and trainer.NAME of others
    # trainer.NAME: a scheduler, a scaler, whatever else has state_dict and load_state_dict
    others: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors by name: model.head.weight, optim.head.weight.exp_avg, trainer.teacher.bias.

        Raises:
            UsageError: an optimizer trains parameters that are in none of the modules.
        """
        found = {}
        for part, module in self.modules.items():
            for name, tensor in model_tensors(module).items():
                found.setdefault(tensor, f"{part}.{name}")
        tensors = {name: tensor for tensor, name in found.items()}
        for optimizer, parameter, name in self.trained_parameters():
            memory = optimizer.state.get(parameter, {}).items()
            tensors |= {f"{name}.{key}": value for key, value in memory if torch.is_tensor(value)}
        for part, other in self.others.items():
            encode(other.state_dict(), part, tensors)
        return tensors

    def values(self) -> dict[str, Any]:
        """Return as JSON what is no tensor: the groups of optimizers, the states of others, frozen parameters.

        Raises:
            UsageError: names what a checkpoint cannot hold.
        """
        names = self.parameter_names()
        found = {part: encode(other.state_dict(), part, {}) for part, other in self.others.items()}
        for part, optimizer in self.optimizers.items():
            found[part] = [
                {
                    "params": [names.get(parameter) for parameter in group["params"]],
                    "numbers": encode(_numbers(group), f"{part}.param_groups", {}),
                }
                for group in optimizer.param_groups
            ]
        found["frozen"] = [name for parameter, name in names.items() if not parameter.requires_grad]
        return found

    def load_groups(self, values: dict[str, Any], allowed: Collection[str]) -> None:
        """Give the optimizers the groups of a checkpoint, also those that training added, and freeze what was frozen.

        A number whose name is in `allowed` stays as it is.
        """
        by_name = {name: parameter for parameter, name in self.parameter_names().items()}
        for name, parameter in by_name.items():
            parameter.requires_grad_(name not in values["frozen"])
        for part, optimizer in self.optimizers.items():
            for number, saved in enumerate(values.get(part, [])):
                numbers = decode(saved["numbers"], {})
                if number == len(optimizer.param_groups) and by_name.keys() >= {*saved["params"]}:
                    optimizer.add_param_group({"params": [by_name[name] for name in saved["params"]], **numbers})
                for key in numbers.keys() - allowed:
                    now = optimizer.param_groups[number].get(key)
                    same = torch.full_like(now, numbers[key]) if torch.is_tensor(now) else numbers[key]
                    optimizer.param_groups[number][key] = same

    def load_others(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Give the others their states: `tensors` by name, and what else `values` holds."""
        for part, other in self.others.items():
            other.load_state_dict(decode(values[part], tensors))

    def rank_dependent(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the names of tensors that may differ between ranks, so that the first rank's are saved.

        They are buffers (a counter has its value from the rank's last micro-batch), and tensors of the trainer.
        """
        buffers = {f"model.{name}" for name, _ in self.modules["model"].named_buffers()}
        return buffers | {name for name in tensors if name.startswith("trainer.")}

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Return the name of each parameter: that in the model, or else trainer.NAME and that in a module."""
        names = {}
        for part, module in reversed(self.modules.items()):
            prefix = "" if part == "model" else f"{part}."
            names |= {parameter: f"{prefix}{name}" for name, parameter in module.named_parameters()}
        return names

    def trained_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, str]]:
        """Yield each optimizer, each of its parameters, and the prefix of that parameter's state: optim.head.weight.

        Raises:
            UsageError: the parameter is in none of the modules.
        """
        names = self.parameter_names()
        for part, optimizer in self.optimizers.items():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter not in names:
                    stray = "trains a parameter that neither the model nor a module of the trainer has"
                    raise UsageError(f"{part} ({type(optimizer).__name__}) {stray}: no checkpoint would hold it")
                yield optimizer, parameter, f"{part}.{names[parameter]}"


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group holds next to its parameters; of a tensor (a learning rate) its number."""
    numbers = {key: value for key, value in group.items() if key != "params"}
    return {key: value.item() if torch.is_tensor(value) else value for key, value in numbers.items()}


def attributes(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield a trainer's attributes as trainer.NAME; of lists, tuples and dicts the entries, as trainer.NAME.KEY."""
    for name, value in vars(trainer).items():
        if isinstance(value, dict):
            yield from ((f"trainer.{name}.{key}", entry) for key, entry in value.items())
        elif isinstance(value, list | tuple):
            yield from ((f"trainer.{name}.{number}", entry) for number, entry in enumerate(value))
        else:
            yield f"trainer.{name}", value


def find_parts(trainer: Any) -> Parts:
    """Return what has a state among a trainer's attributes, also in its lists, tuples and dicts, each thing once.

    It has one if it has `state_dict` and `load_state_dict`. So may the trainer itself.
    """
    named = {"model": trainer.model, "optim": trainer.optimizer, **dict(attributes(trainer)), "trainer": trainer}
    parts, seen = Parts({}, {}), set()
    for name, value in named.items():
        value = unwrap(value)
        if id(value) in seen or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            continue
        seen.add(id(value))
        is_module, is_optimizer = isinstance(value, nn.Module), isinstance(value, torch.optim.Optimizer)
        (parts.modules if is_module else parts.optimizers if is_optimizer else parts.others)[name] = value
    return parts


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON has it; its tensors go to `tensors`, under names that begin with this one.

    Raises:
        UsageError: the state holds something else than tensors, numbers, strings, lists, tuples and dicts of them.
    """
    if torch.is_tensor(value):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {
            "dict": [[encode(key, name, {}), encode(one, f"{name}.{key}", tensors)] for key, one in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    wanted = "a checkpoint holds tensors, numbers, strings, lists and dicts"
    raise UsageError(f"{name} is a {type(value).__name__}, {value!r:.60}: {wanted}; leave it out of state_dict()")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `encode` returned as JSON."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {decode(key, tensors): decode(one, tensors) for key, one in content}
    entries = [decode(one, tensors) for one in content]
    return entries if kind == "list" else tuple(entries)


def init_optimizer_state(parts: Parts, saved: Collection[str] | None = None) -> list[torch.optim.Optimizer]:
    """Let new optimizers make their state, by a step with gradients and a learning rate of zero; return them.

    As in torch.distributed.checkpoint.state_dict: the state then has the right shapes, devices and sharding, and a
    checkpoint fills it. With the names of `saved` tensors, only parameters that have saved state get one.

    Raises:
        UsageError: an optimizer has state that is not a tensor, which no checkpoint would hold.
    """
    fresh = [optimizer for optimizer in parts.optimizers.values() if not optimizer.state]
    known = {name.rpartition(".")[0] for name in saved or ()}
    for optimizer in fresh:
        trained = [(parameter, name) for one, parameter, name in parts.trained_parameters() if one is optimizer]
        _take_zero_step(optimizer, [parameter for parameter, name in trained if saved is None or name in known])
    for optimizer in parts.optimizers.values():
        memory = [item for one in optimizer.state.values() for item in one.items()]
        odd = [name for name, value in memory if not isinstance(value, Tensor | None)]
        if odd:
            fault = f"keeps {odd[0]!r}, which is not a tensor, in its state"
            raise UsageError(f"{type(optimizer).__name__} {fault}: a checkpoint cannot hold it")
    return fresh


@torch.no_grad()
def _take_zero_step(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Take a step that changes nothing but the optimizer's state: not its groups, where some count their steps."""
    before = [
        {key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in optimizer.param_groups
    ]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, numbers in zip(optimizer.param_groups, before, strict=True):
        for key in group.keys() - numbers.keys() - {"params"}:
            del group[key]
        group.update(numbers)


def tensors_to_save(parts: Parts) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint will hold after the first step. The optimizers are left as they were."""
    fresh = init_optimizer_state(parts)
    tensors = parts.tensors()
    for optimizer in fresh:
        optimizer.state.clear()
    return tensors
