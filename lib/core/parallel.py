"""One model on several processes: DDP or FSDP2, precision, compiling, recomputing."""

import contextlib
import copy
import functools
import importlib
import inspect
import logging

import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.modules.batchnorm import _NormBase as Norm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lib.core import deferred
from lib.utils.checkpoint.state import unwrap
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
COMPILED = 64  # graphs of one forward method


def build(arch, args, world: World) -> tuple[nn.Module, deferred.Values | None]:
    """The model of an architecture's module. One that is to be sharded is without memory, its values beside it."""
    if args.parallel == "fsdp" and world.size > 1:
        return deferred.build(lambda: _made(arch, args))
    return _made(arch, args), None


def _made(arch, args):
    model = arch.get_model(args)
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"-arch {args.arch}: get_model gives {kind}; a model, an nn.Module, is needed")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"-arch {args.arch}: the model has no parameters that can be trained")
    return model


def wrap(model: nn.Module, args, world: World, *, arch=None, values=None) -> nn.Module:
    """The model on its device, under DistributedDataParallel or fully sharded where there are several processes.

    Blocks are what the `arch` module's get_blocks(model) gives, else what is in the model's ModuleLists, else its
    children; `values` are those of a model without memory. Raises UsageError for -sync_bn on the CPU, which torch
    does not have, -recompute of a model without blocks and -fsdp_replicas that do not divide the processes.
    """
    if args.sync_bn and world.device.type == "cpu":
        raise UsageError("-sync_bn needs a GPU: torch has no SyncBatchNorm on the CPU")
    sharded = args.parallel == "fsdp" and world.size > 1
    if world.device.type == "cuda" and not sharded:
        model = channels_last(model, args)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    parts = arch.get_blocks(model) if hasattr(arch, "get_blocks") else blocks(model)
    if args.recompute and not parts:
        raise UsageError(f"-recompute: -arch {args.arch} has no blocks to recompute; give it a get_blocks(model)")
    if args.compile:
        _ready_to_compile()
    for part in (parts or [model]) if args.compile == "blocks" else [model] if args.compile else []:
        part.forward = torch.compile(part.forward)
    for part in parts if args.recompute else ():
        # A model that is compiled as a whole notes a batch once, and takes no contexts of ours.
        own = {} if args.compile == "model" else {"context_fn": functools.partial(_nothing_noted, part)}
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False, **own)
    if sharded:
        return _sharded(model, parts, args, world, values)
    model = model.to(world.device)
    return _replicated(model, args, world) if world.size > 1 else model


def _ready_to_compile():
    """Parts that are of torch's own classes share one store of compiled code, which is too small for them as it
    comes: the rest would not be compiled. Where parts are alike, the code for whole batches stays in use when a short
    one was compiled after it."""
    settings = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, COMPILED)
    if hasattr(settings, "automatic_dynamic_exclusion_guard"):  # not in every torch
        settings.automatic_dynamic_exclusion_guard = True


def channels_last(model: nn.Module, args) -> nn.Module:
    """The model with the weights of its convolutions, and so what they compute, channels last in memory, in which a
    GPU is fastest. One that fails so on images of zeros, as `view` may, in training or evaluation, stays as it is."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return model
    ordered = functools.partial(nn.utils.convert_conv2d_weight_memory_format, memory_format=torch.channels_last)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for training in (False, True):
                zeros = torch.zeros(2, args.channels, args.image_size, args.image_size)
                ordered(copy.deepcopy(model)).train(training)(zeros)
    except Exception as error:  # whatever the user's code raises
        log.info("convolutions keep the channels first in memory, as the model fails with them last (%s)", error)
        return model
    return ordered(model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a model is made of: what is in its outermost ModuleLists, else its children; none without
    parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [one for name, one in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    parts = [part for one in outer for part in one] or list(model.children())
    return [part for part in parts if next(part.parameters(), None) is not None]


def _replicated(model, args, world):
    ids = None if world.device.type == "cpu" else [world.device.index]
    # running.Statistics keeps the buffers alike; torch 2.15 has another word for leaving them alone.
    words = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in words else "broadcast_buffers"
    words = {"gradient_as_bucket_view": True, "find_unused_parameters": args.find_unused, buffers: False}
    model = DistributedDataParallel(model, device_ids=ids, **words)
    model.went_round = True  # until its forward was called
    model.register_forward_pre_hook(_called)
    return model


def _called(model, inputs):
    model.went_round = False


def _sharded(model, parts, args, world, values):
    """FSDP2: every block is a group of its own, and what is left the root's."""
    if world.size % args.fsdp_replicas:
        raise UsageError(f"-fsdp_replicas {args.fsdp_replicas} does not divide {world.size} processes")
    grid = (args.fsdp_replicas, world.size // args.fsdp_replicas)
    mesh = torch.distributed.init_device_mesh(world.device.type, grid, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if args.fsdp_replicas > 1 else mesh["shard"]
    pinned = world.device.type != "cpu"
    words = {"mesh": mesh, "reshard_after_forward": True}
    words |= {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned)} if args.offload else {}
    groups = _independent(model, parts)  # the rest, as embeddings, gives them inputs of 32 bits, as under DDP
    for part in groups:
        fsdp.fully_shard(part, mp_policy=_policy(part, args), **words)
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy() if groups else _policy(model, args), **words)
    if values is None:  # fully_shard has brought it where it belongs
        return model
    _give_memory(model, torch.device("cpu") if args.offload else world.device, world.device)
    values.fill(model)
    return model


