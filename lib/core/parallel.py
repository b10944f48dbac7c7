"""One model on several processes. In this order: DDP, FSDP2, precision, compilation, recomputation."""

import contextlib
import functools
import importlib
import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lib.utils import distributed, seeding
from lib.utils.checkpoint import shards
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
GRAPHS = 64  # that torch.compile keeps of one forward method


def build(arch, args, world: World) -> nn.Module:
    """Return the model of an architecture's module, seeded by -seed.

    A model that is to be sharded is built on rank 0 alone. The other ranks build it on the meta device, which holds
    no values; `wrap` gives them rank 0's. Where the constructor cannot run there, all ranks build it in full.
    """
    seeding.for_building(args.seed)
    if not _is_sharded(args, world):
        return _make(arch, args)
    model, obstacle = (_make(arch, args), "") if world.is_main else _make_on_meta(arch, args)
    obstacles = [text for text in distributed.gather_json(obstacle, world) if text]
    if obstacles and world.is_main:
        log.warning("every process builds the whole model first, as its constructor does not run on the meta "
                    "device: %s", obstacles[0])  # fmt: skip
    generator = torch.get_rng_state()  # rank 0's: the others have drawn no values
    torch.distributed.broadcast(generator, 0)
    torch.set_rng_state(generator)
    return model


def _make(arch, args) -> nn.Module:
    model = arch.get_model(args)
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"-arch {args.arch}: get_model returns {kind}; it must return a model, an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"-arch {args.arch}: the model has no parameters that can be trained")
    return model


def _make_on_meta(arch, args) -> tuple[nn.Module, str]:
    """The model on the meta device and ""; or the model in full and what went wrong on the meta device."""
    try:
        with torch.device("meta"):
            model = _make(arch, args)
        lost = [f"{path}.{name}".lstrip(".") for path, module in model.named_modules()
                for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]  # fmt: skip
        if not lost:
            return model, ""
        obstacle = f"the tensor {lost[0]} is neither a parameter nor a buffer"
    except (RuntimeError, TypeError, ValueError) as error:  # as .item(), .numpy() and others raise
        obstacle = str(error).partition("\n")[0]
    seeding.for_building(args.seed)
    return _make(arch, args), obstacle


