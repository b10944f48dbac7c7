"""What a checkpoint holds: how far a run is, and its tensors."""

import math
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
    scaler: dict = field(default_factory=dict)  # of -fp16's gradients; as of the last save


def read_manifest(folder: Path) -> dict:
    """Return what `shards.read_manifest` does. Raises Damaged also if a run could not go on from its content."""
    try:
        manifest = shards.read_manifest(folder)
        state, config = State(**manifest["state"]), manifest["config"]
        plan = Plan(config["samples"], config["batch_size"], config["micro_batch"], config["drop_last"])
        counts = [state.step, state.epoch, state.samples, plan.samples - 1, plan.batch - 1, plan.micro - 1]
        counts += [file["bytes"] for file in manifest["shards"].values()] + [len(manifest["shards"]) - 1]
        counts += [config.get("threads", 1) - 1, 4096 - config.get("threads", 1)]  # no machine has more
        sums = [*state.unlogged.values(), state.sums.values(), [(state.best or {"score": 0.0})["score"]]]
        shards.make_empty(manifest["tensors"], "meta")
        if not (
            min(counts) >= 0
            and len([math.fsum(terms) for terms in sums]) > 1  # which raises where one is no number
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


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote, with its own names."""
    return module.module if isinstance(module, DistributedDataParallel) else module


@dataclass(frozen=True)
class Parts:
    """The modules and optimizers of a run, by the prefix of their tensors' names."""

    modules: dict[str, nn.Module]  # "model", and trainer.NAME of others that a trainer keeps
    optimizers: dict[str, torch.optim.Optimizer]  # "optim", and trainer.NAME likewise

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
        return tensors

    def trained_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, str]]:
        """Yield each optimizer, each of its parameters, and the prefix of that parameter's state: optim.head.weight.

        Raises:
            UsageError: the parameter is in none of the modules.
        """
        names = {}
        for part, module in reversed(self.modules.items()):
            prefix = "" if part == "model" else f"{part}."
            names |= {parameter: f"{prefix}{name}" for name, parameter in module.named_parameters()}
        for part, optimizer in self.optimizers.items():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter not in names:
                    stray = "trains a parameter that neither the model nor a module of the trainer has"
                    raise UsageError(f"{part} ({type(optimizer).__name__}) {stray}: no checkpoint would hold it")
                yield optimizer, parameter, f"{part}.{names[parameter]}"


def find_parts(trainer: Any) -> Parts:
    """Return the model and the optimizer of a trainer, and all modules and optimizers that are attributes of it."""
    given = (trainer.model, trainer.loss, trainer.optimizer)  # a loss follows from the flags: it is not saved
    own = {
        f"trainer.{name}": value for name, value in vars(trainer).items() if not any(value is one for one in given)
    }
    modules = {name: unwrap(value) for name, value in own.items() if isinstance(value, nn.Module)}
    optimizers = {name: value for name, value in own.items() if isinstance(value, torch.optim.Optimizer)}
    return Parts({"model": unwrap(trainer.model), **modules}, {"optim": trainer.optimizer, **optimizers})


def find_unsaved(trainer: Any) -> list[str]:
    """Return the attributes of a trainer that are lists, tuples or dicts and hold what `find_parts` does not find."""
    parts = find_parts(trainer)
    saved = {tensor for module in parts.modules.values() for tensor in model_tensors(module).values()}

    def is_lost(part: Any) -> bool:
        if isinstance(part, nn.Module):
            return not saved.issuperset(model_tensors(part).values())
        return isinstance(part, torch.optim.Optimizer) and part not in parts.optimizers.values()

    values = {name: [*one.values()] if isinstance(one, dict) else one for name, one in vars(trainer).items()}
    return [name for name, one in values.items() if isinstance(one, list | tuple) and any(map(is_lost, one))]


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
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def tensors_to_save(parts: Parts) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint will hold after the first step. The optimizers are left as they were."""
    fresh = init_optimizer_state(parts)
    tensors = parts.tensors()
    for optimizer in fresh:
        optimizer.state.clear()
    return tensors
