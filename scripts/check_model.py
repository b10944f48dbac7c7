"""Refuses models that cannot be trained, or not on several processes, before they are wrapped; finds lost layers."""

import logging
from argparse import Namespace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lib.core.replicas import is_own
from lib.utils.checkpoint.state import unwrap
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
LOST = "%s has layers that no optimizer trains, and no file holds: take nn.ModuleList or ModuleDict, or freeze them"


def check(model: nn.Module, args: Namespace) -> None:
    """Raise UsageError for tensors without values, sparse and expanded ones, and scripted modules."""
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(one) or one.is_meta:
            raise UsageError(f"-arch {args.arch}: {name} has no values yet: call the model once, or load its weights")
        if one.layout is not torch.strided or (one.numel() > 1 and 0 in one.stride()):
            raise UsageError(f"-arch {args.arch}: {name} is sparse or expanded: register a dense copy")
    if any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
        raise UsageError(f"-arch {args.arch}: torch.jit.script hides what a module has: leave it out")


def check_layers(model: nn.Module, world: World, engine: str) -> None:
    """Raise UsageError for layers that several processes would train otherwise than one."""
    for name, one in model.named_modules() if world.size > 1 else ():
        is_sync = isinstance(one, nn.SyncBatchNorm) and one.training and world.device.type == "cpu"
        is_table = isinstance(one, nn.Embedding | nn.EmbeddingBag)
        if is_sync or (is_table and (one.max_norm or one.scale_grad_by_freq or (one.sparse and engine == "exact"))):
            raise UsageError(f"{name}: max_norm, sparse=True, scale_grad_by_freq, SyncBatchNorm (CPU) need 1 process")


def warn_lost_layers(modules: dict[str, nn.Module]) -> None:
    """Warn of attributes of a trainer's modules, given by name, with layers to train that no module registers.

    Layers in evaluation mode, as a teacher, are not meant to be trained.
    """
    known = {one for root in modules.values() for one in root.parameters()}
    for part, root in modules.items():
        for name, module in unwrap(root).named_modules(prefix=part):
            values = vars(module) if any(map(is_own, type(module).__mro__)) else {}  # under FSDP the first is torch's
            for key, value in values.items():
                layers = tree_leaves(value) if isinstance(value, list | tuple | dict) else []
                layers = [one for one in layers if isinstance(one, nn.Module) and one.training]
                weights = {weight for one in layers for weight in one.parameters() if weight.requires_grad}
                if weights - known:
                    log.warning(LOST, f"{name}.{key}")
