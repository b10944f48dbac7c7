"""What a start does with its trainer: train, or -dry, -debug, -eval, which leave the run as it is."""

import contextlib
import itertools
import json
import logging
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lib.utils.checkpoint import atomic, run_folder, shards, weights
from lib.utils.checkpoint.resume import Past
from lib.utils.checkpoint.state import parts_of, unwrap
from lib.utils.data.tensors import tensors
from lib.utils.errors import UsageError
from lib.utils.monitoring import metrics, throughput

if TYPE_CHECKING:
    from lib.trainer.trainer import Trainer

log = logging.getLogger(__name__)
DEBUG_STEPS = 10  # unless -limit_steps says otherwise


class BadTensor(RuntimeError):
    """A tensor, which the message names, holds values that are not finite."""


def chosen(args: Namespace) -> str:
    """Return the mode of a start: a key of RUN."""
    return next((mode for mode in ("eval", "debug", "dry") if getattr(args, mode)), "train")


def evaluate(trainer: "Trainer", past: Past | None) -> str:
    """Evaluate -weights, or the run's best or final weights, on val and test; log the figures and write eval.json.

    Raises:
        UsageError: there are no weights, they are not the whole model's, or there is nothing to evaluate on.
    """
    args, folder = trainer.args, trainer.folder
    path = weights.of_run(folder) if args.weights in (None, weights.IMAGENET) else args.weights
    splits = [split for split in ("val", "test") if split in trainer.loaders]
    if path is None:
        raise UsageError(f"-eval: {folder} has neither best nor final weights; name some by -weights FILE")
    if not splits:
        raise UsageError(f"-eval: -dataset {args.dataset} has neither a val nor a test split")
    log.info("weights:     %s", weights.start_from(str(path), unwrap(trainer.model), whole=True))
    figures = {split: trainer.evaluate(split) or {} for split in splits}
    for split in splits:
        log.info("%s  %s", split, "  ".join(f"{name} {value:.4f}" for name, value in figures[split].items()))
    if trainer.world.is_main:
        text = json.dumps({"weights": str(path), "time": time.strftime("%Y-%m-%d %H:%M:%S"), **figures}, indent=2)
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_file(folder / "eval.json", text + "\n")
        log.info("written:     %s", folder / "eval.json")
    return "finished"


def dry(trainer: "Trainer", past: Past | None) -> str:
    """Train one step, evaluate one batch, log the shapes, parameters, memory and the size of a checkpoint."""
    model, device, plan = unwrap(trainer.model), trainer.world.device, trainer.plan
    started = time.monotonic()
    with _hooked(model, _log_shape):
        next(trainer.steps(trainer.batches()))
    seconds = time.monotonic() - started
    if "val" in trainer.loaders:
        key, batch = next(trainer.loaders["val"].epoch(0))
        with torch.no_grad(), trainer.precision:
            trainer.evaluation_step(model.eval(), batch, key.count)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size, free = shards.total_bytes(parts_of(trainer).tensors()), run_folder.free_bytes(trainer.folder)
    log.info("parameters:  %s, of which %s are trained", f"{_count(model):,}", f"{trained:,}")
    log.info("a step:      %d samples in micro-batches of %d; the first took %.2f s", plan.batch, plan.micro, seconds)
    log.info("the run:     %d epochs of %d steps", trainer.args.epochs, plan.steps)
    log.info("memory:      %.2f GB at its peak on %s", throughput.memory(device) / 1e9, device)
    log.info("checkpoint:  %.3f GB; %.1f GB are free in %s", size / 1e9, free / 1e9, trainer.args.out)
    log.info("-dry: nothing was written")
    return "finished"


def debug(trainer: "Trainer", past: Past | None) -> str:
    """Train a few steps, from the newest checkpoint if there is one, and check each tensor as it comes.

    Raises:
        BadTensor: the first tensor that is not finite, also what torch's anomaly detection finds in a backward pass.
    """
    if past:
        trainer.load(past)
        trainer.metrics.reduce()  # forget what the run had not logged yet
    model, first = unwrap(trainer.model), trainer.state.step
    _check("the parameter", model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: _check("the gradient of", [(name, parameter.grad)])
            )
    steps = itertools.islice(trainer.steps(_checked(trainer.batches())), trainer.args.limit_steps or DEBUG_STEPS)
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=True), _hooked(model, _check_output):
            for _ in steps:
                trainer.read_figures()
                loss, norm = metrics.mean(trainer.metrics.reduce(), "loss"), trainer.last_norm
                log.info("step %d  loss %.4g  grad %.3g", trainer.state.step, loss, norm)
                _check("after a step, the parameter", model.named_parameters())
                if not math.isfinite(norm):
                    what = "its gradients are finite, but not their norm"
                    raise BadTensor(f"step {trainer.state.step}: {what}")
    except RuntimeError as error:
        if "returned nan" not in f"{error}":
            raise
        raise BadTensor(f"the first bad tensor is a gradient: {error} The warning above shows its line") from error
    log.info("-debug: no bad tensor in %d steps; nothing was written", trainer.state.step - first)
    return "finished"


RUN = {"train": lambda trainer, past: trainer.fit(past), "eval": evaluate, "debug": debug, "dry": dry}


@contextlib.contextmanager
def _hooked(model: nn.Module, hook: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """Call hook(name, module, output) after each module of the model in the block."""
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda module, _, output, name=name: hook(name, module, output))
            stack.callback(handle.remove)
        yield


def _log_shape(name: str, module: nn.Module, output: Any) -> None:
    if not any(module.children()):
        shapes = ", ".join(str(tuple(tensor.shape)) for _, tensor in tensors(output))
        log.info("  %-32s %-20s %-24s %12s", name or "(model)", type(module).__name__, shapes, f"{_count(module):,}")


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _checked(batches: Iterable) -> Iterator:
    for key, batch in batches:
        _check(f"in the batch of the samples {key.indices[:8]}..., the tensor", tensors(batch))
        yield key, batch


def _check_output(name: str, module: nn.Module, output: Any) -> None:
    _check(f"the output of {name or 'the model'} ({type(module).__name__}), tensor", tensors(output))


def _check(what: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise BadTensor for the first of these tensors that is not finite."""
    for name, tensor in named:
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise BadTensor(f"the first bad tensor: {what} {name}: {bad} of {tensor.numel()} values are not finite")
