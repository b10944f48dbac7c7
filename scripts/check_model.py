"""Refuses models that cannot be trained, or not on several processes, before they are wrapped; finds lost layers."""

import logging
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.core.replicas import is_own
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.checkpoint.state import unwrap
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
LOST = "%s has layers or tensors that no optimizer trains, and no file has: "
LOST += "take nn.Parameter, ParameterList, ModuleList or ModuleDict, or freeze them"


def check(model: nn.Module, args: Namespace) -> None:
    """Raise UsageError for tensors without values, sparse and expanded ones, hooks that FSDP loses, and scripts."""
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(one) or one.is_meta:
            raise UsageError(f"-arch {args.arch}: {name} has no values yet: call the model once, or load its weights")
        if one.layout is not torch.strided or (one.numel() > 1 and 0 in one.stride()):
            raise UsageError(f"-arch {args.arch}: {name} is sparse or expanded: register a dense copy")
        if args.parallel == "fsdp" and (one._backward_hooks or one._post_accumulate_grad_hooks):
            hint = "let the trainer's __init__ call register_post_accumulate_grad_hook, or take -parallel ddp"
            raise UsageError(f"-arch {args.arch}: {name} has a hook, which -parallel fsdp would lose: {hint}")
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
    """Warn of attributes of a trainer's modules, given by name, with something to train that no module registers.

    Layers in evaluation mode, as a teacher, are not meant to be trained. FSDP has put others in place of parameters.
    """
    known = {one for root in modules.values() for one in root.parameters()}
    for part, root in modules.items():
        for name, module in unwrap(root).named_modules(prefix=part):
            values = vars(module) if any(map(is_own, type(module).__mro__)) else {}  # under FSDP the first is torch's
            for key, value in values.items():
                if trained_in(value, has_tensors=not any(map(is_sharded, known))) - known:
                    log.warning(LOST, f"{name}.{key}")


def trained_in(value: Any, has_tensors: bool) -> set[Tensor]:
    """Return the tensors to train in an attribute: its own, and those of layers in a list, tuple or dict."""
    inside = tree_leaves(value) if isinstance(value, list | tuple | dict) else []
    layers = [one for one in inside if isinstance(one, nn.Module) and one.training]
    leaves = [one for one in [value, *inside] if isinstance(one, Tensor) and one.is_leaf and has_tensors]
    return {one for one in [*leaves, *(one for layer in layers for one in layer.parameters())] if one.requires_grad}
