"""Submits the run to Slurm: one task per GPU, or with -cpu N, N tasks per node. The job then runs slurm_task.py.

The batch script is written here, in 20 lines: Submitit's public API shows none (-slurm_dry), passes no exit code on,
and requeues by rules of its own.
"""

import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from lib.config import ROOT, Args
from lib.launch import slurm_task
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED, UsageError

# Set by an allocation or a launcher around this process, or secret: the job must not inherit them.
NOT_INHERITED = ("SLURM", "SRUN_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "NGROK_AUTHTOKEN")


def submit(args: Args, target: str) -> int:
    """Submit the run and print the job's number and log. Returns the exit code.

    Raises:
        UsageError: there is no sbatch, it refuses the job, or the job's files cannot be written.
    """
    if args.gpus:
        raise UsageError(f"-gpus {args.gpus} with -slurm: Slurm says which GPUs; -slurm_ngpus says how many a node")
    folder, has_sbatch = slurm_task.job_folder(args), bool(shutil.which("sbatch"))
    if args.slurm_dry:
        script = batch_script(args, folder, ROOT)
        print(script, flush=True)
        print(sbatch(script, "--test-only").stderr.strip() if has_sbatch else "no sbatch here: not tested")
        return FINISHED
    if not has_sbatch:
        raise UsageError("-slurm: there is no sbatch on this machine: start on a login node, or without -slurm")
    code = folder / f"code_{uuid.uuid4().hex}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_folder.check_owner(folder)  # the pickle in it runs as code
        for part in ("lib", "scripts"):  # they may change while the job waits; other modules are imported from ROOT
            shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "train.py", code)
        (code / slurm_task.PICKLE).write_bytes(pickle.dumps((args, target, str(Path.cwd()))))
    except OSError as error:
        raise UsageError(f"-slurm_dir {folder}: the job's files cannot be written ({error})") from None
    job = re.findall(r"job (\d+)", sbatch(batch_script(args, folder, code)).stdout)[0]
    print(f"submitted:   job {job}")
    print(f"log:         {folder}/{job}_0_log.out")
    print(f"cancel:      scancel {job}", flush=True)
    return FINISHED


def sbatch(script: str, *options: str) -> subprocess.CompletedProcess:
    """Give the script to sbatch. Raises UsageError with sbatch's own message if it refuses."""
    prefixes = (*NOT_INHERITED, "SBATCH_") if "SLURM_JOB_ID" in os.environ else NOT_INHERITED
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(prefixes)}
    answer = subprocess.run(["sbatch", *options], input=script, env=env, capture_output=True, text=True)
    if answer.returncode:
        raise UsageError(f"-slurm: sbatch refused the job: {' '.join(answer.stderr.split())}")
    return answer


def batch_script(args: Args, folder: Path, code: Path) -> str:
    """Return the batch script: what the job asks for, and what its shell does before, with and after the tasks."""
    cpus = args.slurm_cpus or (8 if args.workers is None else args.workers) + 2
    options = {
        "job-name": args.model,
        "output": f"{folder}/%j_0_log.out",
        "open-mode": "append",
        "chdir": code,
        "nodes": args.slurm_nnodes,
        "nodelist": args.slurm_nodelist,
        "ntasks-per-node": args.cpu or args.slurm_ngpus,
        "cpus-per-task": cpus,
        "gpus-per-node": None if args.cpu else args.slurm_ngpus,
        "time": args.slurm_timeout,
        "partition": args.slurm_partition,
        "signal": f"USR2@{args.slurm_signal_s}",
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None] + ["requeue", *args.slurm_arg]
    python = f"{shlex.quote(sys.executable)} -u -m lib.launch.slurm_task"
    logs = shlex.quote(f"{folder}/%j_%t_log.out")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(f'--{option}')}" for option in given),
        "trap : TERM  # this shell must outlive the signal that stops its tasks",
        f"export PYTHONPATH={shlex.quote(f'{code}:{ROOT}')}${{PYTHONPATH:+:$PYTHONPATH}}",
        # srun does not inherit --cpus-per-task since Slurm 22.05.
        f"srun --unbuffered --kill-on-bad-exit=1 --cpus-per-task={cpus} --output={logs} {python} task",
        f"exec {python} after {shlex.quote(str(folder))}/$SLURM_JOB_ID.json $?",
    ]
    return "\n".join(lines) + "\n"
