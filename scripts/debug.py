"""python train.py -debug: trains a few steps, and names the first tensor that is not finite; writes nothing."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lib.utils.checkpoint.resume import Past
from lib.utils.checkpoint.state import find_parts, unwrap
from lib.utils.data.tensors import named_tensors

if TYPE_CHECKING:
    from lib.trainer.trainer import Trainer

log = logging.getLogger(__name__)
DEBUG_STEPS = 10  # unless -limit_steps says otherwise


def debug(trainer: "Trainer", past: Past | None) -> str:
    """Train a few steps, from the newest checkpoint if there is one, and check each tensor as it comes.

    Raises RuntimeError for the first one that is not finite, or by torch's anomaly detection, whose warning shows
    the line.
    """
    trainer.make_engine()
    if past:
        trainer.load(past)
    first, parts = trainer.state.step, find_parts(trainer)
    named = parts.parameters().items()
    _check("the parameter", named)
    for name, p in named:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: _check("the gradient of", [(name, p.grad)]))
    modules = [one for part, root in parts.modules.items() for one in unwrap(root).named_modules(prefix=part)]
    for name, module in modules:
        what = f"the output of {name.removeprefix('model.')} ({type(module).__name__}), tensor"
        module.register_forward_hook(lambda module, inputs, output, what=what: _check(what, named_tensors(output)))
    begun, steps = trainer.state.step % trainer.plan.steps, trainer.args.limit_steps or DEBUG_STEPS
    batches = _check_batches(trainer.loaders["train"].epoch(trainer.state.epoch, begun))
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        for _ in range(min(steps, trainer.plan.steps - begun)):
            trainer.train_step(batches)
            means, counts = trainer.pending_losses[-1].T
            loss = (means * counts).sum() / counts.sum().clamp_min(1)
            trainer.read_losses()
            log.info("step %d  loss %.4g  grad %.3g", trainer.state.step, loss.item(), trainer.state.grad_norm)
            _check(f"the loss of step {trainer.state.step}", [("", loss)])
            _check("after a step, the parameter", named)
    log.info("-debug: no bad tensor in %d steps; nothing was written", trainer.state.step - first)
    return "finished"


def _check_batches(batches: Iterable) -> Iterator:
    for micro_batch, batch in batches:
        _check(f"in the batch of the samples {micro_batch.indices[:8]}..., the tensor", named_tensors(batch))
        yield micro_batch, batch


def _check(what: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise RuntimeError for the first of these tensors that is not finite."""
    for name, tensor in named:
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise RuntimeError(f"first bad tensor: {what} {name}: {bad} of {tensor.numel()} values are not finite")