def wrap(model: nn.Module, args, world: World, *, arch=None) -> nn.Module:
    """Return the model on its device, under DistributedDataParallel or sharded where there are several processes.

    Blocks are what the `arch` module's get_blocks(model) returns, else `blocks(model)`. Raises UsageError for
    -sync_bn on the CPU, which torch does not have, -recompute of a model without blocks, and -fsdp_replicas that do
    not divide the processes.
    """
    if args.sync_bn:
        if world.device.type == "cpu":
            raise UsageError("-sync_bn needs a GPU: torch has no SyncBatchNorm on the CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    sharded = _is_sharded(args, world)
    if args.channels_last and world.device.type == "cuda" and not sharded:
        model = nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    parts = getattr(arch, "get_blocks", blocks)(model)
    if args.compile:
        _compile([model] if args.compile == "model" else parts or [model])
    if args.recompute:
        if not parts:
            raise UsageError(f"-recompute: -arch {args.arch} has no blocks to recompute; give it a get_blocks(model)")
        _recompute(parts, compiled=args.compile == "model")
    if sharded:
        return _shard(model, parts, args, world)
    model = model.to(world.device)
    return _replicate(model, world) if world.size > 1 else model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's outermost ModuleLists, else its children; none without parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [one for name, one in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    parts = [part for one in outer for part in one] or list(model.children())
    return [part for part in parts if next(part.parameters(), None) is not None]


def _replicate(model, world):
    # batchnorm.Statistics keeps buffers alike. torch 2.15 renamed the option that leaves them alone.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    devices = None if world.device.type == "cpu" else [world.device.index]
    options = {"device_ids": devices, "gradient_as_bucket_view": True, buffers: False}
    model = DistributedDataParallel(model, **options)
    model.require_backward_grad_sync = False  # reduction.Gradients sums them
    return model


def _is_sharded(args, world) -> bool:
    return args.parallel == "fsdp" and world.size > 1


def _shard(model, parts, args, world):
    """Make every block a group of its own, and what is left the root's; then give all ranks rank 0's values."""
    if world.size % args.fsdp_replicas:
        raise UsageError(f"-fsdp_replicas {args.fsdp_replicas} does not divide {world.size} processes")
    grid = (args.fsdp_replicas, world.size // args.fsdp_replicas)
    mesh = torch.distributed.init_device_mesh(world.device.type, grid, mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh if args.fsdp_replicas > 1 else mesh["shard"], "reshard_after_forward": True}
    if args.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    values = {name: tensor.detach() for name, tensor in _named_tensors(model)}
    groups = _independent(model, parts)  # the root, as embeddings, gives them inputs of 32 bits, as under DDP
    for part in groups:
        fsdp.fully_shard(part, mp_policy=_precision_policy(part, args), **options)
    root_policy = fsdp.MixedPrecisionPolicy() if groups else _precision_policy(model, args)
    fsdp.fully_shard(model, mp_policy=root_policy, **options)
    for part in (*groups, model):
        part.set_gradient_divide_factor(1.0)  # a sum: each micro-batch counts by its samples already
        part.set_force_sum_reduction_for_comms(True)
    if not world.is_main:
        _allocate(model, distributed.CPU if args.offload else world.device, world.device)
    for name, tensor in _named_tensors(model):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            whole.copy_(values[name])
        torch.distributed.broadcast(whole.view(-1).view(torch.uint8), 0)  # bytes: any dtype
        shards.put(tensor, whole)
    return model


def _named_tensors(model) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _independent(model, parts):
    """The parts that share no parameter with the rest of the model; others stay in the root's group."""
    owners = {}
    inside = {module: part for part in parts for module in part.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(module))
    tied = {part for both in owners.values() if len(both) > 1 for part in both}
    return [part for part in parts if part not in tied]


def _allocate(model, parameter_device, buffer_device):
    """Give a model memory without values; tied parameters stay tied."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to_empty(device=parameter_device)
    for first, *others in names.values():
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, model.get_parameter(first))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffer_device)


def autocast(args, device: torch.device):
    """Return the context of the forward pass: mixed precision under -fp16 or -bf16, else nothing."""
    if not (args.fp16 or args.bf16):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_half(args))


def _precision_policy(part, args):
    """Half precision also between the processes, where autocast computes in it; BatchNorm needs whole weights.

    Inputs keep their dtype, as under DDP, where autocast alone decides.
    """
    if not (args.fp16 or args.bf16) or any(isinstance(module, _NormBase) for module in part.modules()):
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(_half(args), reduce_dtype=torch.float32, cast_forward_inputs=False)


def _half(args):
    return torch.float16 if args.fp16 else torch.bfloat16


def _compile(parts):
    # Parts of the same class share one store of compiled code, which by default is too small for many of them.
    settings: Any = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, GRAPHS)
    if hasattr(settings, "automatic_dynamic_exclusion_guard"):  # not in every torch
        settings.automatic_dynamic_exclusion_guard = True  # a short batch leaves the code for whole ones in use
    for part in parts:
        part.forward = torch.compile(part.forward)


def _recompute(parts, compiled: bool):
    for part in parts:
        # A model that is compiled as a whole updates BatchNorms once, and takes no contexts of ours.
        options = (
            {} if compiled else {"context_fn": lambda part=part: (contextlib.nullcontext(), _keep_buffers(part))}
        )
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False, **options)


@contextlib.contextmanager
def _keep_buffers(part):
    """Restore the part's buffers after the block, so that BatchNorm does not count a recomputed batch twice."""
    kept = [(buffer, buffer.clone()) for buffer in part.buffers()]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.data.copy_(values)  # .data: autograd must not see a change
