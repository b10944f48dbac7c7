"""The modes -dry, -debug and -eval: a look at a run. None of them touches the run's checkpoints."""

import contextlib
import json
import logging
import math
import time

import torch

from lib.utils.checkpoint import atomic, search, shards, shared_disk, stored, weights
from lib.utils.checkpoint.state import parts_of, prepared, unwrap
from lib.utils.data import tensors as data
from lib.utils.errors import UsageError
from lib.utils.monitoring import logger, throughput

log = logging.getLogger(__name__)
FEW = 10  # steps of -debug, unless -limit_steps says more


class BadTensor(RuntimeError):
    """A tensor holds values that are not finite; its name is told."""


def asked(args) -> bool:
    """Whether the run is only to be looked at."""
    return args.dry or args.debug or args.eval


def look(trainer) -> str:
    """What was asked for, with this trainer that has not begun: "finished", or an exception."""
    args = trainer.args
    trainer.logger = logger.Silent()
    trainer.stop.file = None  # it was meant for the run
    if args.eval:
        return evaluate(trainer)
    return debug(trainer) if args.debug else dry(trainer)


def evaluate(trainer) -> str:
    """Evaluates -weights, or the run's best weights or else its final ones, on val and test. The figures are told,
    and written into eval.json.

    Raises UsageError where there are none, or they are not the whole model's.
    """
    args, folder = trainer.args, trainer.folder
    kept = [folder / name / "weights.safetensors" for name in ("best", "final")]
    path = args.weights or next((str(one) for one in kept if one.is_file()), None)
    splits = [split for split in ("val", "test") if split in trainer.loaders]
    if path is None:
        raise UsageError(f"-eval: {folder} has neither best nor final weights; name some by -weights FILE")
    if not splits:
        raise UsageError(f"-eval: -dataset {args.dataset} has neither a val nor a test split")
    weights.start_from(path, unwrap(trainer.model), whole=True)
    if kept := [name for name in parts_of(trainer).modules if name != "model"]:
        log.info("-eval: weights alone are taken up, %s begins anew", ", ".join(kept))
    figures = {}
    for split in splits:
        figures[split] = trainer.evaluate(split)
        if figures[split] is None:
            return "stopped"
        told = "  ".join(f"{name} {value:.4f}" for name, value in figures[split].items())
        log.info("%s  %s", split, told)
    if trainer.world.is_main:
        text = json.dumps({"weights": path, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **figures}, indent=2)
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_file(folder / "eval.json", text + "\n")
        log.info("written:     %s", folder / "eval.json")
    return "finished"


def dry(trainer) -> str:
    """Trains one step, evaluates one batch, and tells the shapes, parameters, memory and the size of a checkpoint."""
    model, device = unwrap(trainer.model), trainer.world.device
    began = time.monotonic()
    with _outputs(model, _shape):
        list(steps(trainer, 1))
    seconds = time.monotonic() - began
    _try_evaluation(trainer)
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with prepared(parts_of(trainer)) as tensors:
        size = shards.total_bytes(tensors)
    plan, key = trainer.plan, next(trainer.loaders["train"].micro_batches(0))
    log.info("parameters:  %s, of which %s are trained", f"{count:,}", f"{trained:,}")
    log.info("a step:      %d samples in micro-batches of %d, %d for this process at once; the first took %.2f s",
             plan.batch, plan.grain, key.count, seconds)  # fmt: skip
    log.info("the run:     %d epochs of %d steps", trainer.args.epochs, plan.steps)
    log.info("memory:      %.2f GB at its peak on %s", throughput.memory(device) / 1e9, device)
    there = next(folder for folder in trainer.folder.absolute().parents if folder.is_dir())
    log.info("checkpoint:  %.3f GB; %.1f GB are free in %s", size / 1e9, shared_disk.free_bytes(there) / 1e9, there)
    log.info("-dry: nothing was written")
    return "finished"


@torch.no_grad()
def _try_evaluation(trainer):
    """One batch of the val split: what fails there would fail after a whole epoch."""
    if "val" in trainer.loaders:
        key, batch = next(trainer.loaders["val"].epoch(0))
        with trainer.precision:
            trainer.evaluation_step(unwrap(trainer.model).eval(), batch, key.count)


def debug(trainer) -> str:
    """Trains a few steps, from the newest checkpoint if there is one, and looks at each tensor as it comes.

    Raises BadTensor at the first that is not finite, or what torch's anomaly detection raises in a backward pass.
    Losses are not scaled: what -fp16's scale alone makes infinite is left out in a run, and no fault.
    """
    trainer.scaler = torch.amp.GradScaler(trainer.world.device.type, enabled=False)
    model = unwrap(trainer.model)
    source = trainer.args.resume or trainer.folder
    if trainer.args.resume or stored.listed(trainer.folder / "checkpoints"):
        trainer.go_on(search.other(source, trainer.checkpoints.disk))
    first = trainer.state.step
    _check("the parameter", model.named_parameters())
    with torch.autograd.set_detect_anomaly(True, check_nan=True), _outputs(model, _finite):
        for loss, norm in steps(trainer, trainer.args.limit_steps or FEW):
            log.info("step %d  loss %.4g  grad %.3g", trainer.state.step, loss, norm)
            _check("after a step, the parameter", model.named_parameters())
            if not math.isfinite(norm):
                raise BadTensor(f"step {trainer.state.step}: its gradients are finite, but not their norm or what "
                                "a buffer of the model became")  # fmt: skip
    log.info("-debug: no bad tensor in %d steps; nothing was written", trainer.state.step - first)
    return "finished"


def steps(trainer, count: int):
    """Takes optimizer steps from where the trainer is, at most to the end of the epoch; gives each one's last loss
    and gradient norm."""
    trainer.model.train()
    done, wanted = trainer.plan.step_in_epoch(trainer.state), trainer.state.step + count
    for key, batch in trainer.loaders["train"].epoch(trainer.state.epoch, done):
        if trainer.args.debug:
            _check(f"in the batch of the samples {key.indices[:8]}..., the tensor", data.tensors(batch))
        trainer.micro_batch(key, batch)
        if not key.last:
            continue
        if trainer.args.debug:
            named = unwrap(trainer.model).named_parameters()
            _check("the gradient of", ((name, p.grad) for name, p in named if p.grad is not None))
        trainer.step(key.step_samples)
        yield float(trainer.window[-1][0]), float(trainer.norms[-1])
        if trainer.state.step == wanted:
            return


@contextlib.contextmanager
def _outputs(model, seen):
    """Calls seen(name, module, inputs, output) after each module of the model in the block."""
    hooks = [
        module.register_forward_hook(lambda module, given, made, name=name: seen(name, module, given, made))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shape(name, module, given, made):
    if not any(module.children()):
        shapes = ", ".join(str(tuple(one.shape)) for _, one in data.tensors(made))
        count = sum(parameter.numel() for parameter in module.parameters())
        log.info("  %-32s %-20s %-24s %12s", name or "(model)", type(module).__name__, shapes, f"{count:,}")


def _finite(name, module, given, made):
    _check(f"the output of {name or 'the model'} ({type(module).__name__}), tensor", data.tensors(made))


def _check(what, named):
    for name, tensor in named:
        odd = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if odd:
            raise BadTensor(f"the first bad tensor: {what} {name}: {odd} of {tensor.numel()} values are not finite")
