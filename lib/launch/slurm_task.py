"""What a task of a Slurm job does: find the others, run, and see to it that a run which was interrupted goes on.

Started without torch, so that signals have where to go from the first moment. What becomes of an interrupted run is
in requeue.py.
"""

import contextlib
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

from lib.launch import environment, local, requeue
from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import FINISHED, STOPPED, UsageError

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
AGENT_S = 5  # that torchrun waits for its workers longer than -grace_s
MEET_S = 300.0  # for rank 0's word to reach the other nodes; a shared folder may be slow


def main(words: list[str]) -> int:
    """`task ... FOLDER` is one process of a submitted run, `begin WORDS` notes a start of one by hand and prints what
    its script is to know, `after HISTORY CODE` sees to an ended one."""
    if words[0] == "task":
        return task(Path(words[-1]))
    if words[0] == "begin":
        return begin_by_hand(words[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    return requeue.after(Path(words[1]), int(words[2]))


def task(folder: Path) -> int:
    """A process of a job that Submitit submitted: its pickle says what to do. Signals wait until the run listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    from submitit.core import utils

    os.environ["SUBMITIT_FOLDER"] = str(folder)
    pickle = requeue.pickle_of(folder, os.environ["SLURM_JOB_ID"])
    until = time.monotonic() + 60  # sbatch may start a job before the pickle has its name
    while not pickle.exists() and time.monotonic() < until:
        time.sleep(0.2)
    try:
        return utils.DelayedSubmission.load(pickle).result()
    finally:
        gc.unfreeze()  # what the run set aside: triton's nanobind counts as leaked what is left when Python ends


def work(args, target: str, where: str) -> int:
    """The run, from the folder it was submitted from; rank 0 notes the start. A stopped run exits with 0 like a
    finished one: the job's shell sees to what follows."""
    os.chdir(where)
    leave_alone()
    if looks(args):  # nothing is to be saved, and nobody listens: the order to end is all that counts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    os.environ[requeue.HISTORY] = str(history_of(args))
    if int(os.environ["SLURM_PROCID"]) == 0:
        begin(args)
    code = step(args, target)
    return FINISHED if code == STOPPED else code


def begin(args) -> Path:
    """Notes a start of this job. Returns the path of its history."""
    history = history_of(args)
    history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    requeue.begin(history, run_folder.run_of(args), args.slurm_requeues, looks(args))
    return history


def history_of(args) -> Path:
    """The path of this job's history."""
    return folder_of(args) / f"{os.environ['SLURM_JOB_ID']}.json"


def looks(args) -> bool:
    """Whether a run is only looked at: such a start leaves no outcome."""
    return bool(args.eval or args.dry or args.debug or args.check_resume)


def step(args, target: str) -> int:
    """The run as a task of a job step, submitted or under srun: torchrun's variables from Slurm's. Returns the exit
    code.

    Only rank 0 exits with 75 for a stopped run: srun kills the other tasks when one exits with 75.
    """
    rank, folder = int(os.environ["SLURM_PROCID"]), folder_of(args)
    environment.export(args.cache_dir, args.debug_dist)
    try:
        where, store = meet(rank, folder, args.master_suffix)
        os.environ.update(where)
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        if interface := environment.fast_interface():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        code = local.call(target, args)
    except UsageError as error:
        return local.refused(error)
    finally:
        if rank == 0:
            sweep(folder)
    del store
    return FINISHED if code == STOPPED and rank else code


def is_task() -> bool:
    """Whether srun started this process as one of several, rather than somebody in the shell of `srun --pty`."""
    env = os.environ
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_ID"} <= env.keys():
        return False
    direct = env.get("SLURM_TASK_PID") == str(os.getpid())
    # An srun that is typed in that shell passes SLURM_PTY_PORT on to its tasks, which have no terminal.
    typed = "SLURM_PTY_PORT" in env and not direct and has_terminal(env.get("SLURM_TASK_PID", ""))
    return tasks() > 1 and not typed


def has_terminal(pid: str) -> bool:
    """Whether a process of this machine has a controlling terminal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] != "0"
    except OSError:
        return False


def tasks() -> int:
    """How many tasks this job step has."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", 1))


def folder_of(args) -> Path:
    """Where the job's files lie: -slurm_dir, or slurm/ in the run's folder."""
    return Path(args.slurm_dir).resolve() if args.slurm_dir else run_folder.run_of(args).resolve() / "slurm"


