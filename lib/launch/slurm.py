"""A run as a Slurm job: one task per GPU, or with -cpu N, N tasks per node. scripts/slurm/requeue.py ends it.

The batch script is written here, in 20 lines: Submitit's public API shows none (-slurm_dry), passes no exit code on,
and requeues by rules of its own. A task starts without torch, so that signals are handled from the first moment.
"""

import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from lib.config import ROOT, Args
from lib.launch import environment, local
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED, STOP_SIGNALS, STOPPED, UsageError, call_optional, run_program
from scripts import infiniband
from scripts.slurm import requeue

# Set by an allocation or a launcher around this process, or secret: the job must not inherit them.
NOT_INHERITED = ("SLURM", "SRUN_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "NGROK_AUTHTOKEN")
PICKLE = "submitted.pkl"  # in the folder of the job's code: args, target and working folder of each start


def submit(args: Args, target: str) -> int:
    """Submit the run; print the job's number and log. Returns the exit code. Raises UsageError if this fails."""
    if args.gpus:
        raise UsageError(f"-gpus {args.gpus} with -slurm: Slurm says which GPUs; -slurm_ngpus says how many a node")
    folder, has_sbatch = job_folder(args), bool(shutil.which("sbatch"))
    code = folder / f"code_{uuid.uuid4().hex}"
    script = batch_script(args, folder, code)
    if args.slurm_dry:
        print(script, flush=True)
        print(sbatch(script, "--test-only").stderr.strip() if has_sbatch else "no sbatch here: not tested")
        return FINISHED
    if not has_sbatch:
        raise UsageError("-slurm: there is no sbatch on this machine: start on a login node, or without -slurm")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_folder.check_owner(folder)  # the pickle in it runs as code
        for part in ("lib", "scripts"):  # they may change while the job waits; other modules are imported from ROOT
            shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "train.py", code)
        (code / PICKLE).write_bytes(pickle.dumps((args, target, str(Path.cwd()))))
    except OSError as error:
        raise UsageError(f"-slurm_dir {folder}: the job's files cannot be written ({error})") from None
    job = re.findall(r"job (\d+)", sbatch(script).stdout)[0]
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
    call_optional("scripts.check_flags", "check_slurm", args)
    python = f"{shlex.quote(sys.executable)} -u -m"
    # srun inherits no --cpus-per-task (Slurm 22.05). If a task is lost, the others may save their last step.
    srun = f"srun --unbuffered --cpus-per-task={cpus} --wait={int(args.grace_s) + 1}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(f'--{option}')}" for option in given),
        "trap : TERM USR1 USR2  # this shell must outlive the signal that stops its tasks",
        f"export PYTHONPATH={shlex.quote(f'{code}:{ROOT}')}${{PYTHONPATH:+:$PYTHONPATH}}",
        f"{srun} --output={shlex.quote(f'{folder}/%j_%t_log.out')} {python} lib.launch.slurm",
        f"exec {python} scripts.slurm.requeue {shlex.quote(str(folder))}/$SLURM_JOB_ID.json $?",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Be a process of a submitted job. Returns the exit code."""
    args, target, where = pickle.loads(Path(PICKLE).read_bytes())
    os.chdir(where)
    signals.set_handlers(lambda *_: None)  # they end nothing; `requeue.finish_job` asks Slurm for their reason
    if is_training(args):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the training handles them
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is to be saved
    os.environ[requeue.HISTORY] = str(record_start(args))
    try:
        code = run_task(args, target)
    except UsageError as error:
        return local.report_usage_error(error)
    return FINISHED if code == STOPPED else code  # so that the job's shell continues


def record_start(args: Args) -> Path:
    """Record a start of this job on its first process, if it trains. Returns the path of the job's history."""
    history = job_folder(args) / f"{os.environ['SLURM_JOB_ID']}.json"
    if is_training(args) and os.environ.get("SLURM_PROCID", "0") == "0":
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        requeue.record_start(history, run_folder.path_of(args))
    return history


def is_training(args: Args) -> bool:
    """Whether a start trains, and so writes an outcome."""
    return not (args.eval or args.debug or args.check_resume)


def job_folder(args: Args) -> Path:
    """Return the folder of the job's files: -slurm_dir, or slurm/ in the run's folder."""
    return Path(args.slurm_dir).resolve() if args.slurm_dir else run_folder.path_of(args).resolve() / "slurm"


def run_task(args: Args, target: str) -> int:
    """Run as a task of a job step, submitted or under srun. Returns the exit code."""
    environ = os.environ
    place = {"RANK": int(environ["SLURM_PROCID"]), "WORLD_SIZE": int(environ["SLURM_STEP_NUM_TASKS"])}
    place |= {"LOCAL_RANK": int(environ["SLURM_LOCALID"]), "LOCAL_WORLD_SIZE": len(environ["SLURM_GTIDS"].split(","))}
    environment.export(args)
    run_id = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    environ.update({**infiniband.interface(), **environment.rank_variables(place, run_id, rendezvous_address())})
    code = local.call_target(target, args)
    return FINISHED if code == STOPPED and place["RANK"] else code  # srun would kill the tasks that still run


def rendezvous_address() -> tuple[str, int]:
    """Return host and port of the rendezvous store, which torch opens in rank 0; jobs on one node have others."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    port = 10_000 + (job + 97 * step + 997 * requeue.restart_count()) % 20_000  # below those of the system's choice
    os.environ["SLURM_JOB_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]  # Submitit's; the job may have more
    names = SlurmJobEnvironment().hostnames
    return infiniband.name_of(names[0]) if len(names) > 1 else "127.0.0.1", port


if __name__ == "__main__":
    run_program(requeue.recorded(main))
