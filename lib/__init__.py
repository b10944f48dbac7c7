"""The map of lib.

You edit these; a new file is a new choice on the command line:
    arch/      your models: get_model(args)
    dataset/   your data: get_dataset(args)
    trainer/   your way of training: class Trainer
You read these, and sometimes change them:
    core/      loss, optimizer, learning-rate schedule, DDP and FSDP, BatchNorm's statistics, -debug and -eval
You call this in a notebook:
    predict.py predict.load("out/NAME"): a run's predictions for new images or texts
You need not read these:
    config/    the command line and -cfg files
    launch/    starts the processes: here, under torchrun, by Slurm
    utils/     sampling, checkpoints, logs, stopping

To follow a run from its start to its end, read in this order: train.py, config/args.py, launch/__init__.py,
launch/local.py, utils/distributed.py, utils/data/plan.py and loader.py, core/, trainer/trainer.py,
utils/preemption.py, utils/checkpoint/manager.py.

Who may import whom is a contract in pyproject.toml (import-linter): train, launch, config, trainer, core, utils, each
only what comes after it.
"""
