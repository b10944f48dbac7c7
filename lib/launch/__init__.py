"""Starts the processes of a run here, or submits them to Slurm; under torchrun they run already.

Only this folder writes the environment: launchers set torchrun's variables and call `train` in train.py, which reads
them. So one worker serves every launcher.
"""

import os
import sys

from lib.config import Args, plugins
from lib.launch import environment, local
from lib.utils.errors import FINISHED, STOPPED, UsageError, load_optional, suggest


def prepare(args: Args) -> None:
    """Say what starts, set what torch reads when it is imported, and import the plugins. Raises UsageError."""
    if args.ngrok:
        load_optional("scripts.tensorboard_server", "-ngrok").check_password()
    if args.restarts and (is_launched() or args.slurm):
        raise UsageError("-restarts is for one machine: scripts/elastic.sh restarts under torchrun; Slurm requeues")
    if sys.stderr.isatty() and not is_launched():
        print(f"starting:    {args.model} (-dataset {args.dataset} -arch {args.arch})", file=sys.stderr, flush=True)
    environment.export(args)
    environment.choose_gpus(args)  # before a plugin asks for CUDA
    import torch

    from lib.core import loss as losses
    from lib.core import optimizer
    from lib.utils import watchdog

    torch.set_num_threads(1)  # or what plugins compute leaves threads, which forked processes would wait for
    with watchdog.watch(args.hang_minutes):
        plugins.load_chosen(args)
    there = getattr(losses, "BY_NAME", [args.loss])  # a loss.py of your own may have no table
    if args.loss not in there:
        raise UsageError(f"-loss {args.loss}: there are {', '.join(there)}{suggest(args.loss, there)}")
    optimizer.find_class(args.optimizer)
    optimizer.read_options(args.optimizer_arg)


def is_launched() -> bool:
    """Whether torchrun, srun or a launcher of ours started this process as one of a run's."""
    own = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_JOB_ID", "SLURM_STEP_ID"}
    return environment.has_rank() or (own <= os.environ.keys() and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1)


def call(args: Args, target: str) -> int:
    """Run `target` ("module:function", called with args) in this process of a run. Returns the exit code."""
    if not environment.has_rank():
        return load_optional("lib.launch.slurm", "srun").run_task(args, target)  # which imports this file
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # neither torchrun nor one of ours
        place = "RANK and WORLD_SIZE make this rank {RANK} of {WORLD_SIZE}".format(**os.environ)
        print(f"train.py: {place}: unset RANK if no launcher set it", file=sys.stderr, flush=True)
    code = local.call_target(target, args)
    # torchrun restarts whatever does not exit with 0; outcome.json says whether the run is stopped or finished.
    return FINISHED if code == STOPPED and "TORCHELASTIC_MAX_RESTARTS" in os.environ else code
