"""Trains a model: the whole run on one page."""

import gc
import importlib
import sys

from lib import config, launch
from lib.launch import environment, local
from lib.utils.errors import EXIT_CODES, UsageError
from lib.utils.monitoring import startup


def main(argv: list[str] | None = None) -> int:
    """Reads the command line, starts the processes, returns the exit code: 0 finished, 75 stopped, 1 failed, 2 bad
    usage."""
    startup.begin()
    gc.disable()  # until all is imported: it would look through that again and again, a fifth of the time
    try:
        with local.leaving():
            environment.export(*config.early(argv))
            args = config.parse_args(argv)
        if args.check_resume:
            from scripts import check_resume

            return check_resume.check(args)
        return launch.launch(args, "train:run")
    except UsageError as error:
        return local.refused(error)
    finally:
        gc.unfreeze()
        gc.enable()


def run(args) -> int:
    """One process of the run: join the others, build the parts, fit."""
    from lib.core import loss, modes, parallel
    from lib.core import optimizer as optimizers
    from lib.utils import distributed, runtime, seeding
    from lib.utils.checkpoint import resume, run_folder, state
    from lib.utils.data import loader

    importlib.import_module("torch._dynamo")  # as every optimizer does
    gc.freeze()  # nothing of it is garbage
    gc.enable()
    startup.report("imports")
    seeding.for_building(args.seed)
    splits = loader.splits(plugin("dataset", args.dataset).get_dataset(args), args.dataset, args.overfit)
    arch = plugin("arch", args.arch)
    startup.report("data")
    with distributed.joined(args) as world:
        startup.report("processes")
        runtime.kernels(world, args.deterministic)
        model = parallel.build(arch, args, world)
        before = resume.remembered(args, world)
        plan = resume.plan(args, len(splits["train"]), world, before)
        resume.check_start(args, plan, before, model, splits)
        criterion = loss.get_loss(args)
        model = parallel.wrap(model, args, world, arch=arch)
        optimizer = optimizers.get_optimizer(model, args, plan.batch)
        startup.report("model")
        hold = run_folder.left_alone if modes.asked(args) else run_folder.claimed
        with hold(args, world) as folder, loader.opened(splits, plan, world, args) as loaders:
            parts = (args, world, loaders, model, criterion, optimizer)
            trainer = plugin("trainer", args.trainer).Trainer(*parts)
            state.warn_of_lost(trainer)
            if modes.asked(args):
                return EXIT_CODES[modes.look(trainer)]
            text = config.to_yaml(args, runtime.about(world), batch_size=plan.batch, micro_batch=plan.micro)
            run_folder.write_config(folder, world, text)
            return EXIT_CODES[trainer.fit()]


def plugin(kind: str, name: str):
    """The module lib/KIND/NAME.py."""
    return importlib.import_module(f"lib.{kind}.{name}")


if __name__ == "__main__":
    sys.exit(main())
