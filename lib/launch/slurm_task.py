"""A task of a Slurm job: joins the others, and runs. requeue.py decides whether an interrupted job is requeued.

It starts without torch, so that signals are handled from the first moment.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

from lib.config import Args
from lib.launch import environment, local, requeue
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED, STOP_SIGNALS, STOPPED, UsageError

PICKLE = "submitted.pkl"  # in the folder of the job's code: args, target and working folder of each start


def main(command: str, *arguments: str) -> int:
    """Run `task`, a process of a submitted job, or `after HISTORY CODE`, the end of a job."""
    if command == "after":
        return requeue.finish_job(Path(arguments[0]), int(arguments[1]))
    try:
        code = task()
    except UsageError as error:
        return local.report_usage_error(error)
    return FINISHED if code == STOPPED else code  # so that the job's shell continues


def task() -> int:
    """Run a process of a submitted job. Returns the exit code."""
    args, target, where = pickle.loads(Path(PICKLE).read_bytes())
    os.chdir(where)
    signals.set_handlers(lambda *_: None)  # they end nothing; `requeue.finish_job` asks Slurm for their reason
    if is_training(args):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the training handles them
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is to be saved
    os.environ[requeue.HISTORY] = str(record_start(args))
    return run_task(args, target)


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
    """Run as a task of a job step, submitted or under srun. Returns the exit code.

    Only rank 0 exits with 75 for a stopped run: srun kills the other tasks when one does.
    """
    environ = os.environ
    place = {"RANK": int(environ["SLURM_PROCID"]), "WORLD_SIZE": int(environ["SLURM_STEP_NUM_TASKS"])}
    place |= {"LOCAL_RANK": int(environ["SLURM_LOCALID"]), "LOCAL_WORLD_SIZE": len(environ["SLURM_GTIDS"].split(","))}
    environment.export(args)
    run_id = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    environ.update(environment.rank_variables(place, run_id, rendezvous_address()))
    code = local.call_target(target, args)
    return FINISHED if code == STOPPED and place["RANK"] else code


def rendezvous_address() -> tuple[str, int]:
    """Return host and port of the rendezvous store, which torch opens in rank 0.

    The port follows from the ids of the job, the step and the start, so that jobs on one node have different ones.
    """
    from submitit.slurm.slurm import SlurmJobEnvironment

    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    start = job + 97 * step + 997 * requeue.restart_count()
    port = 10_000 + start % 20_000  # below those that the system hands out
    os.environ["SLURM_JOB_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]  # Submitit's; the job may have more
    names = SlurmJobEnvironment().hostnames
    return environment.infiniband_name(names[0]) if len(names) > 1 else "127.0.0.1", port


if __name__ == "__main__":
    local.run_program(lambda: main(*sys.argv[1:]))
