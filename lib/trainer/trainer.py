"""The usual way of training: epochs of steps, evaluation, checkpoints. For another, override `training_step`."""

import contextlib
import dataclasses
import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.core import parallel, replicas, scheduler
from lib.utils import distributed, preemption, runtime, seeding, watchdog
from lib.utils.checkpoint import just_in_time, manager, resume, run_folder, shards, weights
from lib.utils.checkpoint.resume import Past
from lib.utils.checkpoint.state import State, find_parts, model_tensors
from lib.utils.data.loader import Loader
from lib.utils.data.plan import MicroBatch
from lib.utils.errors import UsageError, call_optional
from lib.utils.monitoring import metrics, throughput
from lib.utils.monitoring.logger import Logger

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
HINT = "-debug names the first bad tensor; try a lower -lr_start, -clip_grad, or -bf16 in place of -fp16"


class Trainer:
    """Trains a model on `loaders["train"]` and evaluates it on the other splits: "val", "val_NAME", "test"."""

    def __init__(
        self,
        args: "Args",
        world: distributed.World,
        loaders: dict[str, Loader],
        model: nn.Module,
        loss: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        logger: Logger,
    ):
        self.args, self.world, self.loaders = args, world, loaders
        self.model, self.loss, self.logger = model, loss, logger
        self.optimizer, *self.more_optimizers = optimizers
        self.folder, self.plan = run_folder.path_of(args), loaders["train"].plan
        self.state, self.metrics = State(), metrics.Sums()
        self.loss_sums = metrics.Sums(alone=True)  # since the last log line; each rank adds up those of all
        self.config = resume.config_to_save(args, self.plan)
        self.total_steps = self.plan.total_steps
        self.val_splits = sorted(split for split in loaders if split.startswith("val"))  # val first, if it is there
        scale = self.plan.batch / (args.lr_batch or self.plan.batch)  # Goyal et al., arXiv:1706.02677
        self.schedule = {"kind": args.lr_schedule, "total": self.total_steps, "end": args.lr_end * scale}
        self.schedule |= {"start": args.lr_start * scale, "warmup": args.lr_warmup * self.plan.steps}
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=args.fp16 and not args.debug)  # which finds inf
        self.pending_losses, self.pending_norms = [], []  # of steps; not yet read from the device
        self.stop = preemption.Stop(self.folder, world, max_hours=args.max_hours, grace_s=args.grace_s)
        self.logs_scalars, self.is_evaluating = world.is_main, False  # in a pass: whether this one is no padding
        self.micro_batch, self.place = None, ()  # of the pass that runs, also in an evaluation; of its draws
        self.is_whole = False  # whether weights and state, but for statistics, are those of a step that is done
        self.is_unscaled = True  # whether gradients are without the scaler's factor
        self.is_loaded = False  # whether evaluations take the model's weights as they are: those of a file
        self.marks = None  # of the state before an evaluation that a stop may end
        self.checkpoints = manager.Checkpoints(self.folder / "checkpoints", world, args.keep_last, args.keep_hours)
        self.saved = None  # the step of the last checkpoint, and whether what was due after it was done
        self.must_wait, self.pending_saves = False, []  # in a step or a hook saves wait here: whether to keep each
        self.rate = throughput.Throughput(self.total_steps, self.state, world.device)
        self.of_base = {name: id(value) for name, value in vars(self).items()}  # what comes later is a subclass's

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss over a micro-batch (collated as the dataset gives it, on the device), for backward."""
        given = {**batch} if isinstance(batch, Mapping) else batch
        done = losses.forward(self.model, batch, self.loss)
        self.checks.taken = done.loss, given
        if self.args.train_metrics:
            by_part = getattr(self.loaders["train"].dataset, "losses_by_part", lambda *_: {})  # of a mixture
            found = by_part(self.loss, done, self.micro_batch.indices)  # pyright: ignore[reportOptionalMemberAccess]
            for name, value in {**self.compute_metrics(done.outputs, done.targets), **found}.items():
                self.log_scalar(name, value)
        return done.loss

    def evaluation_step(self, model: nn.Module, batch: Any, count: Any) -> dict[str, Any]:
        """Return "loss" and metrics of a batch of `count` targets (0: padding), as `compute_metrics` does."""
        done = losses.forward(model, batch, self.loss)
        loss = done.loss.where(count > 0, 0) if isinstance(count, Tensor) else done.loss  # NaN if all are ignored
        return {"loss": metrics.Ratio(loss * count, count), **self.compute_metrics(done.outputs, done.targets)}

    def compute_metrics(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """Return the metrics of a batch, each as values of its samples, (B, ...), or as a Ratio. Override it."""
        return losses.compute_metrics(self.loss, outputs, targets)

    def count_targets(self, batch: Any, samples: int) -> Tensor | int:
        """Return how many targets the mean loss of a batch is a mean over: its weight. 0 for padding (0 samples)."""
        return losses.count_targets(self.loss, batch, samples)

    def fit(self, past: Past | None = None) -> str:
        """Train from `past` (resume.find), or from step 0, to the end or to a stop. Returns what `finish` returns."""
        distributed.attempt(lambda: replicas.check_names(self), self.world)  # all handle signals from here on
        with self.stop.handle_signals(), just_in_time.saving(self):
            self.resume(past)
            self.rate.begin(self.state)
            if "samples" in self.state.unlogged:  # by a process that was lost
                self.log()
            try:
                if not self.state.evaluated:  # a stop has left it to this start
                    self.evaluate_and_save()
                if not self.is_done():  # an earlier start may be past the limit
                    self.stop.check_limit(self.state.step, self.args.limit_steps)
                while not (self.stop.agreed or self.is_done()):
                    epoch = self.state.epoch
                    seeding.seed(seeding.STEP, self.args.seed, epoch, 2, device=self.world.device)
                    self.train_epoch()
                    if self.state.epoch == epoch and not (self.stop.agreed or self.is_done()):
                        raise UsageError("an epoch has ended without all its steps: train_step must count each")
                figures = self.evaluate_test()
            except preemption.Stopped:  # in an evaluation, which the next start repeats
                figures, self.must_wait = None, False
            return self.finish(figures)

    def resume(self, past: Past | None) -> None:
        """Continue from a checkpoint, or start a new run."""
        self.checkpoints.open()
        parts = find_parts(self)
        parts.states({})  # names now what no checkpoint could hold
        self.checkpoints.check(parts.weights())
        self.make_engine()
        if past:
            self.load(past)
            if past.missing_on:  # each node has a checkpoint at once
                self.save()
        self.is_whole = True

    def make_engine(self) -> None:
        """Make what sums gradients, once all modules are there."""
        parts = find_parts(self)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            fault = f"self.optimizer is a {type(self.optimizer).__name__}, no torch.optim.Optimizer"
            raise UsageError(f"{fault}: make it a subclass, or let optimizer_step() use it under another name")
        self.all_optimizers, self.checks = [*parts.optimizers.values()], replicas.Checks(self)
        module = importlib.import_module(f"lib.core.{self.plan.engine}")  # exact, or stock
        self.engine = module.Engine([*parts.modules.values()], self.world, self.args)
        self.scheduled_groups()  # notes their own rates, which a checkpoint does not have
        for optimizer in self.all_optimizers:
            optimizer.register_step_pre_hook(lambda *_: vars(self).update(is_whole=False, has_stepped=True))

    def load(self, past: Past) -> None:
        """Take the state and the tensors of a checkpoint."""
        resume.load(past, find_parts(self), self.world, self.args)
        if past.manifest["state"]["best"]:
            self.checkpoints.best = resume.best_weights(past, self.world) or None
        self.state = resume.restore_state(past, self.plan)
        self.checks.fixed = self.checks.before = past.manifest.get("fixed", {})
        saved = self.state.unlogged
        self.loss_sums.add({name: saved[name] for name in saved.keys() & {"loss", "samples"}})
        if self.world.is_main:
            self.metrics.add({name: saved[name] for name in saved.keys() - {"loss", "samples"}})
        if past.folder.parent == self.checkpoints.folder and not past.missing_on:
            self.saved = self.state.step, self.state.evaluated
        epoch = min(self.state.epoch + 1, self.plan.epochs)  # a finished run is evaluated again
        log.info("resuming from %s: epoch %d, step %d", past.folder, epoch, self.state.step)

    def is_done(self) -> bool:
        """Return whether the training is over: after all steps, or by -stop_after. The state alone decides."""
        return self.state.evaluated and (self.has_stalled() or self.state.step >= self.total_steps)

    def has_stalled(self) -> bool:
        """Return whether -stop_after ends the training: so many validations without a better one."""
        best, patience = self.state.best, self.args.stop_after
        return bool(best and patience and self.state.evaluations - best["evaluation"] >= patience)

    def train_epoch(self) -> None:
        """Train the rest of the epoch, or until a stop; evaluate and save when that is due."""
        first = self.state.step % self.plan.steps
        batches = self.rate.time_data_loading(self.loaders["train"].epoch(self.state.epoch, first))
        for _ in range(first, self.plan.steps):
            # For what is drawn before the passes, wherever a start begins; the loader seeds each micro-batch.
            seeding.seed(seeding.STEP, self.args.seed, self.state.step, 0, device=self.world.device)
            self.checks.check_saved()
            self.train_step(batches)
            self.state.evaluated, self.engine.buffers.starts = False, []
            self.is_whole = type(self).after_step is Trainer.after_step  # a subclass's may change what is saved
            self.after_step()
            self.is_whole = True
            if not self.stop.agreed:
                self.evaluate_and_save()
            if self.stop.agreed or self.is_done():
                break

    def train_step(self, batches: Iterator[tuple[MicroBatch, Any]]) -> None:
        """Take one optimizer step: a pass for each of this rank's micro-batches, the sum of all ranks, the update."""
        self.trained, self.must_wait, self.micro_batch = optimizers.parameters_of(self.all_optimizers), True, None
        for parameter in self.trained:
            parameter.grad = None
        for micro_batch, batch in batches:
            self.engine.begin_pass(micro_batch, self.trained)
            given = {**batch} if isinstance(batch, Mapping) else batch
            with self.checks.watch_pass(micro_batch):
                loss = self.call_training_step(batch, micro_batch)
                if loss is self.checks.taken[0] and type(self).count_targets is Trainer.count_targets:
                    given = self.checks.taken[1]  # in which a subclass may have masked targets
                count = self.count_targets(given, micro_batch.count) if micro_batch.count else 0
                call_optional("scripts.check_loss", "check_pass", self, loss, count)
                self.backward(loss, micro_batch, count)
            if micro_batch.last:
                break
        figures = self.engine.sum_gradients()  # the loss and the number of targets of each micro-batch
        self.is_whole, self.has_stepped, self.is_unscaled = False, False, not self.scaler.is_enabled()
        self.pending_losses.append(figures)
        self.rescale_gradients(figures[:, 1].sum(), micro_batch)
        seeding.seed(seeding.STEP, self.args.seed, self.state.step, device=self.world.device)  # alike on all ranks
        self.set_learning_rate()
        for group in self.scheduled_groups():
            group["lr_set"] = group["lr"]
        norm = self.optimizer_step()
        norm = norm.full_tensor() if shards.is_sharded(norm) else norm
        if not self.is_unscaled:
            raise UsageError("-fp16: optimizer_step must call clip_gradients(), which takes the scaler's factor out")
        if not isinstance(norm, Tensor) or norm.ndim:
            raise UsageError(f"optimizer_step returns {norm!r:.40}: it must return the norm of the gradient, 0-d")
        self.pending_norms.append(norm)
        self.state.step += 1
        self.state.samples += micro_batch.step_samples
        self.logger.step()
        self.checks.count_step(norm)
        self.must_wait = False

    def call_training_step(self, batch: Any, micro_batch: MicroBatch) -> Tensor:
        """Return what `training_step` returns, in the precision of the run."""
        self.micro_batch, self.logs_scalars = micro_batch, micro_batch.count > 0
        self.place = seeding.PASS, self.args.seed, self.state.step, micro_batch.number
        seeding.seed(*self.place, device=self.world.device)
        with parallel.autocast(self.args, self.world.device):
            loss = self.training_step(batch)
        self.logs_scalars, self.place = self.world.is_main, ()
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise UsageError(f"training_step returns {loss!r:.40}: not the mean loss, a 0-d tensor with a gradient")
        return loss

    def backward(self, loss: Tensor, micro_batch: MicroBatch, count: Tensor | int) -> None:
        """Add a micro-batch's gradients, times count / step_samples. DDP and FSDP also sum over the ranks in here."""
        accumulates = self.plan.engine == "stock" and not micro_batch.first
        if accumulates != any(one.grad is not None for one in self.trained):
            faults = "calls backward by itself", "calls zero_grad by itself, or its loss depends on no weight"
            raise UsageError(f"training_step {faults[accumulates]}: let it return the whole loss")
        figures = torch.empty(2, dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device)
        figures[0], figures[1] = loss.detach(), count
        if micro_batch.step_parts > 1 or not micro_batch.count:
            loss = loss * (count / micro_batch.step_samples)  # the number of targets comes later: rescale_gradients
        frozen = [one for one in self.trained if not one.requires_grad]
        for one in frozen:  # it may have been used in this pass before, as a GAN's critic
            one.requires_grad_(True)
        try:
            self.engine.backward(self.scaler.scale(loss), micro_batch, figures)
        finally:  # DDP fails here if a process is lost, and then the last step is saved
            for one in frozen:
                one.requires_grad_(False)

    def rescale_gradients(self, total: Tensor, micro_batch: MicroBatch) -> None:
        """Make the sums, weighted by count / step_samples, the gradient of the mean over all `total` targets, 0-d."""
        if micro_batch.step_parts > 1:
            factor = micro_batch.step_samples / total.where(total != 0, 1)
            if factor.device.type != "cpu" or factor != 1:
                gradients = [shards.local_part(one.grad) for one in self.trained if one.grad is not None]
                torch._foreach_mul_(gradients, factor)

    def set_learning_rate(self) -> None:
        """Give the optimizers of -optimizer the learning rate of this step; a group's "lr_scale" multiplies it."""
        lr = scheduler.lr_at(self.state.step, **self.schedule)
        for group in self.scheduled_groups():
            replicas.check_rate(group)
            group["lr"] = lr * group["lr_ratio"] * group.get("lr_scale", 1.0)

    def scheduled_groups(self) -> list[dict]:
        """Return the groups of -optimizer's optimizers. A group's own learning rate is its peak, as -lr_start is."""
        groups = [group for one in (self.optimizer, *self.more_optimizers) for group in one.param_groups]
        groups = [group for group in groups if group.get("lr") is not None]  # else it has a schedule of its own
        for group in groups:
            group.setdefault("lr_ratio", float(group["lr"]) / self.args.lr_start)
        return groups

    def optimizer_step(self) -> Tensor:
        """Update the parameters by the whole gradient, on no rank if it is not finite; return its norm, 0-d."""
        due = self.due_optimizers()
        norm = self.clip_gradients(due)
        for optimizer in due:
            optimizers.step(optimizer, norm)
        if due:
            self.scaler.update()
        return norm

    def due_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that take this step. The gradients of the others are dropped."""
        return self.all_optimizers

    def clip_gradients(self, due: list[torch.optim.Optimizer]) -> Tensor:
        """Return the norm of the gradient of these optimizers' parameters (0-d); cut a longer one to -clip_grad."""
        trained = [parameter for optimizer in due for parameter in optimizers.parameters_of([optimizer])]
        if len(trained) > len({*trained}):
            raise UsageError("two optimizers train the same parameter: let due_optimizers() say which takes a step")
        for optimizer in due if self.scaler.is_enabled() else ():
            self.scaler.unscale_(optimizer)
        self.is_unscaled = True
        return optimizers.clip(trained, self.args.clip_grad, exact=self.plan.engine == "exact")

    def after_step(self) -> None:
        """Log, vote on a stop and publish a save, where these are due. Change weights before that, not after it."""
        watchdog.moved(self.state.step)
        self.log()
        if not self.stop.tick(training=True) and self.state.step < self.total_steps:  # whose end is no stop
            self.stop.check_limit(self.state.step, self.args.limit_steps)
        if self.stop.voted:
            self.checkpoints.poll()

    def evaluate_and_save(self) -> None:
        """Validate, end the epoch and save, where this step calls for it. `after_step` has logged the step."""
        state = self.state
        state.epoch = state.step // self.plan.steps
        milestone = self.args.keep_every and self.is_due(f"{self.args.keep_every}epochs")
        save = milestone or self.is_due(self.args.save_every)
        if self.is_due(self.args.eval_every) or state.step >= self.total_steps:
            self.marks, self.must_wait = self.checks.marks(), True  # a save waits for what is due
            self.validate()
        state.evaluated, self.marks = True, None
        if state.step % self.plan.steps == 0:
            state.sums = {}
            seeding.seed(seeding.STEP, self.args.seed, state.step, 1, device=self.world.device)
            self.is_whole, self.must_wait = False, True
            self.on_epoch_end()
        self.is_whole, self.must_wait, self.measured = True, False, {}
        if save or self.pending_saves or self.is_done():
            self.save(keep=bool(milestone))

    def is_due(self, every: str) -> bool:
        """Return whether what comes every N steps or epochs, or as a save every N minutes, is due after this step."""
        if every == "auto":
            if not (self.stop.voted and self.checkpoints.is_late()):
                return self.is_due("1epoch")
            self.read_losses()  # after a bad step the weights may be NaN
            return self.is_due("1epoch") or not distributed.all_reduce_max([self.state.bad_row], self.world)[0]
        number = int("".join(filter(str.isdigit, every)))  # epochs if there is no unit
        if "minute" in every:
            return self.stop.voted and self.checkpoints.is_late(number)
        return (self.state.step if "step" in every else self.state.step / self.plan.steps) % number == 0

    def log_scalar(self, name: str, value: Any) -> None:
        """Log train/NAME: the mean over all calls since the last line, of a number, a tensor's values, or a Ratio.

        In a pass each micro-batch counts its own. All ranks call it elsewhere (in no evaluation); rank 0's counts.
        """
        if self.is_evaluating:
            raise UsageError(f"log_scalar({name!r}) in an evaluation: return it there, or check model.training")
        if name in ("loss", "loss_mean", "samples", "lr", "grad_norm"):
            raise UsageError(f"log_scalar({name!r}): the run itself logs train/{name}; take another name")
        parts = [part.full_tensor() if shards.is_sharded(part) else part for part in metrics.ratio(value)]
        if self.logs_scalars:
            self.metrics.update({name: metrics.Ratio(*parts)})

    def log(self) -> None:
        """Log the interval since the last line, if a line is due; end the run after too many bad steps in a row."""
        state = self.state
        if state.step % self.args.log_every and state.step % self.plan.steps and state.step < self.total_steps:
            return
        run_folder.check_lock(self.folder)
        self.read_losses()
        others = metrics.means(self.metrics.reduce())  # it may fail, and loses nothing then
        interval = self.loss_sums.reduce()
        state.sums |= {name: state.sums.get(name, 0.0) + value for name, value in interval.items()}
        both = {"loss": interval, "loss_mean": state.sums}.items()
        figures = {name: one["loss"] / one["samples"] if one.get("samples") else math.nan for name, one in both}
        rate = self.optimizer.param_groups[0].get("lr")  # some optimizers have None
        figures |= {"lr": math.nan if rate is None else rate, "grad_norm": state.grad_norm}
        speed = self.rate.interval(state) | {"save_s": self.checkpoints.took_s}
        self.logger.log_training(state, figures, others, speed)
        if state.bad_row >= self.args.max_bad_steps:
            self.checkpoints.finish()
            bad = f"{state.bad_row} steps in a row without a finite gradient (-max_bad_steps)"
            raise RuntimeError(f"{bad}, the last of them step {state.step - 1}; {HINT}")

    def read_losses(self) -> None:
        """Count the losses and gradient norms since the last call, and check the targets. Waits for the device."""
        losses.check_probabilities(self.loss)
        for norm in torch.stack(self.pending_norms).tolist() if self.pending_norms else ():
            self.state.grad_norm = norm
            self.state.bad_row = 0 if math.isfinite(norm) else self.state.bad_row + 1
            self.state.bad_steps += not math.isfinite(norm)
        for mean, count in torch.cat(self.pending_losses).tolist() if self.pending_losses else ():
            if math.isfinite(mean):
                self.loss_sums.update({"loss": mean * count, "samples": count})
        self.pending_losses, self.pending_norms = [], []

    def validate(self) -> None:
        """Evaluate the validation sets, log the figures, keep the best weights. A stop ends it."""
        self.read_losses()
        state, found = self.state, {}
        for split in self.val_splits:
            found[split] = self.evaluate(split)
            self.logger.log_evaluation(state, split, found[split])
        self.marks = best = None
        if found:
            figures = {f"{split}/{name}": value for split in found for name, value in found[split].items()}
            figures |= found[self.val_splits[0]]  # the first set's need no name in front
            try:
                metrics.check_same(figures, self.world)
                best = metrics.new_best(state.best, figures, self.args.best, state.evaluations + 1)
            except UsageError:
                self.must_wait = False
                self.save()  # the training up to here: the next start begins with the validation
                self.checkpoints.finish()
                raise
        is_second = just_in_time.has_whole_state(self) and self.world.rank == self.world.size - 1  # if rank 0 is lost
        kept = self.whole_weights(self.world.is_writer or is_second) if best and not self.weights_fault() else None
        self.is_whole, state.validated = False, state.step  # until what follows is done
        self.checks.validated = self.checks.marks(states=False)
        state.evaluations += bool(found)
        if best and kept is not None:
            self.checkpoints.best = kept
            state.best = {**best, "epoch": math.ceil(state.step / self.plan.steps), "step": state.step}
        waits, self.must_wait = self.must_wait, True
        for split in found:
            self.on_evaluation(split, found[split])
        self.must_wait = waits

    def on_evaluation(self, split: str, figures: dict[str, float]) -> None:
        """Do nothing: override it for what a validation decides. Ranks get the same figures. A save may follow."""

    def on_epoch_end(self) -> None:
        """Do nothing: override it for what comes after an epoch's last step and validation. The save comes later."""

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return a split's metrics over the samples of all ranks. Raises preemption.Stopped if a stop ends it."""
        totals = metrics.Sums()
        is_changed = self.marks is None or not (self.is_loaded or self.marks == self.checks.marks())
        may_stop = not distributed.all_reduce_max([is_changed], self.world)[0]
        with contextlib.closing(contextlib.ExitStack()) as contexts:  # an evaluated_weights may lack its `finally`
            chosen = contextlib.nullcontext() if self.is_loaded else self.evaluated_weights()
            for context in (self.rate.paused(), chosen, self.evaluating()):
                contexts.enter_context(context)
            is_stopped, self.measured = False, self.checks.marks(states=False)
            for micro_batch, batch in self.loaders[split].epoch(0):
                self.micro_batch = micro_batch
                if micro_batch.count or self.plan.engine == "stock" or self.args.parallel == "fsdp":  # need all ranks
                    count = self.count_targets(batch, micro_batch.count) if micro_batch.count else 0
                    before = self.checks.count_collectives()
                    with parallel.autocast(self.args, self.world.device):
                        given = self.evaluation_step(self.model, batch, count)
                    if self.checks.count_collectives() != before:
                        raise UsageError("evaluation_step exchanges values, not on all ranks: give Ratio(sum, count)")
                    if micro_batch.count and (isinstance(count, Tensor) or count):  # the mean over nothing is NaN
                        call_optional("scripts.check_loss", "check_metrics", self.loss, batch, given)
                        totals.update(given, micro_batch.count)
                if is_stopped := may_stop and self.stop.tick(training=False):
                    break
        self.engine.buffers.share()  # which the passes may have changed
        if is_stopped:
            raise preemption.Stopped
        # What is drawn from here on is as if there had been no evaluation.
        seeding.seed(*(self.place or (seeding.STEP, self.args.seed, self.state.step)), device=self.world.device)
        losses.check_probabilities(self.loss)
        return metrics.means(totals.reduce())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set all modules of this trainer to evaluation mode for the block; then each has its own mode again."""
        self.checks.run()
        self.is_evaluating, of_pass = True, self.micro_batch
        roots = find_parts(self).modules.values()
        modes = [(module, module.training) for root in roots for module in root.modules()]
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            self.is_evaluating, self.micro_batch = False, of_pass
            for module, training in modes:
                if module.training != training:
                    module.train(training)  # it may do more, as merging LoRA's weights
                module.training = training

    def save(self, keep: bool = False) -> None:
        """Begin a checkpoint, unless this moment has one; in a step or hook, when that is done. `keep`: for good."""
        if self.must_wait:
            self.pending_saves.append(keep)
            return
        if self.saved == (self.state.step, self.state.evaluated) and not self.checkpoints.failures:
            return
        self.checks.run(saves=True)
        self.read_losses()
        self.state.unlogged = {**self.loss_sums.pending(), **self.metrics.pending()}
        self.checkpoints.save(*self.contents(), step=self.state.step, keep=keep or True in self.pending_saves)
        self.pending_saves.clear()
        self.saved = self.state.step, self.state.evaluated

    def contents(self) -> tuple[dict[str, Tensor], dict]:
        """Return what a checkpoint of this moment holds: live tensors, and entries of its manifest."""
        parts = find_parts(self)
        tensors = parts.weights()
        facts = {"state": dataclasses.asdict(self.state), "config": self.config, "states": parts.states(tensors)}
        return tensors, {**facts, "fixed": self.checks.fixed, "about": runtime.describe(self.world)}

    def weights_fault(self) -> str:
        """Return why the weights are not worth keeping, "" if they are; the same on all ranks."""
        if "nan" in self.args.allow_change:
            return ""
        if self.state.bad_row >= self.state.step > 0:
            return f"none of the {self.state.step} steps had a finite gradient"
        odd = weights.not_finite(self.model, self.world)
        return f"the parameter {odd[0]} ({len(odd)} in all) is not finite" if odd else ""

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The model with the weights that are evaluated and kept while the block runs: override it for an average."""
        yield

    def whole_weights(self, wanted: bool) -> dict[str, Tensor]:
        """Return copies of what best/ and final/ hold, as `weights.gather` does. All ranks call this."""
        with self.evaluated_weights():
            kept, measured = self.checks.marks(states=False), vars(self).get("measured", {})
            if any(name.startswith("model.") and kept.get(name) != measured[name] for name in measured):
                log.warning("evaluate() measures other weights than are kept: let evaluated_weights() choose them")
            return weights.gather(model_tensors(self.model), wanted)

    def evaluate_best(self) -> dict[str, float]:
        """Return the metrics of the test split with the run's best weights. Raises UsageError if these do not fit."""
        file = self.folder / "best" / weights.FILE
        file.stat()  # an OSError and no usage error if the disk is gone
        tensors = [shards.local_part(tensor) for tensor in model_tensors(self.model).values()]
        kept = [tensor.to("cpu", copy=True) for tensor in tensors]
        try:
            weights.load_into(str(file), self.model, whole=True, world=self.world)
            self.is_loaded = True
            return self.evaluate("test")
        finally:
            self.is_loaded = False
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)

    def evaluate_test(self) -> dict[str, dict[str, float]]:
        """Return the metrics of the test split once the training is over: "test", and "test_best" if others."""
        self.checkpoints.finish()  # the state is safe, however long the evaluation takes
        if self.is_done() and (why := self.weights_fault()):
            raise RuntimeError(f"{why}: no final weights are written; {HINT}")
        if not (self.is_done() and "test" in self.loaders):
            return {}
        self.marks, best, found = self.checks.marks(), self.state.best, {}
        is_other = self.state.validated < self.state.step or self.checks.has_changed()
        if best and (is_other or best["evaluation"] < self.state.evaluations):
            found["test_best"] = self.evaluate_best()
        found["test"] = self.evaluate("test")
        metrics.check_same(found, self.world)
        return found

    def finish(self, figures: dict[str, dict[str, float]] | None) -> str:
        """Save for the last time, and write a finished run's weights. Returns "finished", "stopped", or "failed"."""
        finished = self.is_done() and figures is not None
        if finished:
            for split, values in {"train": metrics.means(self.metrics.reduce()), **(figures or {})}.items():
                self.logger.log_evaluation(self.state, split, values)
            self.checks.run()  # a subclass may have changed them since the last save
            final = self.whole_weights(self.world.is_writer)
            distributed.attempt(lambda: weights.write(self.folder / "final", final), self.world)
        self.save()
        self.checkpoints.close()
        outcome = {"state": "finished" if finished else "stopped", **dataclasses.asdict(self.stop.cause)}
        outcome |= {name: getattr(self.state, name) for name in ("epoch", "step", "samples", "evaluations", "best")}
        outcome |= {"test": {}, **(figures or {})}
        if finished and self.state.step < self.plan.total_steps:
            outcome["reason"] = "is_done() or total_steps of this trainer"
            if self.has_stalled():
                since = outcome["best"]["epoch"]
                outcome["reason"] = f"-stop_after {self.args.stop_after}: nothing better since epoch {since}"
        if self.world.is_writer:
            run_folder.write_outcome(self.folder, self.world, **outcome)
            if finished or self.stop.cause.reason == preemption.FILE_THERE:
                self.stop.file.unlink(missing_ok=True)  # it stops a run once
        self.logger.close(outcome)
        only_others = self.stop.cause.signal and self.stop.signalled_at is None  # torchrun goes on without their node
        return "failed" if only_others and distributed.is_elastic() and not finished else outcome["state"]
