"""The usual way of training: epochs of steps, evaluation, checkpoints. For another, override `training_step`."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core import batchnorm, parallel, reduction, scheduler
from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.utils import distributed, preemption, runtime, seeding, watchdog
from lib.utils.checkpoint import manager, resume, run_folder, shards, weights
from lib.utils.checkpoint.resume import Past
from lib.utils.checkpoint.state import State, find_parts, find_unsaved, model_tensors, tensors_to_save
from lib.utils.data.loader import Loader
from lib.utils.data.options import class_names
from lib.utils.data.plan import MicroBatch
from lib.utils.errors import UsageError
from lib.utils.monitoring import images, metrics, throughput
from lib.utils.monitoring.logger import Logger

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
HINT = "-debug names the first bad tensor; try a lower -lr_start, -clip_grad, or -bf16 in place of -fp16"


class BadSteps(RuntimeError):
    """Too many steps in a row were skipped, or all of them, as their gradients were not finite."""


class Trainer:
    """Trains a model on `loaders["train"]` and evaluates it on "val" and "test" if they exist."""

    def __init__(
        self,
        args: "Args",
        world: distributed.World,
        loaders: dict[str, Loader],
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        logger: Logger,
    ):
        self.args, self.world, self.loaders = args, world, loaders
        self.model, self.loss, self.optimizer, self.logger = model, loss, optimizer, logger
        self.folder, self.plan = run_folder.path_of(args), loaders["train"].plan
        self.state, self.metrics = State(), metrics.Sums()
        self.config = resume.config_to_save(args, self.plan)
        self.total_steps = args.epochs * self.plan.steps
        scale = self.plan.batch / (args.lr_batch or self.plan.batch)  # Goyal et al., arXiv:1706.02677
        self.schedule = {
            "kind": args.lr_schedule,
            "total": self.total_steps,
            "warmup": args.lr_warmup * self.plan.steps,
            "start": args.lr_start * scale,
            "end": args.lr_end * scale,
        }
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # -debug looks for what is not finite, and a scaled gradient may be that without a fault.
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=args.fp16 and not args.debug)
        self.precision = parallel.autocast(args, world.device)
        self.statistics = batchnorm.RunningStatistics(model, world, round_robin=args.parallel == "fsdp")
        batchnorm.refuse_single_samples(model, self.plan)
        self.pending_losses, self.pending_norms = [], []  # losses and gradient norms not yet read from the device
        self.last_norm = math.nan  # the last one that was read
        shown = loaders.get("val", loaders["train"]).dataset
        self.predictions = images.Predictions(loss, args.num_classes, class_names(shown), world)
        limit = args.limit_steps if (args.limit_steps or 0) < self.total_steps else None
        self.stop = preemption.Stop(
            self.folder, world, max_hours=args.max_hours, grace_s=args.grace_s, limit_steps=limit
        )
        self.votes = False  # whether `evaluate` votes on a stop: only in `fit`
        self.checkpoints = manager.Checkpoints(self.folder / "checkpoints", world, keep_last=args.keep_last)
        self.saved = None  # the (step, epoch) of the last checkpoint

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss over a micro-batch (collated as the dataset gives it, on the device), for backward."""
        done = losses.forward(self.model, batch, self.loss)
        if self.args.train_metrics:
            self.metrics.update(losses.metric_sums(self.loss, done.outputs, done.targets))
        return done.loss

    def evaluation_step(self, model: nn.Module, batch: Any, count: int) -> dict[str, Tensor]:
        """Return what a batch of `count` samples adds to each metric: sums over its samples, 0-d tensors."""
        done = losses.forward(model, batch, self.loss)
        self.predictions.add(done.targets, done.outputs, count)
        return {"loss": done.loss * count, **losses.metric_sums(self.loss, done.outputs, done.targets)}

    def fit(self, past: Past | None = None) -> str:
        """Train from `past` (resume.find), or from step 0, to the end or to a stop. Returns what `finish` returns."""
        self.votes = True
        with self.stop.handle_signals():
            self.resume(past)
            self.rate = throughput.Throughput(self.total_steps, self.state, self.world.device)
            while not self.is_done() and self.train_epoch() and self.end_epoch():
                pass
            return self.finish(self.evaluate_test())

    def resume(self, past: Past | None) -> None:
        """Continue from a checkpoint, or start a new run."""
        self.checkpoints.open()
        for name in find_unsaved(self):
            log.warning("trainer.%s: modules and optimizers in it are in no checkpoint: make each an attribute", name)
        parts = find_parts(self)
        self.checkpoints.check(tensors_to_save(parts))
        if past:
            self.load(past)
            if past.missing_on:  # each node has a checkpoint at once
                self.save()

    def load(self, past: Past) -> None:
        """Take the state and the tensors of a checkpoint."""
        resume.load(past, find_parts(self), self.world, self.args.allow_change)
        if past.manifest["state"]["best"]:
            self.checkpoints.set_best(resume.best_weights(past, self.world))
        self.state = resume.restore_state(past, self.plan)
        if self.world.is_main:
            self.metrics.add(self.state.unlogged)
        if self.state.scaler:
            self.scaler.load_state_dict(self.state.scaler)
        own = past.folder.parent == self.checkpoints.folder
        for flag in ("resume", "weights"):
            if own and (given := getattr(self.args, flag)):
                log.info("-%s %s is not used: this run has checkpoints of its own", flag, given)
        if own and not past.missing_on:
            self.saved = self.state.step, self.state.epoch
            self.checkpoints.damaged = range(
                run_folder.checkpoint_number(past.folder.name) + 1, self.checkpoints.number + 1
            )
        epoch = min(self.state.epoch + 1, self.args.epochs)  # a finished run is evaluated again
        log.info("resuming from %s: epoch %d, step %d", past.folder, epoch, self.state.step)

    def is_done(self) -> bool:
        """Return whether the training is over: after all epochs, or by -stop_after. The state alone decides."""
        best, patience = self.state.best, self.args.stop_after
        early = patience and best and self.state.epoch - best["epoch"] >= patience
        return bool(early) or self.state.epoch >= self.args.epochs

    def train_epoch(self) -> bool:
        """Train the rest of the epoch. False if the run is to stop first."""
        if self.stop.limit_reached(self.state.step):
            return False
        for _ in self.steps(self.rate.time_data_loading(self.batches())):  # noqa: SIM110  # a loop that does much
            if self.after_step():
                return False
        return True

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Return the rest of the epoch's micro-batches of this rank."""
        return self.loaders["train"].epoch(self.state.epoch, self.plan.step_in_epoch(self.state))

    def steps(self, batches: Iterable[tuple[MicroBatch, Any]]) -> Iterator[Tensor]:
        """Train on these micro-batches; yield this rank's last loss after each optimizer step."""
        self.model.train()
        gradients = self.gradients  # made before the first pass
        for micro_batch, batch in batches:
            self.train_micro_batch(micro_batch, batch)
            if micro_batch.last:
                gradients.finish()
                # Not a micro-batch's: what `step` draws is the same on all ranks.
                seeding.seed_micro_batch(self.args.seed, self.state.step, -1, self.world.device)
                self.step(micro_batch.step_samples)
                yield self.pending_losses[-1][0]

    def train_micro_batch(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Compute the gradients of one micro-batch under its own seed; they add up to the step's mean."""
        seeding.seed_micro_batch(self.args.seed, self.state.step, micro_batch.number, self.world.device)
        self.statistics.before(micro_batch)
        counted = self.metrics
        self.metrics = counted if micro_batch.count else metrics.Sums()  # padding counts nothing
        with self.precision:
            loss = self.training_step(batch)
        self.metrics = counted
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UsageError(f"training_step returns {loss!r:.40}: it must return the mean loss, a 0-d tensor")
        self.statistics.after(micro_batch)
        weight = micro_batch.count / micro_batch.step_samples
        self.gradients.before(micro_batch)
        self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        self.gradients.after()
        self.pending_losses.append((loss.detach(), micro_batch.count))

    def step(self, samples: int) -> None:
        """Take the optimizer's step on the gradients of `samples` samples; skip it if they are not finite."""
        self.scaler.unscale_(self.optimizer)
        norm = optimizers.clip(self.parameters, self.args.clip_grad)
        lr = scheduler.lr_at(self.state.step, **self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        optimizers.step(self.optimizer, self.scaler, norm)
        for parameter in self.parameters:
            parameter.grad = None  # as zero_grad, which takes 20 us longer
        self.statistics.finish(norm)
        self.pending_norms.append(norm)
        self.state.step += 1
        self.state.samples += samples

    @functools.cached_property
    def gradients(self) -> reduction.GradientReducer:
        """The reducer of the gradients of all parameters that this trainer's optimizers train."""
        for value in vars(self).values():
            if isinstance(value, DistributedDataParallel):
                value.require_backward_grad_sync = False  # or they would be summed twice
        groups = [group for one in find_parts(self).optimizers.values() for group in one.param_groups]
        trained = dict.fromkeys(parameter for group in groups for parameter in group["params"])
        return reduction.GradientReducer([*trained], self.model, self.world, self.args)

    def after_step(self) -> bool:
        """Do what is due between two steps: a log line, a vote, a checkpoint. True if the run is to stop here."""
        step = self.state.step
        watchdog.moved(step)
        if step % self.args.log_every == 0 or step % self.plan.steps == 0:
            self.log()
        stop = self.stop.tick(training=True) or self.stop.limit_reached(step)
        if self.stop.voted:
            self.checkpoints.poll()
        if stop:
            return True
        if manager.is_due(self.args.save_every, "step", step):
            self.save()
        return False

    def log(self) -> None:
        """Log the interval since the last line; end the run after too many bad steps in a row."""
        run_folder.check_lock(self.folder)
        self.read_losses()
        interval = self.metrics.reduce()
        for name, value in interval.items():
            self.state.sums[name] = self.state.sums.get(name, 0.0) + value
        figures = {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": self.last_norm}
        self.logger.log_training(self.state, interval, figures, self.rate.interval(self.state))
        if self.state.bad_row >= self.args.max_bad_steps:
            self.checkpoints.finish()
            bad = f"{self.state.bad_row} steps in a row without a finite gradient (-max_bad_steps)"
            raise BadSteps(f"{bad}, the last of them step {self.state.step - 1}; {HINT}")

    def read_losses(self) -> None:
        """Count the losses and gradient norms since the last call, and check the targets. Waits for the device."""
        losses.check_probabilities(self.loss)
        for norm in torch.stack(self.pending_norms).tolist() if self.pending_norms else ():
            self.last_norm = norm
            self.state.bad_row = 0 if math.isfinite(norm) else self.state.bad_row + 1
            self.state.bad_steps += not math.isfinite(norm)
        means = torch.stack([loss for loss, _ in self.pending_losses]).tolist() if self.pending_losses else []
        for mean, (_, count) in zip(means, self.pending_losses, strict=True):
            if math.isfinite(mean):
                self.metrics.update({"loss": mean * count, "samples": count})
        self.pending_losses, self.pending_norms = [], []

    def end_epoch(self) -> bool:
        """Evaluate, log, keep the best weights, save. False if the run is to stop first.

        The log comes before the save: a run that continues from an older checkpoint logs again; after the save, a
        kill would lose it.
        """
        figures = self.evaluate("val") if "val" in self.loaders else {}
        if figures is None:
            return False
        try:
            best = metrics.new_best(self.state.best, figures, self.args.best, self.state.epoch + 1)
        except UsageError:
            self.save()  # the epoch's training: the next start begins with its evaluation
            self.checkpoints.finish()
            raise
        self.state.epoch += 1
        self.state.sums = {}
        self.logger.log_evaluation(self.state, "val", figures, self.predictions)
        if best and not self.weights_fault():
            self.checkpoints.set_best(self.whole_weights())
            self.state.best = best
        milestone = self.args.keep_every and self.state.epoch % self.args.keep_every == 0
        if milestone or manager.is_due(self.args.save_every, "epoch", self.state.epoch) or self.is_done():
            self.save(keep=bool(milestone))
        return True

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split over the samples of all ranks. None if all ranks agree to stop."""
        model, totals = self.model.eval(), metrics.Sums()
        self.predictions.reset()
        for micro_batch, batch in self.loaders[split].epoch(0):
            seeding.seed_evaluation(self.args.seed, micro_batch.number, self.world.device)
            with self.precision:
                sums = self.evaluation_step(model, batch, micro_batch.count)
            if micro_batch.count:
                totals.update({**sums, "samples": micro_batch.count})
            if self.votes and self.stop.tick(training=False):
                return None
        losses.check_probabilities(self.loss)
        sums = totals.reduce()
        figures = {name: metrics.mean(sums, name) for name in sums if name != "samples"}
        return {**figures, **self.predictions.figures()}

    def save(self, keep: bool = False) -> None:
        """Begin a checkpoint of this very moment, unless it has one. `keep`: it is never removed."""
        if self.saved == (self.state.step, self.state.epoch) and not self.checkpoints.failures:
            return
        self.read_losses()
        self.state.unlogged = self.metrics.pending()
        self.state.scaler = self.scaler.state_dict()
        tensors = find_parts(self).tensors()
        about = runtime.describe(self.world)
        facts = {"state": dataclasses.asdict(self.state), "config": self.config, "about": about}
        self.checkpoints.save(tensors, facts, step=self.state.step, keep=keep)
        self.saved = self.state.step, self.state.epoch

    def weights_fault(self) -> str:
        """Return why the weights are not worth keeping, "" if they are; the same on all ranks."""
        if "nan" in self.args.allow_change:
            return ""
        if self.state.bad_row >= self.state.step > 0:
            return f"none of the {self.state.step} steps had a finite gradient"
        odd = weights.not_finite(self.model, self.world)
        return f"the parameter {odd[0]} ({len(odd)} in all) is not finite" if odd else ""

    def whole_weights(self) -> dict[str, Tensor]:
        """Return copies of what best/ and final/ hold, as `weights.gather` does. All ranks call this."""
        return weights.gather(model_tensors(self.model), self.world)

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[None]:
        """The model with the run's best weights while the block runs: override it together with `whole_weights`.

        All ranks enter it together. Raises UsageError if the weights are not those of the model.
        """
        tensors = [shards.local_part(tensor) for tensor in model_tensors(self.model).values()]
        kept = [tensor.to("cpu", copy=True) for tensor in tensors]
        try:
            (self.folder / "best" / "weights.safetensors").stat()  # an OSError and no usage error if the disk is gone
            weights.load_into(str(self.folder / "best"), self.model, whole=True, world=self.world)
            yield
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)

    def evaluate_test(self) -> dict[str, dict[str, float]] | None:
        """Return the metrics of the test split once the training is over: "test" with the final weights.

        "test_best" are those with the best weights, if they are others. {} if the training is not over, or without a
        test split. None if the run is to stop.
        """
        self.checkpoints.finish()  # the state is safe, however long the evaluation takes
        if self.is_done() and (why := self.weights_fault()):
            raise BadSteps(f"{why}: no final weights are written; {HINT}")
        if not (self.is_done() and "test" in self.loaders):
            return {}
        found: dict[str, dict[str, float] | None] = {}
        if self.state.best and self.state.best["epoch"] < self.state.epoch:
            with self.best_weights():
                found["test_best"] = self.evaluate("test")
        if None not in found.values():
            found["test"] = self.evaluate("test")
        return None if None in found.values() else {split: one for split, one in found.items() if one}

    def finish(self, figures: dict[str, dict[str, float]] | None) -> str:
        """Save for the last time, and write the final weights of a finished run. `figures`: of `evaluate_test`.

        Returns:
            "finished" or "stopped"; or "failed" where a node of torchrun's is gone: the others then start the run
            again on the remaining ones.
        """
        finished = self.is_done() and figures is not None
        if finished:
            for split, values in (figures or {}).items():
                self.logger.log_evaluation(self.state, split, values, self.predictions)
            self.checkpoints.write_final(self.whole_weights())
        self.save()
        self.checkpoints.close()
        outcome = {"state": "finished" if finished else "stopped", **dataclasses.asdict(self.stop.cause)}
        outcome |= {name: getattr(self.state, name) for name in ("epoch", "step", "samples", "best")}
        outcome |= {"test": {}, **(figures or {})}
        if finished and self.state.epoch < self.args.epochs:
            last = outcome["best"]["epoch"]
            outcome["reason"] = f"-stop_after {self.args.stop_after}: nothing better since epoch {last}"
        if self.world.is_writer:
            run_folder.write_outcome(self.folder, self.world, **outcome)
            if finished or self.stop.cause.reason == preemption.FILE_THERE:
                self.stop.file.unlink(missing_ok=True)  # it stops a run once
        self.logger.close(outcome)
        return "failed" if self.stop.only_other_nodes_leave() and not finished else outcome["state"]
