"""A task of a Slurm job: joins the others, and runs. requeue.py decides whether an interrupted job is requeued.

It starts without torch, so that signals are handled from the first moment.
"""

import os
import pickle
import signal
import socket
import sys
from pathlib import Path

from lib.config import Args
from lib.launch import environment, local, requeue
from lib.utils import signals
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED, STOP_SIGNALS, STOPPED, UsageError
from lib.utils.monitoring import startup

PICKLE = "submitted.pkl"  # in the folder of the job's code: args, target and working folder of each start
PORTS = range(10_000, 30_000)  # below those that the system hands out


def main(command: str, *arguments: str) -> int:
    """Run `task`, a process of a submitted job, or `after HISTORY CODE`, the end of a job."""
    if command == "task":
        return task()
    history, code = arguments
    return requeue.finish_job(Path(history), int(code))


def task() -> int:
    """Run a process of a submitted job. A stopped run exits with 0, so that the job's shell continues.

    Signals wait until the training handles them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    args, target, where = pickle.loads(Path(PICKLE).read_bytes())
    os.chdir(where)
    signals.set_handlers(lambda *_: None)  # they end nothing; `requeue.finish_job` asks Slurm for their reason
    if not is_training(args):  # nothing is to be saved
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ[requeue.HISTORY] = str(history_file(args))
    if os.environ["SLURM_PROCID"] == "0":
        record_start(args)
    code = run_task(args, target)
    return FINISHED if code == STOPPED else code


def record_start(args: Args) -> Path:
    """Record a start of this job, if it trains. Returns the path of the job's history."""
    history = history_file(args)
    history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_training(args):
        requeue.record_start(history, run_folder.path_of(args))
    return history


def is_training(args: Args) -> bool:
    """Whether a start trains, and so writes an outcome."""
    return not (args.eval or args.debug or args.check_resume)


def history_file(args: Args) -> Path:
    """Return the path of this job's history."""
    return job_folder(args) / f"{os.environ['SLURM_JOB_ID']}.json"


def job_folder(args: Args) -> Path:
    """Return the folder of the job's files: -slurm_dir, or slurm/ in the run's folder."""
    return Path(args.slurm_dir).resolve() if args.slurm_dir else run_folder.path_of(args).resolve() / "slurm"


def run_task(args: Args, target: str) -> int:
    """Run as a task of a job step, submitted or under srun. Returns the exit code.

    Only rank 0 exits with 75 for a stopped run: srun kills the other tasks when one does.
    """
    environ = os.environ
    environment.check_variables(environment.TASK)
    rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
    environment.export(args.cache_dir, args.debug_dist)
    try:
        host, port = rendezvous_address()
        store = None
        if rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            store = local.open_store(socket.create_server((host, port), family=family, backlog=1024), size)
        place = {"RANK": rank, "LOCAL_RANK": int(environ["SLURM_LOCALID"]), "WORLD_SIZE": size}
        place["LOCAL_WORLD_SIZE"] = len(environ["SLURM_GTIDS"].split(","))
        run_id = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
        environ.update(environment.rank_variables(place, run_id, (host, port)))
        code = local.call_target(target, args)
    except UsageError as error:
        return local.report_usage_error(error)
    del store  # the others need it until here
    return FINISHED if code == STOPPED and rank else code


def is_task() -> bool:
    """Whether srun started this process as one of several; in the shell of `srun --pty`, python did not."""
    typed = os.isatty(0) and os.environ.get("SLURM_TASK_PID") != str(os.getpid())
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and not typed


def rendezvous_address() -> tuple[str, int]:
    """Return address and port of the rendezvous store: rank 0's in the network of the job's nodes, and no other.

    The port follows from the ids of the job, the step and the start, so that jobs on one node have different ones.
    """
    from submitit.slurm.slurm import _parse_node_list  # scontrol may be missing, as in a container

    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    port = PORTS[(job + 97 * step + 997 * requeue.restart_count()) % len(PORTS)]
    names = [environment.infiniband_name(name) for name in _parse_node_list(os.environ["SLURM_STEP_NODELIST"])]
    if len(names) == 1:
        return "127.0.0.1", port
    if os.environ["SLURM_NODEID"] == "0":  # its own name may mean an address that others cannot reach
        return environment.local_address(names[1]), port
    return str(socket.getaddrinfo(names[0], port)[0][4][0]), port


if __name__ == "__main__":
    startup.run_program(lambda: main(*sys.argv[1:]))
