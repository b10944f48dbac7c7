"""Starts the processes of a run: machinery, you need not read it.

    __init__.py     which launcher a command line asks for
    local.py        processes on this machine: started, watched, ended
    multinode.py    -nnodes by hand: the machines meet, and stay in touch
    environment.py  torchrun's variables, caches, debug switches
    slurm.py        submits a job with Submitit
    slurm_task.py   a process of a Slurm job
    requeue.py      whether an interrupted Slurm job is requeued

Only this folder writes the environment: launchers write torchrun's variables and call `run` in train.py, which reads
them. So one worker serves every launcher.
"""

import contextlib
import os
import re

from lib.launch import environment, local
from lib.utils.errors import FINISHED, STOPPED, UsageError


def launch(args, target: str) -> int:
    """Runs `target` ("module:function", called with args) in as many processes as args ask for, to an exit code.

    Raises UsageError where the devices are not there, and with one process whatever the run raises.
    """
    from lib.launch import slurm_task  # `python -m lib.launch.slurm_task` imports this file first

    if args.ngrok and not re.fullmatch(r"[^\s:$]{12,128}", os.environ.get("NGROK_PASSWORD", "")):
        raise UsageError("-ngrok opens no tunnel without a password: set NGROK_PASSWORD to 12 to 128 characters, "
                         "without $, colon or space")  # fmt: skip
    if args.nnodes > 1 and (launched() or slurm_task.is_task()):
        raise UsageError(f"-nnodes {args.nnodes} under torchrun or srun: they start the processes of all machines")
    if launched():
        with environment.exported(local.narrowed(args.gpus)):
            code = local.call(target, args)
        # torchrun restarts whatever does not exit 0; outcome.json says whether the run is stopped or finished.
        return FINISHED if code == STOPPED and "TORCHELASTIC_MAX_RESTARTS" in os.environ else code
    if slurm_task.is_task():
        with environment.exported(local.narrowed(args.gpus)):
            return slurm_task.step(args, target)
    if args.slurm or args.slurm_dry:
        from lib.launch import slurm

        return slurm.submit(args, target)
    with contextlib.nullcontext() if args.debug else local.leaving():  # at a breakpoint, Ctrl-C is the debugger's
        return local.start(args, target)


def launched() -> bool:
    """Whether this is a process of a run already: torchrun's, or a child of ours. A RANK that leaked from elsewhere,
    without a WORLD_SIZE that it fits, makes it none."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return rank.isdecimal() and size.isdecimal() and int(rank) < int(size)
