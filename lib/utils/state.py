"""How far a run is, and the tensors that are its state."""

import contextlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib.utils.errors import UsageError

log = logging.getLogger(__name__)


@dataclass
class State:
    """How far the run is, over all processes."""

    epoch: int = 0  # epochs finished, their evaluation included
    step: int = 0  # optimizer steps
    samples: int = 0  # training samples


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, a tied one once, under its first name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # each tensor under one name
    saved = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if name in saved}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, by the parameter's name and its own word: `head.weight.exp_avg`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{word}": value
        for parameter, memory in optimizer.state.items()
        for word, value in memory.items()
        if isinstance(value, Tensor)
    }


def all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a checkpoint holds: model.* and optim.*, the live tensors."""
    model_part = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    optim_part = {f"optim.{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()}
    return {**model_part, **optim_part}


def warn_of_strays(trainer):
    """Tells of modules and optimizers that a trainer keeps beside those it was given: no checkpoint holds them."""
    given = [trainer.model, trainer.loss, trainer.optimizer]
    for name, value in vars(trainer).items():
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and not any(value is one for one in given):
            log.warning("the trainer's %s (%s) is in no checkpoint: a resumed run begins it anew; a part of the "
                        "model is kept", name, type(value).__name__)  # fmt: skip


def prepare(optimizer: torch.optim.Optimizer):
    """Lets a fresh optimizer make its memory, by a step with gradients of zero and a learning rate of zero.

    The way of torch.distributed.checkpoint.state_dict: the memory then has the right shapes, devices and sharding.
    Parameters keep their values; a checkpoint then fills the memory. One that has its memory from the first (Adagrad)
    keeps it. Raises UsageError for memory other than tensors, which no checkpoint would hold.
    """
    if not optimizer.state:
        _idle_step(optimizer)
    for memory in optimizer.state.values():
        odd = [word for word, value in memory.items() if not isinstance(value, Tensor | None)]
        if odd:
            raise UsageError(f"-optimizer: {type(optimizer).__name__} remembers {odd[0]!r} as something else than a "
                             f"tensor, which a checkpoint cannot hold")  # fmt: skip


@torch.no_grad()
def _idle_step(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def prepared(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Everything a checkpoint will hold once the first step is done, while the block runs; the optimizer is then as
    it was."""
    fresh = not optimizer.state
    prepare(optimizer)
    try:
        yield all_tensors(model, optimizer)
    finally:
        if fresh:
            optimizer.state.clear()
