"""Starts the processes of a run here, or submits them to Slurm; under torchrun they run already.

Only this folder writes the environment: launchers set torchrun's variables and call `run` in train.py, which reads
them. So one worker serves every launcher.
"""

import os
import sys

from lib.config import BUILDERS, Args, plugins
from lib.launch import environment, local
from lib.utils import signals
from lib.utils.errors import FINISHED, STOPPED
from lib.utils.monitoring import tensorboard_server


def prepare(args: Args) -> None:
    """Say what starts, set what torch reads when it is imported, and import the plugins. Raises UsageError."""
    environment.check_variables()
    if sys.stderr.isatty() and not is_launched():
        print(f"starting:    {args.model} (-dataset {args.dataset} -arch {args.arch})", file=sys.stderr, flush=True)
    environment.export(args)
    environment.choose_gpus(args)  # before a plugin asks for CUDA
    import torch

    torch.set_num_threads(1)  # or what plugins compute leaves threads, which forked processes would wait for
    for kind in BUILDERS:
        plugins.load(kind, getattr(args, kind))


def launch(args: Args, target: str) -> int:
    """Run `target` ("module:function", called with args) in as many processes as args ask for. Returns the exit code.

    Raises UsageError, and in a run of one process whatever it fails with.
    """
    from lib.launch import slurm, slurm_task  # `python -m lib.launch.slurm_task` imports this file first

    tensorboard_server.check_password(args.ngrok)
    if is_launched() and "TORCHELASTIC_RUN_ID" not in os.environ:  # neither torchrun nor one of ours
        place = "RANK and WORLD_SIZE make this rank {RANK} of {WORLD_SIZE}".format(**os.environ)
        print(f"train.py: {place}: unset RANK if no launcher set it", file=sys.stderr, flush=True)
    if is_launched() or slurm_task.is_task():
        code = local.call_target(target, args) if is_launched() else slurm_task.run_task(args, target)
        # torchrun restarts whatever does not exit with 0; outcome.json says whether the run is stopped or finished.
        return FINISHED if code == STOPPED and "TORCHELASTIC_MAX_RESTARTS" in os.environ else code
    if args.slurm or args.slurm_dry:
        return slurm.submit(args, target)
    if args.debug:  # at a breakpoint, Ctrl-C is the debugger's
        return local.start(args, target)
    with signals.exit_on_signal():
        return local.start(args, target)


def is_launched() -> bool:
    """Whether torchrun or a launcher of ours started this process; a RANK may have leaked from elsewhere."""
    return "RANK" in os.environ and int(os.environ["RANK"]) < int(os.environ.get("WORLD_SIZE", 0))
