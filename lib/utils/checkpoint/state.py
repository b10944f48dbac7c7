"""How far a run is, and the tensors that are its state."""

import contextlib
import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lib.utils import distributed
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)


@dataclass
class State:
    """How far the run is, over all processes, and what it has counted."""

    epoch: int = 0  # epochs finished, their evaluation included
    step: int = 0  # optimizer steps
    samples: int = 0  # training samples
    bad_steps: int = 0  # steps that were skipped, as far as they were read from the device
    bad_row: int = 0  # of these, in a row until now
    sums: dict[str, float] = field(default_factory=dict)  # the epoch's training metrics up to its last log line
    unlogged: dict[str, float] = field(default_factory=dict)  # what came since; both as of the last save

    def count_bad(self, norms: list[Tensor]):
        """Count the steps whose gradient norm (0-d tensors) is not finite. Waits for the device."""
        finite = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        self.bad_row = next((i for i, good in enumerate(reversed(finite)) if good), len(finite) + self.bad_row)
        self.bad_steps += finite.count(False)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, a tied one once, under its first name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # each tensor under one name
    saved = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if name in saved}


def unwrap(module: nn.Module) -> nn.Module:
    """The module that the user wrote, with its own names."""
    return module.module if isinstance(module, DistributedDataParallel) else module


