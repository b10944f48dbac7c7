"""One process of a run: joins the others, finds the run's past, cuts the data into steps, and opens what it writes."""

import contextlib
import gc
import logging
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lib.config import Args, to_yaml
from lib.core import parallel
from lib.utils import distributed, runtime, seeding, watchdog
from lib.utils.checkpoint import resume, run_folder, weights
from lib.utils.data import fetch, fingerprint, loader
from lib.utils.errors import load_optional
from lib.utils.monitoring import console
from lib.utils.monitoring.logger import Logger, NoLogger

log = logging.getLogger(__name__)


class Run:
    """What this process knows of its run before the training."""

    def __init__(self, args: Args, dataset: Any, stack: contextlib.ExitStack):
        """Find out what the run is. Nothing is written by then. Raises UsageError if it cannot be what the flags say."""
        self.args, self.stack, self.mirror = args, stack, None
        self.splits, self.skipped = loader.splits(dataset, args.dataset, args.overfit), {}
        watchdog.begin(distributed.rendezvous())
        world = stack.enter_context(distributed.join(args))
        runtime.configure_kernels(world, bool(args.deterministic))
        if args.mirror and not (args.eval or args.debug):
            self.mirror = load_optional("scripts.mirror", "-mirror").Mirror(args, world, stack)
        watchdog.begin(f"opening the run's folder in {args.out}, and its checkpoints")
        lock = run_folder.acquire(args, world, distributed.job_id())
        self.folder = None if args.eval or args.debug else stack.enter_context(lock)
        self.world = self.folder.world if self.folder else world
        if self.mirror:  # the newest checkpoint may be there alone
            self.mirror.fetch(self.world)
        start = resume.read_start(args, self.world)
        self.past = resume.find(args, self.world, start)
        if args.skip_bad_files:
            check_data = load_optional("scripts.check_data", "-skip_bad_files")
            self.splits, self.skipped = check_data.skip(self.splits, args, self.world, self.past)
        before, train = self.past.manifest["config"] if self.past else start, self.splits["train"]
        if args.balance or (args.shuffle and fetch.lists(train, "weights", "lengths")):
            load_optional("scripts.sampling", "-balance").add_sampler(train, args)
        watchdog.begin(f"reading a few samples of -dataset {args.dataset}, to know its data again")
        self.plan = resume.plan(args, fingerprint.describe(self.splits, args, self.world), self.world, before)
        if set_batch_size := getattr(fetch.option(train, "sampler"), "set_batch_size", None):
            set_batch_size(self.plan.batch)
        runtime.choose_threads(args, self.world, saved=before.get("threads"))
        self.changes = resume.check_flags(args, self.plan, self.past, before, self.splits)
        self.loaded = ""  # what -weights filled

    def build(self, arch: ModuleType) -> nn.Module:
        """Return the model: built, filled by -weights at a run's first start, on its device, in DDP or FSDP2."""
        args, world = self.args, self.world
        watchdog.begin(f"building -arch {args.arch}, and the parts of its training")
        model = parallel.build(arch, args)
        if args.weights and self.past is None and not args.eval:
            self.loaded = weights.load_into(args.weights, model, imagenet=lambda: arch.get_weights(args), world=world)
        return parallel.wrap(model, args, world, self.plan.engine, arch=arch)

    def prepare(self, loss: nn.Module) -> nn.Module:
        """Return the loss on the device, with its weights if they follow from the data."""
        if self.args.class_weights == "balanced":
            load_optional("scripts.sampling", "-class_weights").balance_loss(loss, self.splits["train"], self.args)
        return loss.to(self.world.device)

    def begin(self) -> tuple[dict[str, loader.Loader], Logger | NoLogger]:
        """Write config.yaml and start.json, and open the logs and the loaders. Nothing was written before."""
        args, world, folder = self.args, self.world, self.folder
        gc.freeze()  # all that the start has made: the collector skips it
        self.stack.callback(gc.unfreeze)  # else libraries complain of it when the process ends
        gc.enable()
        if folder:
            about = {**runtime.describe(world), "classes": self.plan.data["classes"], **self.skipped}
            start = resume.config_to_save(args, self.plan)
            if self.past and self.past.folder.parent != folder.path / "checkpoints":
                start["resume"] = str(self.past.folder.absolute())
            folder.begin(to_yaml(args, about, {name: start[name] for name in resume.SETTLED}), start)
        console.setup_logging(folder and folder.path, world.rank)
        log.info("threads:     %d", torch.get_num_threads())
        if self.mirror:
            self.mirror.start()
        if self.loaded:
            log.log(logging.WARNING if weights.FEW in self.loaded else logging.INFO, "-weights:    %s", self.loaded)
        for name in [name for name, value in self.plan.data.items() if value == fingerprint.NEVER_THE_SAME]:
            split = name.removesuffix(" digest")
            log.warning("what %s gives differs each time it is read: no resume is exact (own generators?)", split)
        if args.lr_warmup * self.plan.steps >= self.plan.total_steps:
            log.warning("-lr_warmup %g (epochs) is as long as the run: the learning rate never falls", args.lr_warmup)
        if self.changes:
            log.warning("changed since the run began: %s", self.changes)
        loaders = loader.open_loaders(self.splits, self.plan, world, args, self.stack)
        state = resume.restore_state(self.past, self.plan)
        logger = Logger(folder.path, world, args, self.plan, state) if folder and world.is_writer else NoLogger()
        self.stack.callback(logger.close)
        seeding.seed(seeding.TRAINER, args.seed)
        return loaders, logger
