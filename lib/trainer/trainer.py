"""The usual way of training: epochs of steps, evaluation, checkpoints. For another, override `training_step`."""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lib.core import batchnorm, parallel, reduction, scheduler
from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.utils import distributed, preemption, runtime, seeding
from lib.utils.checkpoint import manager, resume, run_folder, weights
from lib.utils.checkpoint.resume import Past
from lib.utils.checkpoint.state import State, model_tensors, parts_of, tensors_to_save, unwrap
from lib.utils.data.loader import Loader
from lib.utils.data.options import options_of
from lib.utils.data.plan import MicroBatch
from lib.utils.data.tensors import shapes_in_errors
from lib.utils.errors import UsageError
from lib.utils.monitoring import images, metrics, throughput
from lib.utils.monitoring.logger import Logger
from lib.utils.watchdog import Watch

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
HINT = "-debug names the first bad tensor; a lower -lr_start, -clip_grad or -bf16 for -fp16 may help"


class BadSteps(RuntimeError):
    """Too many steps in a row were skipped, or all of them, as their gradients were not finite."""


class Trainer:
    """Trains a wrapped model on `loaders["train"]` and evaluates it on "val" and "test" if they exist."""

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
        self.folder, self.plan = run_folder.run_of(args), loaders["train"].plan
        self.state, self.metrics = State(), metrics.Sums()
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
        alone = world.size == 1 and self.plan.micro == self.plan.batch
        self.statistics = batchnorm.Statistics(model, world, alone, round_robin=args.parallel == "fsdp")
        self.window, self.norms = [], []  # losses and gradient norms not yet read from the device
        self.last_norm = math.nan  # the last one that was read
        shown = loaders.get("val", loaders["train"]).dataset
        self.answers = images.Answers(loss, args.num_classes, options_of(shown).classes, world)
        limit = args.limit_steps if (args.limit_steps or 0) < self.total_steps else None
        self.stop = preemption.Stop(self.folder, args.max_hours, args.grace_s, limit)
        self.ballot, self.votes = preemption.Ballot(self.stop, world), False  # on a stop: only in `fit`
        self.checkpoints = manager.Checkpoints(self.folder / "checkpoints", world, keep_last=args.keep_last)
        self.saved = None  # the (step, epoch) of the last checkpoint

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss over a micro-batch (collated as the dataset gives it, on the device), for backward."""
        done = losses.forward(self.model, batch, self.loss)
        if self.args.train_metrics:
            self.metrics.update(losses.metric_sums(self.loss, done.outputs, done.targets, means=True))
        return done.loss

    def evaluation_step(self, model: nn.Module, batch: Any, count: int) -> dict[str, Tensor]:
        """Return what a batch of `count` samples adds to each metric: sums over its samples, 0-d tensors.

        `model` is unwrapped.
        """
        done = losses.forward(model, batch, self.loss)
        self.answers.add(done.inputs, done.targets, done.outputs, count)
        return {"loss": done.loss * count, **losses.metric_sums(self.loss, done.outputs, done.targets)}

    def fit(self, past: Past | None = None) -> str:
        """Train from `past` (resume.find), or from step 0, to the end or to a stop with the state saved.

        Returns:
            What `finish` returns.
        """
        self.votes = True
        with self.stop.listening():
            self.resume(past)
            self.rate = throughput.Rate(self.total_steps, self.state, self.world.device)
            minutes, saving = self.args.hang_minutes, self.checkpoints.writing
            self.watchdog = Watch(self.state, self.ballot, self.world, minutes, self.folder, saving)
            with self.watchdog.watching():
                while not self.over() and self.train_epoch() and self.end_epoch():
                    pass
                return self.finish()

    def resume(self, past: Past | None) -> None:
        """Continue from a checkpoint, or start a new run."""
        self.checkpoints.open()
        parts = parts_of(self)
        tensors = tensors_to_save(parts)
        self.checkpoints.make_room(tensors, parts.first(tensors))
        del tensors  # else an optimizer's memory is there twice while a checkpoint is loaded
        if past:
            self.load(past)
            if past.lacking:  # each node has a checkpoint at once
                self.save()

    def load(self, past: Past) -> None:
        """Take the state and the tensors of a checkpoint."""
        if different := resume.changes(self.args, self.plan, past):
            log.warning("going on with other settings: %s", different)
        resume.load(past, parts_of(self), self.world, self.args.allow_change)
        self.state = resume.state(past, self.plan)
        if self.world.is_main:
            self.metrics.add(self.state.unlogged)
        if self.scaler.is_enabled() and self.state.scaler:
            self.scaler.load_state_dict(self.state.scaler)
        if past.lacking and self.state.best:
            self.checkpoints.write_best(resume.best_weights(past, self.folder, self.world))
        if past.folder.parent == self.checkpoints.folder and not past.lacking:
            self.saved = self.state.step, self.state.epoch
            self.checkpoints.damaged = range(run_folder.number(past.folder.name) + 1, self.checkpoints.number + 1)
        epoch = min(self.state.epoch + 1, self.args.epochs)  # a finished run is evaluated again
        log.info("going on from %s: epoch %d, step %d", past.folder, epoch, self.state.step)

    def over(self) -> bool:
        """Return whether the training is over: after all epochs, or by -stop_after. The state alone decides."""
        best, patience = self.state.best, self.args.stop_after
        early = patience and best and self.state.epoch - best["epoch"] >= patience
        return bool(early) or self.state.epoch >= self.args.epochs

    def train_epoch(self) -> bool:
        """Train the rest of the epoch. False if the run is to stop first."""
        if self.stop.at_limit(self.state.step):
            return False
        return not any(self.boundary() for _ in self.steps(self.rate.waiting(self.batches())))

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Return the rest of the epoch's micro-batches of this rank."""
        return self.loaders["train"].epoch(self.state.epoch, self.plan.step_in_epoch(self.state))

    def steps(self, batches: Iterable[tuple[MicroBatch, Any]]) -> Iterator[None]:
        """Train on these micro-batches; yield after each optimizer step."""
        self.model.train()
        for key, batch in batches:
            self.micro_batch(key, batch)
            self.logger.first_batch(batch)
            if key.last:
                self.step(key.step_samples)
                yield

    def micro_batch(self, key: MicroBatch, batch: Any) -> None:
        """Compute the gradients of one micro-batch under its own seed; they add up to the step's mean."""
        seeding.for_micro_batch(self.args.seed, self.state.step, key.number, self.world.device)
        self.statistics.before(key)
        padding = key.count == 0  # it counts nothing, as its gradients do
        with self.precision, shapes_in_errors(batch, self.args), self.metrics.ignoring(padding):
            loss = self.training_step(batch)
        self.statistics.after(key)
        weight = key.count / key.step_samples
        self.gradients.before(key)
        self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        self.gradients.after()
        self.window.append((loss.detach(), key.count))

    def step(self, samples: int) -> None:
        """Take the optimizer's step of `samples` samples. All ranks alike skip it if the gradient is not finite."""
        self.gradients.finish()
        self.scaler.unscale_(self.optimizer)
        norm = optimizers.clip(self.parameters, self.args.clip_grad)
        lr = scheduler.lr_at(self.state.step, **self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        optimizers.step(self.optimizer, self.scaler, norm)
        for parameter in self.parameters:
            parameter.grad = None
        self.statistics.finish(norm)
        self.norms.append(norm)
        self.state.step += 1
        self.state.samples += samples

    @functools.cached_property
    def gradients(self) -> reduction.Gradients:
        """What sums the gradients of all parameters that this trainer's optimizers train."""
        groups = [group for one in parts_of(self).optimizers.values() for group in one.param_groups]
        trained = dict.fromkeys(parameter for group in groups for parameter in group["params"])
        own = [value for value in vars(self).values() if isinstance(value, nn.Module) and value is not self.model]
        return reduction.Gradients([*trained], self.model, own, self.world, self.args)

    def boundary(self) -> bool:
        """Do what is due between two steps: a log line, a vote, a checkpoint. True if the run is to stop here."""
        step = self.state.step
        self.watchdog.mark()
        self.logger.step(self.window[-1][0])
        if step % self.args.log_every == 0 or step % self.plan.steps == 0:
            self.log()
        stop = self.ballot.tick(training=True) or self.stop.at_limit(step)
        if self.ballot.voted:
            self.checkpoints.poll()
        if stop and step < self.total_steps:  # a stop on the very last step finishes the run
            return True
        if manager.due(self.args.save_every, "step", step):
            self.save()
        return False

    def log(self) -> None:
        """Log the interval since the last line; end the run after too many bad steps in a row."""
        self.read_figures()
        interval = self.metrics.reduce()
        metrics.add(self.state.sums, interval)
        figures = {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": self.last_norm}
        self.logger.training(self.state, interval, figures, self.rate.interval(self.state))
        if self.state.bad_row >= self.args.max_bad_steps:
            self.checkpoints.finish()
            bad = f"{self.state.bad_row} steps in a row without a finite gradient (-max_bad_steps)"
            raise BadSteps(f"{bad}, the last of them step {self.state.step - 1}; {HINT}")

    def read_figures(self) -> None:
        """Count the losses and gradient norms since the last call. Waits for the device."""
        self.state.count_bad(self.norms)
        self.last_norm = float(self.norms[-1]) if self.norms else self.last_norm
        self.metrics.add(metrics.window_sums(self.window))
        self.window, self.norms = [], []

    def end_epoch(self) -> bool:
        """Evaluate, log, keep the best weights, save. False if the run is to stop first.

        The log comes before the save: a run that continues from an older checkpoint logs again; after the save, a
        kill would lose it.
        """
        figures = self.evaluate("val") if "val" in self.loaders else {}
        if figures is None:
            return False
        try:
            best = metrics.better(self.state.best, figures, self.args.best, self.state.epoch + 1)
        except UsageError:
            self.save()  # the epoch's training: the next start begins with its evaluation
            self.checkpoints.finish()
            raise
        self.state.epoch += 1
        self.state.sums = {}
        self.logger.evaluated(self.state, "val", figures, self.answers)
        if best and not self.fault():
            self.checkpoints.write_best(self.whole_weights())
            self.state.best = best
        milestone = self.args.keep_every and self.state.epoch % self.args.keep_every == 0
        if milestone or manager.due(self.args.save_every, "epoch", self.state.epoch) or self.over():
            self.save(keep=bool(milestone))
        return True

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split over the samples of all ranks. None if all ranks agree to stop."""
        self.stop.evaluating(last=self.state.step == self.total_steps or self.over())
        model, totals = unwrap(self.model).eval(), metrics.Sums()
        self.answers.reset()
        for key, batch in self.loaders[split].epoch(0):
            with self.precision, shapes_in_errors(batch, self.args):
                sums = self.evaluation_step(model, batch, key.count)
            if key.count:
                totals.update({**sums, "samples": key.count})
            if self.votes and key.last and self.ballot.tick(training=False):
                return None
        return {**losses.figures(totals.reduce()), **self.answers.figures()}

    def save(self, keep: bool = False) -> None:
        """Begin a checkpoint of this very moment, unless it has one. `keep`: it is never removed."""
        if self.saved == (self.state.step, self.state.epoch) and not self.checkpoints.failures:
            return
        self.read_figures()
        self.state.unlogged = self.metrics.pending()
        self.state.scaler = self.scaler.state_dict()
        config, parts = resume.config(self.args, self.plan), parts_of(self)
        tensors = parts.tensors()
        facts = {"state": dataclasses.asdict(self.state), "config": config, "about": runtime.about(self.world)}
        self.checkpoints.save(tensors, facts, step=self.state.step, first=parts.first(tensors), keep=keep)
        self.saved = self.state.step, self.state.epoch

    def fault(self) -> str:
        """Return why the weights are not worth keeping, "" if they are; the same on all ranks."""
        if "nan" in self.args.allow_change:
            return ""
        if self.state.bad_row >= self.state.step > 0:
            return f"none of the {self.state.step} steps had a finite gradient"
        odd = weights.not_finite(unwrap(self.model), self.world)
        return f"the parameter {odd[0]} ({len(odd)} in all) is not finite" if odd else ""

    def whole_weights(self) -> dict[str, Tensor]:
        """Return copies of what best/ and final/ hold, as `weights.gathered` does. All ranks call this."""
        return weights.gathered(model_tensors(unwrap(self.model)), self.checkpoints.disk)

    def finish(self) -> str:
        """Save for the last time; evaluate the test split and write the final weights of a finished run.

        Returns:
            "finished" or "stopped"; or "failed" where a node of torchrun's is gone: the others then start the run
            again on the remaining ones.
        """
        self.checkpoints.finish()  # the state is safe, however long the evaluation takes
        trained = self.over()
        if trained and (why := self.fault()):
            raise BadSteps(f"{why}: no final weights are written; {HINT}")
        figures = self.evaluate("test") if trained and "test" in self.loaders else {}
        finished = trained and figures is not None
        if finished:
            self.logger.evaluated(self.state, "test", figures or {}, self.answers)
            final = self.whole_weights()
            self.checkpoints.disk.do(lambda: weights.write(self.folder / "final", final))
        self.save()
        self.checkpoints.close()
        self.logger.close(finished)
        outcome = {"state": "finished" if finished else "stopped", **dataclasses.asdict(self.stop.cause)}
        outcome |= {name: getattr(self.state, name) for name in ("epoch", "step", "samples", "best")}
        outcome["test"] = figures
        if finished and self.state.epoch < self.args.epochs:
            last = outcome["best"]["epoch"]
            outcome["reason"] = f"-stop_after {self.args.stop_after}: nothing better since epoch {last}"
        if self.checkpoints.disk.leads:
            run_folder.write_outcome(self.folder, self.world, **outcome)
            if finished or self.stop.cause.reason == preemption.FILE_THERE:
                self.stop.file.unlink(missing_ok=True)  # it stops a run once
        self.logger.end(outcome)
        return "failed" if self.stop.only_other_nodes_leave() and not finished else outcome["state"]