def leave_alone():
    """Signals before and after the training say nothing new, and end nothing."""
    for number in WARNINGS:
        signal.signal(number, _noted_by_slurm)


def _noted_by_slurm(number, frame):
    """Why the job is stopped is asked of Slurm."""


def meet(rank: int, folder: Path, suffix: str | None = None):
    """torchrun's variables for this task, and on rank 0 the store where all meet.

    Rank 0 takes a port that is free on its machine, and keeps it; the others read which in the job folder.
    """
    size, nodes = tasks(), int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    word = folder / f"{step_id()}.{requeue.restart()}.place"
    store = None
    if rank == 0:
        place, store = open_store(size, nodes, suffix)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_file(word, json.dumps(place))
    place = wait_for(word)
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": tasks_here(),
    }
    return environment.torchrun(step_id(), **place, **ranks), store


def step_id() -> str:
    """What this job step is called in all of its starts."""
    return "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format(**os.environ)


def sweep(folder: Path):
    """Removes rank 0's word of this start and of those before it, which are over. For rank 0, once the others have
    met it, or are not to."""
    for word in folder.glob(f"{step_id()}.*.place"):
        word.unlink(missing_ok=True)


def open_store(size: int, nodes: int, suffix: str | None):
    """The address of a rendezvous store in this process, and the store. It listens on that address alone."""
    host = own_address(suffix) if nodes > 1 else "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=4 * size)
    port = listener.getsockname()[1]
    return {"MASTER_ADDR": host, "MASTER_PORT": port}, local.store_on(listener, host, size)


def own_address(suffix: str | None) -> str:
    """This node's address in the network of the job's other nodes: that on the way to one of them.

    Its own name may mean another: 127.0.1.1 where /etc/hosts says so, or that of a network of containers. It is asked
    for only where no other node's name is known.
    """
    own = os.environ.get("SLURMD_NODENAME", "")
    for name in (*(name for name in requeue.nodes() if name != own), own, socket.gethostname()):
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(environment.fast_name(name, suffix), 9, type=socket.SOCK_DGRAM)
            family, _, _, _, there = found[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # sends nothing
                return probe.getsockname()[0]
    raise UsageError(f"-master_suffix {suffix}: no node of this job has a name that {socket.gethostname()} knows")


def wait_for(word: Path) -> dict:
    """What rank 0 wrote. Raises UsageError if it does not come: the folder is not shared."""
    until = time.monotonic() + MEET_S
    while time.monotonic() < until:
        # Asked by listing: a network file system remembers for a minute that a name was not there.
        if word.parent.is_dir() and word.name in os.listdir(word.parent):  # noqa: PTH208
            return json.loads(word.read_text())
        time.sleep(0.1)
    raise UsageError(f"-slurm_dir {word.parent}: rank 0's word did not come to {socket.gethostname()} within "
                     f"{MEET_S:g} s: name a folder on a disk that all nodes share")  # fmt: skip


def tasks_here() -> int:
    """How many tasks of the step this node has: of SLURM_STEP_TASKS_PER_NODE, as in 4(x2),3."""
    counts = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(tasks())).split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[int(os.environ.get("SLURM_NODEID", 0)) % len(counts)]


def begin_by_hand(words: list[str]) -> int:
    """Notes a start of `python train.py WORDS` in a batch script, and prints what the script needs to know: lines of
    shell, with the path of the history, the suffix of the nodes' names, the processes of a node, and variables for
    torchrun."""
    from lib import config

    try:
        with contextlib.redirect_stdout(sys.stderr):  # -h is not for the shell
            new = environment.export(*config.early(words))
            args = config.parse_args(words)
    except UsageError as error:
        return local.refused(error)
    processes = len(args.gpus.split(",")) if args.gpus else args.cpu or os.environ.get("SLURM_GPUS_ON_NODE", 1)
    history = begin(args)
    own = {"history": history, "suffix": environment.suffix_of(args.master_suffix), "processes": processes}
    new[requeue.HISTORY] = str(history)
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:  # after which torchrun kills its workers; unset, 30 s
        new["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(args.grace_s) + AGENT_S)
    sys.stdout.write(environment.shell(own, new, environment.fast_interface()))
    return FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
