"""Optimizers, chosen by -optimizer: fused where that is safe, no weight decay on biases and norms."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lib.utils.checkpoint import shards
from lib.utils.checkpoint.shards import local
from lib.utils.errors import UsageError

BY_NAME = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
# Without a fused kernel, their steps can be undone on the device: no result depends on what they count on the host
# (Adagrad's steps, the bad ones too), and all their memory is there before the first step.
UNDONE = (torch.optim.SGD, torch.optim.Adagrad)


def get_optimizer(model: nn.Module, args, batch_size: int) -> torch.optim.Optimizer:
    """The optimizer of a model that is wrapped and on its device. Its learning rate is set anew at every step."""
    groups = decay_groups(model, args.weight_decay)
    options = {"lr": args.lr_start, **_own_options(args, batch_size)}
    fused = _may_fuse([parameter for group in groups for parameter in group["params"]], args.optimizer) or None
    try:
        optimizer = BY_NAME[args.optimizer](groups, fused=fused, **options)
    except (RuntimeError, TypeError):  # no fused kernel for this device or dtype
        optimizer = BY_NAME[args.optimizer](groups, **options)
    if type(optimizer) is torch.optim.SGD and args.momentum:
        _remember_nothing(optimizer)
    return optimizer


def _may_fuse(parameters: list, name: str) -> bool:
    """Whether torch's fused kernel does all that is needed here: for shards it has Adam's only, for GPUs no Adagrad's
    (torch 2.11), and those of MPS do not leave a step out."""
    if any(isinstance(parameter, DTensor) for parameter in parameters) and name not in ("adam", "adamw"):
        return False
    known = {"cpu"} if name == "adagrad" else {"cpu", "cuda"}
    return {parameter.device.type for parameter in parameters} <= known


def _remember_nothing(optimizer: torch.optim.SGD):
    """Momentum of zero from the first: where a fused first step is left out, torch's own stays memory that nobody has
    written to (torch 2.11 to 2.15)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups: weight decay for matrices and filters, none for biases, norms and other vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def scaled_adam(ratio: float, betas=(0.9, 0.999), eps: float = 1e-8) -> dict:
    """Adam's betas and eps for a batch `ratio` times as large (square root scaling rule, arXiv:2205.10287,
    definition 4).

    1 - beta grows with the batch, eps falls with its root. Raises UsageError where 1 - beta would pass 1.
    """
    scaled = tuple(1 - ratio * (1 - beta) for beta in betas)
    if min(scaled) < 0:
        raise UsageError(f"-scale_lr sqrt: a batch {ratio:g} times -lr_batch is too large for it: raise -lr_batch")
    return {"betas": scaled, "eps": eps / ratio**0.5}


def _own_options(args, batch_size):
    if args.optimizer == "sgd":
        return {"momentum": args.momentum}
    if args.optimizer in ("adam", "adamw") and args.scale_lr == "sqrt":
        return scaled_adam(batch_size / args.lr_batch)
    return {}


@torch.no_grad()
def spoil(parameters: list, bad: torch.Tensor):
    """Makes the gradient NaN where `bad` (0-d, the same on all ranks), so that the step is skipped. Nobody waits for
    the answer."""
    gradient = next(shards.local(p.grad) for p in reversed(parameters) if p.grad is not None)
    gradient.masked_fill_(bad.to(gradient.device), math.nan)


def clip(parameters: list, limit: float) -> torch.Tensor:
    """The norm of the whole gradient, a 0-d tensor, the same on all ranks; longer gradients are cut to `limit` (0:
    never)."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    norm = torch.linalg.vector_norm(torch.stack(norms))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, norm: torch.Tensor):
    """Takes one step, or none if the gradient is not finite. On a GPU nobody waits for the answer."""
    if norm.device.type == "cuda" and (_has_switch(optimizer) or type(optimizer) in UNDONE):
        step_if_finite(optimizer, norm)
    elif scaler.is_enabled():
        scaler.step(optimizer)  # takes no step itself if the gradient is not finite
    elif math.isfinite(norm.item()):
        optimizer.step()
    scaler.update()


@torch.no_grad()
def step_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor):
    """Takes one step if the gradient's norm is finite. The device decides: by the fused kernels' own switch, as
    GradScaler uses it, or else the step is taken, and undone where it was a bad one."""
    good = torch.isfinite(norm)
    if _has_switch(optimizer):
        optimizer.found_inf = (~good).float()
        optimizer.step()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memory = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
    tensors = [local(one) for one in (*parameters, *memory) if isinstance(one, torch.Tensor)]
    changing = [tensor for tensor in tensors if tensor.device == norm.device]
    before = [tensor.clone() for tensor in changing]
    optimizer.step()
    for tensor, values in zip(changing, before, strict=True):
        torch.where(good, tensor, values, out=tensor)


def _has_switch(optimizer):
    return getattr(optimizer, "_step_supports_amp_scaling", False)
