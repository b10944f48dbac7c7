"""One model on several processes. In this order: building, DDP, FSDP2, precision, compilation, recomputation."""

import contextlib
import functools
import importlib
import sys
import warnings
from argparse import Namespace
from collections import Counter
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lib.core.buffers import take_first
from lib.utils import distributed, seeding
from lib.utils.checkpoint.shards import schema
from lib.utils.checkpoint.state import model_tensors
from lib.utils.distributed import World
from lib.utils.errors import UsageError, call_optional

SKIPPED = "-parallel fsdp cannot sum: a micro-batch skips a block that another one calls ({}); take -parallel ddp"


def build(arch: ModuleType, args: Namespace) -> nn.Module:
    """Return the model of an architecture's module, seeded by -seed. Raises UsageError for what cannot be trained."""
    seeding.seed(seeding.MODEL, args.seed)
    model = arch.get_model(args)
    if not isinstance(model, nn.Module):
        raise UsageError(f"-arch {args.arch}: get_model returns {model!r}; it must return a model, an nn.Module")
    call_optional("scripts.check_model", "check", model, args)
    schema(model_tensors(model))  # refuses types that a checkpoint cannot hold
    return model


def wrap(model: nn.Module, args: Namespace, world: World, engine: str = "exact", *, arch: Any = None) -> nn.Module:
    """Return the model on its device, with rank 0's values; for the stock engine inside DDP; or sharded (FSDP2).

    Blocks: of the `arch` module's get_blocks(model), else of `blocks`. Raises UsageError if -recompute finds none.
    """
    in_eval = [one for one in model.modules() if not one.training]
    chosen = {one for parent in model.modules() for one in parent.children() if parent.training and not one.training}
    model.train()  # pretrained ones come in evaluation mode
    for one in in_eval:  # what is frozen stays as get_model left it, and so does a norm layer by itself
        weights = [*one.parameters()]
        is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
        if is_frozen or (one in chosen and (isinstance(one, _NormBase) or not weights)):
            one.eval()
    if args.channels_last and world.device.type == "cuda" and args.parallel != "fsdp":  # which cannot shard them
        model = nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    parts = getattr(arch, "get_blocks", blocks)(model)
    if args.compile:
        for part in (parts if args.compile == "blocks" else []) or [model]:
            code, owner = getattr(part.forward, "__func__", None), getattr(part.forward, "__self__", None)
            part.forward = MethodType(torch.compile(code), owner) if code else torch.compile(part.forward)
    if "torch._dynamo" in sys.modules:  # get_model may compile, too
        _configure_compiler(engine)
    if args.recompute and not parts:
        raise UsageError(f"-recompute: -arch {args.arch} has no blocks to recompute; give it a get_blocks(model)")
    for part in parts if args.recompute else ():
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    call_optional("scripts.check_model", "check_layers", model, world, engine)
    if args.parallel == "fsdp" and world.size > 1:
        return _shard(model, parts, args, world, engine)
    model = model.to(world.device)
    if world.size == 1:
        return model
    # It compares the models of all ranks, and gives them rank 0's values.
    options = {"find_unused_parameters": args.find_unused, "gradient_as_bucket_view": engine == "stock"}
    wrapped = DistributedDataParallel(model, None if world.device.type == "cpu" else [world.device], **options)
    vars(wrapped)["trained"] = [one for one in model.parameters() if one.requires_grad]  # which it will sum
    if engine == "exact" and getattr(wrapped, "_comm_hooks", ()):
        raise UsageError("DDP's communication hook has no effect in the exact engine: take -deterministic no")
    # The exact engine sums gradients itself: DDP's buckets, as large as all gradients, would lie there unused.
    return wrapped if engine == "stock" else wrapped.module


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's outermost ModuleLists, else its children, with parameters and a forward."""
    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    lists = [(name, one) for name, one in lists if "parametrizations" not in name]  # torch's own, as of weight_norm
    outer = [one for name, one in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    parts = [part for one in outer for part in one] or list(model.children())
    return [m for m in parts if m is not None and type(m).forward is not nn.Module.forward and [*m.parameters()]]


def _shard(model: nn.Module, parts: list[nn.Module], args: Namespace, world: World, engine: str) -> nn.Module:
    """Give all ranks rank 0's values; then make every block a group of its own, and the rest the root's."""
    from torch.distributed import fsdp  # takes most of a second

    def precision(part: nn.Module) -> fsdp.MixedPrecisionPolicy:
        """Half precision also between the processes, where autocast computes in it; BatchNorm needs whole weights.

        Inputs keep their dtype, as under DDP, where autocast alone decides; for the same bits, weights do so, too.
        """
        whole = engine == "exact" or any(isinstance(module, _NormBase) for module in part.modules())
        if whole or not (args.fp16 or args.bf16):
            return fsdp.MixedPrecisionPolicy()
        half = torch.float16 if args.fp16 else torch.bfloat16
        return fsdp.MixedPrecisionPolicy(half, reduce_dtype=torch.float32, cast_forward_inputs=False)

    warnings.filterwarnings("error", "DTensor random operators")  # each rank would draw the same values for its shard
    mesh = torch.distributed.init_device_mesh(world.device.type, (world.size,))
    shard = functools.partial(fsdp.fully_shard, mesh=mesh, reshard_after_forward=True)
    take_first([*model.parameters(), *model.buffers()])
    named = [module.named_parameters(remove_duplicate=False) for module in (model, *parts)]
    everywhere, *uses = (Counter(parameter for _, parameter in one) for one in named)
    # What is tied to the rest of the model is the root's, as that is: in 32 bits, as under DDP.
    groups = [part for part, own in zip(parts, uses, strict=True) if all(everywhere[one] == own[one] for one in own)]
    for part in groups:
        shard(part, mp_policy=precision(part))
    shard(model, mp_policy=fsdp.MixedPrecisionPolicy() if groups else precision(model))
    sharded: list[Any] = [*groups, model]
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # a sum: each micro-batch counts by its samples already
        part.set_force_sum_reduction_for_comms(True)
    _refuse_skipped_blocks(model, groups, world)
    return model


def _refuse_skipped_blocks(model: nn.Module, groups: list[nn.Module], world: World) -> None:
    """Let all ranks agree on each block that they call, before FSDP brings its weights, and on the end of a pass.

    Where one rank's micro-batch skips a block (a mixture of experts, layer drop), FSDP would take another block's.
    """
    names = [name for name, part in model.named_modules() if part in groups]

    def agree(number: int) -> None:
        highest, lowest = distributed.all_reduce_max([number, -number], world)
        if highest != -lowest:
            raise UsageError(SKIPPED.format(names[int(-lowest if lowest <= 0 else highest)]))  # -1: a pass's end

    for number, name in enumerate(names):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, number=number: agree(number), prepend=True)
    model.register_forward_hook(lambda *_: agree(-1))


def autocast(args: Namespace, device: torch.device) -> contextlib.AbstractContextManager:
    """Return the context of the forward pass: mixed precision under -fp16 or -bf16, else none."""
    return torch.autocast(device.type, torch.float16 if args.fp16 else torch.bfloat16, bool(args.fp16 or args.bf16))


def _configure_compiler(engine: str) -> None:
    # Parts of the same class share one store of compiled code, which by default is too small for many of them.
    settings: Any = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, 64)
    if engine == "exact":
        settings.optimize_ddp = False  # it cuts graphs where a trainer wraps a module in DDP: not on one process
        settings.automatic_dynamic_shapes = False  # which code a batch gets would depend on those before it
    if hasattr(settings, "automatic_dynamic_exclusion_guard"):  # not in every torch
        settings.automatic_dynamic_exclusion_guard = True  # a short batch leaves the code for whole ones in use
