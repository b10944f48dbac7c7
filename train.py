"""Trains a model: the whole run on one page."""

import contextlib
import faulthandler

from lib import config, launch
from lib.config import plugins
from lib.launch import local
from lib.utils import signals
from lib.utils.errors import EXIT_CODES, UsageError, load_optional, run_program


def main(argv: list[str] | None = None) -> int:
    """Read the command line and start the processes. Returns 0 (finished), 75 (stopped), 1 (failed) or 2 (usage)."""
    try:
        with signals.exit_on_signal():
            faulthandler.dump_traceback_later(30, repeat=True, file=2)  # a plugin may wait for a disk
            args = config.parse_args(argv)
            faulthandler.cancel_dump_traceback_later()
            launch.prepare(args)
        for script in ("check_resume", "check_data"):
            if getattr(args, script):
                return load_optional(f"scripts.{script}", f"-{script}").check(args)
        if launch.is_launched():  # by torchrun, srun, or one of the two below
            return launch.call(args, "train:train")
        if args.slurm or args.slurm_dry:
            return load_optional("lib.launch.slurm", "-slurm").submit(args, "train:train")
        return local.start(args, "train:train")
    except UsageError as error:
        return local.report_usage_error(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def train(args: config.Args) -> int:
    """Be one process of the run: build its parts and train. Returns the exit code."""
    from lib.core import loss as losses
    from lib.core import optimizer
    from lib.run import Run
    from lib.utils import seeding, watchdog

    with watchdog.watch(args.hang_minutes), contextlib.ExitStack() as stack:
        dataset, arch, trainers = plugins.load_chosen(args)
        if args.step_times or args.peak_tflops:
            trainers = load_optional("scripts.step_times", "-step_times").Timed(trainers)
        watchdog.begin(f"get_dataset of -dataset {args.dataset}")
        seeding.seed(seeding.MODEL, args.seed)  # a dataset may draw while it is built
        data = dataset.get_dataset(args)
        run = Run(args, data, stack)  # who this process is, the run's folder, its past, how its steps are cut
        model = run.build(arch)  # on its device, in DistributedDataParallel or FSDP2
        loss = run.prepare(losses.get_loss(args))
        optimizers = optimizer.get_optimizers(model, loss, args)
        loaders, logger = run.begin()  # nothing was written before
        trainer = trainers.Trainer(args, run.world, loaders, model, loss, optimizers, logger)
        if args.eval:
            return EXIT_CODES[load_optional("scripts.evaluation", "-eval").evaluate(trainer)]
        if args.debug:
            return EXIT_CODES[load_optional("scripts.debug", "-debug").debug(trainer, run.past)]
        return EXIT_CODES[trainer.fit(run.past)]


if __name__ == "__main__":
    run_program(main)