def _independent(model, parts):
    """The parts that share no parameter with the rest of the model: those that do stay in the root's group."""
    owners = {}
    inside = {module: part for part in parts for module in part.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(module))
    tied = {part for both in owners.values() if len(both) > 1 for part in both}
    return [part for part in parts if part not in tied]


def _policy(part, args):
    """Half precision also between the processes, where autocast computes in it; BatchNorm wants its weights whole.
    Inputs stay what they are, as under DDP, where autocast alone decides."""
    if not (args.fp16 or args.bf16) or any(isinstance(module, Norm) for module in part.modules()):
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(_half(args), reduce_dtype=torch.float32, cast_forward_inputs=False)


def _half(args):
    return torch.float16 if args.fp16 else torch.bfloat16


def _give_memory(model, parameters, buffers):
    """Memory for a model on the meta device, tied parameters staying tied."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to_empty(device=parameters)
    for first, *others in names.values():
        for name in others:
            path, _, word = name.rpartition(".")
            model.get_submodule(path)._parameters[word] = model.get_parameter(first)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=buffers)


@contextlib.contextmanager
def _unnoted(part):
    """The part computes again what it computed before: its BatchNorms do not note the batch a second time."""
    kept = [(buffer, buffer.clone()) for buffer in part.buffers()]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.data.copy_(values)  # .data: for autograd nothing has changed


def _nothing_noted(part):
    return contextlib.nullcontext(), _unnoted(part)


def set_sync(model: nn.Module, last: bool):
    """Under DDP gradients are reduced in the backward pass of a step's last micro-batch only, as under its no_sync;
    when sharded in each, as nobody has room for whole ones."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last


def check_reduced(model: nn.Module, parameters: list):
    """Raises UsageError where the gradients of this step are not those of all processes: DDP's forward was not
    called, or it waited for a gradient that never came."""
    if not isinstance(model, DistributedDataParallel):
        return
    if model.went_round:
        raise UsageError("training_step went round self.model(...): the processes' gradients were not averaged; "
                         "let the model's forward do all that is trained")  # fmt: skip
    model.went_round = True
    if not model.find_unused_parameters and any(parameter.grad is None for parameter in parameters):
        names = [n for n, p in unwrap(model).named_parameters() if p.requires_grad and p.grad is None]
        raise UsageError(f"the parameter {names[0]} ({len(names)} in all) took no part in this step: add "
                         f"-find_unused, or freeze it by requires_grad_(False)")  # fmt: skip


def autocast(args, device: torch.device):
    """The context of the forward pass: mixed precision under -fp16 or -bf16, else nothing."""
    if not (args.fp16 or args.bf16):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_half(args))


def reorders(model: nn.Module, world: World) -> bool:
    """Whether the order in which gradients are summed would settle only after the first backward pass: with three
    ranks or more, DDP rebuilds its buckets then, and a resumed run would differ from one that went through, in the
    last bits."""
    return isinstance(model, DistributedDataParallel) and world.size > 2
