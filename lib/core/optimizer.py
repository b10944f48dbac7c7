"""Optimizers, chosen by -optimizer: fused where that is safe, no weight decay on 1-d parameters."""

import ast
import contextlib
import inspect
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn

from lib.core.muon import Muon, hidden_matrices
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.checkpoint.state import unwrap
from lib.utils.errors import UsageError, suggest

BY_NAME = {}  # optimizers of your own, by their names for -optimizer
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
SWITCH = {**dict.fromkeys(("yes", "true", "on"), True), **dict.fromkeys(("no", "false", "off"), False)}


def get_optimizers(model: nn.Module, loss: nn.Module, args: Namespace) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model and its loss: one, or AdamW and Muon. Raises UsageError for wrong options."""
    kind, options = find_class(args.optimizer), read_options(args.optimizer_arg)
    groups = decay_groups(unwrap(model), args.weight_decay)  # the names of its parameters begin without DDP's
    groups += [one for one in decay_groups(loss, args.weight_decay) if one["params"]] if [*loss.parameters()] else []
    if kind is not torch.optim.Muon:
        return [_build(kind, groups, options, args)]
    matrices = hidden_matrices(model, args.num_classes)
    if not matrices:
        raise UsageError("-optimizer muon: the model has no matrix of a hidden layer to train; take adamw")
    hidden = {*matrices}
    for group in groups:
        group["params"] = [one for one in group["params"] if one not in hidden]
    of_adamw = {name: options.pop(name) for name in [*options] if name not in inspect.signature(Muon).parameters}
    options.setdefault("adjust_lr_fn", "match_rms_adamw")  # so that AdamW's learning rate and weight decay hold
    of_hidden = [{"params": matrices, "weight_decay": args.weight_decay}]
    return [_build(torch.optim.AdamW, groups, of_adamw, args), _build(Muon, of_hidden, options, args)]


def _build(kind: Any, groups: list[dict], options: dict, args: Namespace) -> torch.optim.Optimizer:
    """Return an optimizer, fused if that is safe. One without weight decay, as Rprop, does not read its groups'."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    flags = {"weight_decay": args.weight_decay}  # of groups that are added later
    flags |= {"momentum": args.momentum} if torch.optim.SGD in getattr(kind, "__mro__", ()) else {}
    taken = flags.keys() & inspect.signature(kind).parameters
    defaults: dict[str, Any] = {"lr": args.lr_start, **{name: flags[name] for name in taken}}
    if kind in FUSED and "foreach" not in options and _may_fuse(parameters, args):
        defaults["fused"] = True
    options = {**defaults, **options}
    try:
        optimizer = kind(groups, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"-optimizer {' '.join([args.optimizer, *args.optimizer_arg])}: {error}") from None
    if kind is torch.optim.SGD and options["momentum"] and not options.get("dampening"):
        # If a fused first step is skipped, torch leaves momentum that was never written (torch 2.11 to 2.15).
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def find_class(name: str) -> Any:
    """Return the optimizer of a name, in upper or lower case. Raises UsageError if there is none."""
    classes = [one for one in vars(torch.optim).values() if inspect.isclass(one) and one is not torch.optim.Optimizer]
    named = {one.__name__: one for one in classes if issubclass(one, torch.optim.Optimizer)} | BY_NAME
    there = {key.lower(): one for key, one in named.items()}
    if name.lower() not in there:
        raise UsageError(f"-optimizer {name}: there are {', '.join(sorted(there))}{suggest(name.lower(), there)}")
    return there[name.lower()]


def read_options(words: list[str]) -> dict[str, Any]:
    """Return what -optimizer_arg KEY=VALUE gives: Python values, yes and no, or text. Raises UsageError."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        instead = {"lr": "-lr_start", "weight_decay": "-weight_decay", "params": "decay_groups"}.get(name)
        if not equals or instead:
            raise UsageError(f"-optimizer_arg {word}: {f'take {instead}' if instead else 'KEY=VALUE is needed'}")
        options[name] = SWITCH.get(text.lower(), text)
        with contextlib.suppress(ValueError, SyntaxError):
            options[name] = ast.literal_eval(text)
    return options


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return parameter groups: weight decay for those of 2 dimensions or more, none for biases and other vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _may_fuse(parameters: list[Tensor], args: Namespace) -> bool:
    """Return whether torch has a fused kernel that can skip a step and has the same bits everywhere.

    Torch has only Adam's for shards, and none for MPS (2.11). On the CPU the bits of fused kernels depend on where a
    shard ends, so FSDP and -deterministic avoid them.
    """
    devices = {parameter.device.type for parameter in parameters}
    # Fused kernels take no complex numbers, and write into gaps.
    has_gaps = any(one.is_complex() or one.stride() != torch.empty_like(one).stride() for one in parameters)
    has_gaps |= len({*map(is_sharded, parameters)}) > 1  # and take no mixture of shards and whole tensors
    if devices == {"cpu"}:
        return not (has_gaps or args.deterministic or args.parallel == "fsdp")
    return not has_gaps and devices == {"cuda"} and (args.optimizer.lower() != "sgd" or args.parallel != "fsdp")


def parameters_of(optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that these optimizers train as of now, each once."""
    return [*dict.fromkeys(p for one in optimizers for group in one.param_groups for p in group["params"])]


def clip(parameters: list[nn.Parameter], limit: float, exact: bool) -> Tensor:
    """Return the norm of the whole gradient, 0-d, the same on all ranks; cut a longer one to `limit` (0: never)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    if exact:  # each is gathered in turn, so that the norm has the bits of whole ones
        norms = [torch.linalg.vector_norm(_whole(gradient)) for gradient in gradients]
    else:  # torch takes no mixture
        parts = [[one for one in gradients if is_sharded(one) == sharded] for sharded in (True, False)]
        norms = [_whole(torch.nn.utils.get_total_norm(part)) for part in parts if part]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for sharded in (True, False) if limit else ():
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if is_sharded(p) == sharded], limit, norm)
    return norm


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which FSDP has shards, or a view into a row of others, as one that stands alone."""
    if is_sharded(tensor):
        return tensor.full_tensor()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor  # else its norm has other bits


def step(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Take one step, or none if the norm is not finite. On a GPU fused kernels decide that, and nobody waits."""
    if norm.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        vars(optimizer)["found_inf"] = (~torch.isfinite(norm)).float()  # their own switch, as GradScaler uses it
        optimizer.step()
    elif torch.isfinite(norm):
        optimizer.step()
