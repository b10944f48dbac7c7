"""Trains a model: the whole run on one page."""

import contextlib
import gc
import importlib
import logging

from lib import config, launch
from lib.config import plugins
from lib.launch import local
from lib.utils import signals
from lib.utils.errors import EXIT_CODES, UsageError
from lib.utils.monitoring import startup

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Read the command line, start the processes, and return the exit code.

    Returns:
        0 finished, 75 stopped, 1 failed, 2 bad usage.
    """
    try:
        with signals.exit_on_signal():
            args = config.parse_args(argv)
            launch.prepare(args)
        for name in ("check_resume", "check_data"):
            if getattr(args, name):
                return importlib.import_module(f"scripts.{name}").check(args)
        return launch.launch(args, "train:run")
    except UsageError as error:
        return local.report_usage_error(error)
    finally:
        gc.unfreeze()  # what `run` has frozen: libraries complain of it when the process ends


def run(args: config.Args) -> int:
    """Be one process of the run: join the others, find the past, build the parts, train."""
    from lib.core import loss, modes, optimizer, parallel
    from lib.utils import distributed, runtime, seeding, watchdog
    from lib.utils.checkpoint import resume, run_folder, weights
    from lib.utils.data import fingerprint, loader
    from lib.utils.monitoring import console
    from lib.utils.monitoring.logger import Logger, NoLogger
    from scripts import check_data

    mode = "eval" if args.eval else "debug" if args.debug else "train"
    with watchdog.watch(args.hang_minutes), contextlib.ExitStack() as stack:
        seeding.seed(seeding.MODEL, args.seed)
        dataset, arch, trainers = (plugins.load(kind, getattr(args, kind)) for kind in config.BUILDERS)
        watchdog.begin(f"get_dataset of -dataset {args.dataset}")
        splits = loader.splits(dataset.get_dataset(args), args.dataset, args.overfit)
        watchdog.begin(distributed.rendezvous())
        world = stack.enter_context(distributed.join(args))
        runtime.configure_kernels(world, bool(args.deterministic))
        watchdog.begin(f"opening the run's folder in {args.out}, and its checkpoints")
        mine = run_folder.acquire(args, world, distributed.job_id())
        folder = stack.enter_context(mine) if mode == "train" else None
        world = folder.world if folder else world

        start = resume.read_start(args, world)
        past = resume.find(args, world, start)
        splits, skipped = check_data.skip(splits, args, world, past)
        before = past.manifest["config"] if past else start
        plan = resume.plan(args, fingerprint.describe(splits, args, world), world, before)
        threads = runtime.choose_threads(args, world, saved=before.get("threads"))
        changes = resume.check_flags(args, plan, past, before, splits)

        watchdog.begin(f"building -arch {args.arch}, and the parts of its training")
        model = parallel.build(arch, args, world)
        loaded = (
            weights.load_into(args.weights, model, imagenet=lambda: arch.get_weights(args), world=world)
            if args.weights and past is None and mode != "eval"
            else ""
        )
        criterion = loss.get_loss(args).to(world.device)
        model = parallel.wrap(model, args, world, plan.engine, arch=arch)

        gc.freeze()  # all that the start has made: the collector skips it
        gc.enable()
        if folder:
            about = {**runtime.describe(world), "classes": plan.data["classes"], **skipped}
            folder.begin(
                config.to_yaml(args, about, resume.effective_flags(plan)), resume.start_facts(args, plan, past)
            )
        console.setup_logging(folder and folder.path, world.rank)
        log.info("threads:     %d", threads)
        if loaded:
            log.info("-weights:    %s", loaded)
        if changes:
            log.warning("changed since the run began: %s", changes)
        loaders = stack.enter_context(loader.open_loaders(splits, plan, world, args))
        step, end = resume.restore_state(past, plan).step, args.epochs * plan.steps
        logger = Logger(folder.path, world, args, step, end) if folder and world.is_writer else NoLogger()
        stack.callback(logger.close)
        seeding.seed(seeding.TRAINER, args.seed)
        trainer = trainers.Trainer(
            args, world, loaders, model, criterion, optimizer.get_optimizer(model, criterion, args), logger
        )
        return EXIT_CODES[modes.RUN[mode](trainer, past)]


if __name__ == "__main__":
    startup.run_program(main)