@dataclass(frozen=True)
class Parts:
    """What a run's checkpoints hold, by the words that the names of its tensors begin with."""

    modules: dict[str, nn.Module]  # "model", and trainer.NAME of others that a trainer keeps
    optimizers: dict[str, torch.optim.Optimizer]  # "optim", and trainer.NAME likewise

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors, each under one name: model.head.weight, optim.head.weight.exp_avg, trainer.teacher.bias.

        Raises UsageError for an optimizer of parameters that are in none of the modules.
        """
        found = {}
        for part, module in self.modules.items():
            for name, tensor in model_tensors(module).items():
                found.setdefault(tensor, f"{part}.{name}")
        whole = {name: tensor for tensor, name in found.items()}
        for _, _, memory in self._memory():
            whole |= memory
        return whole

    def early(self) -> set[str]:
        """The names of tensors that may change at any moment after a step: buffers, and all that a trainer keeps."""
        buffers = {f"model.{name}" for name, _ in self.modules["model"].named_buffers()}
        return buffers | {name for name in self.tensors() if name.startswith("trainer.")}

    def _memory(self):
        """What each optimizer remembers of each parameter: tensors by name, which is the parameter's own name for
        those of the model."""
        places = {}
        for part, module in reversed(self.modules.items()):
            prefix = "" if part == "model" else f"{part}."
            places |= {parameter: f"{prefix}{name}" for name, parameter in module.named_parameters()}
        for part, optimizer in self.optimizers.items():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter not in places:
                    kind = type(optimizer).__name__
                    raise UsageError(f"{part} ({kind}) trains what neither the model nor a module that the trainer "
                                     "keeps has: no checkpoint would hold it")  # fmt: skip
                start, words = f"{part}.{places[parameter]}", optimizer.state.get(parameter, {})
                held = {f"{start}.{word}": value for word, value in words.items() if isinstance(value, Tensor)}
                yield optimizer, parameter, held

    def forget_all_but(self, loaded: dict, optimizers: list):
        """Drops what these optimizers remember of parameters, but for those of which some is loaded."""
        for optimizer, parameter, memory in self._memory():
            if optimizer in optimizers and not any(name in loaded for name in memory):
                optimizer.state.pop(parameter, None)


def parts_of(trainer) -> Parts:
    """The model and the optimizer of a trainer, and all modules and optimizers that are attributes of it."""
    given = (trainer.model, trainer.loss, trainer.optimizer)  # a loss is what the flags make of it
    kept = {
        f"trainer.{name}": value for name, value in vars(trainer).items() if not any(value is one for one in given)
    }
    modules = {name: unwrap(value) for name, value in kept.items() if isinstance(value, nn.Module)}
    optimizers = {name: value for name, value in kept.items() if isinstance(value, torch.optim.Optimizer)}
    return Parts({"model": unwrap(trainer.model), **modules}, {"optim": trainer.optimizer, **optimizers})


def warn_of_lost(trainer):
    """Tells of what a trainer keeps that looks like state and is in no checkpoint."""
    for name, value in vars(trainer).items():
        if isinstance(value, (Tensor, torch.Generator, torch.optim.lr_scheduler.LRScheduler)):
            log.warning("the trainer's %s (%s) is in no checkpoint, a resumed run begins it anew: modules are kept, "
                        "with their buffers, and optimizers", name, type(value).__name__)  # fmt: skip


def warn_of_differing(trainer):
    """Tells of what a trainer keeps that is not the same on all ranks when a run's first epoch is over: a resumed run
    would begin with rank 0's. Buffers of a module under DDP are rank 0's anyhow."""
    if trainer.world.size == 1 or trainer.state.epoch:
        return
    tensors = {}
    for name, module in vars(trainer).items():
        if isinstance(module, nn.Module) and module is not trainer.model and module is not trainer.loss:
            buffers = {} if isinstance(module, DistributedDataParallel) else dict(module.named_buffers())
            named = {**dict(unwrap(module).named_parameters()), **buffers}
            tensors |= {f"{name}.{word}": one for word, one in named.items() if not isinstance(one, DTensor)}
    odd = distributed.differing(tensors, trainer.world)
    if odd and trainer.world.is_main:
        log.warning("the trainer's %s and %d more are not the same on all processes, a resumed run has rank 0's: "
                    "what is trained goes into DistributedDataParallel", odd[0], len(odd) - 1)  # fmt: skip


def prepare(parts: Parts) -> list[torch.optim.Optimizer]:
    """Lets fresh optimizers make their memory, by a step with gradients of zero and a learning rate of zero. Returns
    them.

    The way of torch.distributed.checkpoint.state_dict: the memory then has the right shapes, devices and sharding.
    Parameters keep their values; a checkpoint then fills the memory. One that has its memory from the first (Adagrad)
    keeps it. Raises UsageError for memory other than tensors, which no checkpoint would hold.
    """
    fresh = [optimizer for optimizer in parts.optimizers.values() if not optimizer.state]
    for optimizer in fresh:
        try:
            _idle_step(optimizer)
        except TypeError as error:  # LBFGS and its kin
            kind = type(optimizer).__name__
            raise UsageError(f"{kind} takes no step by itself ({error}): its memory cannot be made ready") from None
    for optimizer in parts.optimizers.values():
        odd = [word for memory in optimizer.state.values() for word, value in memory.items()
               if not isinstance(value, Tensor | None)]  # fmt: skip
        if odd:
            raise UsageError(f"{type(optimizer).__name__} remembers {odd[0]!r} as something else than a "
                             f"tensor, which a checkpoint cannot hold")  # fmt: skip
    return fresh


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
def untouched(parts: Parts):
    """Gradients are gone after the block, and what a trainer keeps of its own is as it was."""
    fresh = [optimizer for optimizer in parts.optimizers.values() if not optimizer.state]
    alone = len(parts.modules) == len(parts.optimizers) == 1
    before = {} if alone else {name: tensor.detach().clone() for name, tensor in parts.tensors().items()}
    yield
    for optimizer in fresh:
        optimizer.state.clear()
    for optimizer in parts.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, tensor in parts.tensors().items():
            if name in before:
                tensor.copy_(before[name])


@contextlib.contextmanager
def prepared(parts: Parts):
    """Everything a checkpoint will hold once the first step is done, while the block runs; the optimizers are then as
    they were."""
    fresh = prepare(parts)
    try:
        yield parts.tensors()
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
