"""A run on a Slurm cluster, submitted with Submitit: one task a GPU, or with -cpu N, N tasks a node.

What the job does then is in slurm_task.py.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from lib.launch import requeue, slurm_task
from lib.utils.checkpoint import run_folder
from lib.utils.errors import EXIT_CODES, FAILED, FINISHED, UsageError

ROOT = Path(__file__).resolve().parents[2]
# Of an allocation or a launcher that we may be inside of: none of the job's business.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NGROK_AUTHTOKEN")
LATE_S = 90.0  # for the log of a running job to appear in a shared folder
HINTS = {  # by what sbatch says: the flags that it may be about, and what would be right
    "ccount": (("slurm_account",), "sacctmgr show associations user=$USER lists yours"),
    "artition": (("slurm_partition",), "the partitions here are {partitions}"),
    "time limit": (("slurm_timeout",), "the partitions allow {times}"),
    "qos": (("slurm_qos",), "sacctmgr show qos lists them"),
    "feature": (("slurm_constraint",), "sinfo -o '%P %f' lists what nodes have"),
    "Invalid generic resource": (("slurm_ngpus",), "the nodes have {gpus}; -cpu N asks for none"),
    "node configuration": (("slurm_ngpus",), "a node has {gpus} and {cpus} CPUs; a task takes -slurm_cpus {own}"),
    "node name": (("slurm_nodelist", "slurm_exclude"), "sinfo -N lists the nodes"),
}
THERE = {"partitions": "%R", "times": "%R %l", "gpus": "%G", "cpus": "%c"}  # what sinfo is asked for
UNKNOWN = "unknown"


def submit(args, target: str) -> int:
    """Submits the run and says which job it is and where its log lies. Returns the exit code: 0, or after
    -slurm_follow the run's.

    Raises UsageError where there is no sbatch, or with what sbatch said against the job, or kept it from being given
    to it.
    """
    if args.gpus:
        raise UsageError(f"-gpus {args.gpus} with -slurm: Slurm says which GPUs; -slurm_ngpus says how many a node")
    for option in args.slurm_arg:
        if "array".startswith(option.partition("=")[0]):
            raise UsageError(f"-slurm_arg {option}: all tasks of an array would be one run: submit each by itself, "
                             "with a -model of its own")  # fmt: skip
    if not shutil.which("sbatch") and not args.slurm_dry:
        raise UsageError("-slurm: there is no sbatch on this machine: start on a login node, or without -slurm")
    folder = slurm_task.folder_of(args)
    if args.slurm_dry:
        return show(args, folder)
    job = submitted(args, target, folder)
    log = folder / f"{job}_0_log.out"
    print(f"submitted:   job {job}")
    print(f"log:         {log}")
    print(f"follow:      tail -F {shlex.quote(str(log))}")
    print(f"cancel:      scancel {job}", flush=True)
    return follow(args, job, log) if args.slurm_follow else 0


def submitted(args, target: str, folder: Path) -> str:
    """The id of the job. One that sbatch refuses leaves no files."""
    name = uuid.uuid4().hex
    pickle, script, code = folder / f"{name}.pkl", folder / f"{name}.sh", folder / f"{requeue.CODE}{name}"
    job = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its pickles run as code
        if not args.slurm_live:
            snapshot(code, args)
        script.write_text(script_of(args, folder, ROOT if args.slurm_live else code))
        from submitit.core import utils

        utils.DelayedSubmission(slurm_task.work, args, target, str(Path.cwd())).dump(pickle)
        said = sbatch(args, str(script)).stdout
        named = re.search(r"job (\d+)", said)
        if not named:
            raise UsageError(f"-slurm: sbatch names no job: {said.strip() or 'it says nothing'}")
        job = named[1]
        pickle.rename(requeue.pickle_of(folder, job))
        script.rename(folder / f"{job}_submission.sh")
        return job
    except OSError as error:
        raise UsageError(f"-slurm_dir {folder}: the job's files cannot be written ({error})") from None
    finally:
        if job is None:
            pickle.unlink(missing_ok=True)
            script.unlink(missing_ok=True)
            shutil.rmtree(code, ignore_errors=True)


def sbatch(args, *words: str, text: str | None = None) -> subprocess.CompletedProcess:
    """What sbatch answers. Raises UsageError, with its words, if that is no."""
    with unallocated():
        said = subprocess.run(["sbatch", *words], input=text, capture_output=True, text=True)
    if said.returncode:
        raise refused(args, said.stderr)
    return said


def show(args, folder: Path) -> int:
    """Prints the script that would be submitted, and what sbatch would make of it. Leaves nothing behind."""
    text = script_of(args, folder, ROOT if args.slurm_live else folder / f"{requeue.CODE}SNAPSHOT")
    print(text, flush=True)
    if not shutil.which("sbatch"):
        print("no sbatch on this machine: nothing was tested")
        return 0
    test = re.sub(r"^#SBATCH --chdir=.*\n", "", text, flags=re.MULTILINE)
    try:
        print(sbatch(args, "--test-only", text=test).stderr.strip())
    except UsageError as error:
        if sinfo("%R") != UNKNOWN:
            raise
        print(f"Slurm does not answer: nothing was tested ({error})")
    return 0


def script_of(args, folder: Path, code: Path) -> str:
    """The script for sbatch, with all that the job asks Slurm for."""
    try:
        import submitit
    except ImportError as error:
        raise UsageError(f"-slurm: {error}: uv pip install submitit") from None

    class Executor(submitit.SlurmExecutor):
        """Submitit's, which says nothing against a dry run without Slurm."""

        @classmethod
        def affinity(cls):
            return 2

    python = f"{shlex.quote(sys.executable)} -u -m lib.launch.slurm_task"
    executor = Executor(folder=folder, python=f"{python} task")
    executor.update_parameters(**resources(args), **commands(args, python, folder, code))
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def resources(args) -> dict:
    """What the job asks Slurm for, in Submitit's words."""
    asked = {
        "job_name": args.model,
        "nodes": args.slurm_nnodes,
        "ntasks_per_node": args.cpu or args.slurm_ngpus,
        "cpus_per_task": cpus(args),
        "gpus_per_node": None if args.cpu else args.slurm_ngpus,
        "mem": f"{round(args.slurm_mem_gb * 1024)}MB" if args.slurm_mem_gb else None,
        "partition": args.slurm_partition,
        "account": args.slurm_account,
        "qos": args.slurm_qos,
        "constraint": args.slurm_constraint,
        "exclude": args.slurm_exclude,
        "time": args.slurm_timeout,
        "signal_delay_s": args.slurm_signal_s,
    }
    # Submitit's own time limit is 5 minutes; without one the job gets its partition's.
    return {name: value for name, value in asked.items() if value is not None or name == "time"}


def cpus(args) -> int:
    """CPUs of a task."""
    return args.slurm_cpus or (8 if args.workers is None else args.workers) + 2


def commands(args, python: str, folder: Path, code: Path) -> dict:
    """What the job's shell does around the tasks, in Submitit's words."""
    history = f"{shlex.quote(str(folder))}/$SLURM_JOB_ID.json"
    others = (option.partition("=") for option in args.slurm_arg)
    return {
        "stderr_to_stdout": True,
        # The shell outlives a signal that ends its tasks; srun takes over no number of CPUs from sbatch since 22.05.
        "setup": [
            *args.slurm_setup,
            "trap : TERM",
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        ],
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus(args)}"],
        "teardown": [f"exec {python} after {history} $?"],
        "additional_parameters": {
            "requeue": True,
            "chdir": str(code),
            **({"nodelist": args.slurm_nodelist} if args.slurm_nodelist else {}),
            **{key: value if equals else True for key, equals, value in others},
        },
    }


@contextlib.contextmanager
def unallocated():
    """The environment without what an allocation that we may be inside of says, and without secrets."""
    inside = "SLURM_JOB_ID" in os.environ
    before = dict(os.environ)
    for name in before:
        ours = name.startswith(("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_")) and name != "SLURM_CONF"
        if ours or name in PLACE or (inside and name.startswith("SBATCH_")):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def snapshot(target: Path, args):
    """Copies the code as it is now: the files git knows, and plugins that were not added to it yet."""
    for name in known(Path(args.out).resolve()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def known(out: Path) -> list[str]:
    """Names of the files that make up the code, sorted."""
    tracked, others = git("ls-files"), git("ls-files", "--others", "--exclude-standard")
    if tracked is None:
        tracked = [str(path.relative_to(ROOT)) for part in ("*.py", "lib/**/*.py") for path in ROOT.glob(part)]
        others = []
    others = [name for name in others if name.endswith(".py") and not (ROOT / name).is_relative_to(out)]
    return sorted({name for name in tracked + others if (ROOT / name).is_file()})


def git(*words) -> list[str] | None:
    """The file names that git answers, None where this is no repository."""
    try:
        said = subprocess.run(["git", *words, "-z"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return [name for name in said.stdout.split("\0") if name] if said.returncode == 0 else None


def refused(args, error: str) -> UsageError:
    """What sbatch said against the job, and the flag to change, in one line."""
    said = " ".join(re.findall(r"sbatch: (?:error: )?(.*)", error) or [error]).strip()
    for word, (flags, hint) in HINTS.items():
        if word in said:
            flag = next((flag for flag in flags if getattr(args, flag)), flags[0])
            given = f" {getattr(args, flag)}" if getattr(args, flag) else ""
            there = {name: sinfo(form) for name, form in THERE.items() if f"{{{name}}}" in hint}
            return UsageError(f"-{flag}{given}: {hint.format(**there, own=cpus(args))} (sbatch said: {said})")
    return UsageError(f"-slurm: sbatch refused the job: {said}")


def sinfo(form: str) -> str:
    """What Slurm says of its partitions and nodes, each thing once."""
    if not shutil.which("sinfo"):
        return UNKNOWN
    said = subprocess.run(["sinfo", "-h", "-o", form], capture_output=True, text=True)
    return ", ".join(sorted({line.strip() for line in said.stdout.splitlines()})) or UNKNOWN


def follow(args, job: str, log: Path) -> int:
    """Shows the job's log as it grows until the job is over, and a progress bar on a terminal. Returns the run's exit
    code: by the outcome that the job wrote, else by what Slurm says of the job.

    Raises UsageError if the job runs and its log does not appear.
    """
    tail, since, last = Tail(log), None, ""
    try:
        while state := state_of(job):
            print(f"job {job}: {state}", flush=True) if state.startswith("PENDING") and state != last else None
            last = state
            tail.show()
            since = since or (time.monotonic() if state.startswith("RUNNING") else None)
            if since and not log.exists() and time.monotonic() - since > LATE_S:
                raise UsageError(f"-slurm_dir {log.parent}: job {job} runs, but its log does not appear here: name a "
                                 f"folder on a disk that the nodes share (scancel {job} ends the job)")  # fmt: skip
            time.sleep(1)
        time.sleep(1)
        tail.show()
    except KeyboardInterrupt:
        print(f"\njob {job} goes on; scancel {job} ends it, tail -F {shlex.quote(str(log))} follows it")
        return 0
    if outcome := run_folder.outcome_of(run_folder.run_of(args), job):
        return EXIT_CODES.get(outcome.get("state"), FAILED)
    return FINISHED if requeue.asked_of_slurm(job).get("JobState") == "COMPLETED" else FAILED


def state_of(job: str) -> str | None:
    """PENDING (Priority), RUNNING (None), ... as long as Slurm has the job in its queue."""
    said = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T (%r)"], capture_output=True, text=True)
    if said.returncode and "Invalid job id" not in said.stderr:
        return "UNKNOWN"  # Slurm does not answer right now
    return said.stdout.strip() or None


class Tail:
    """A log as it grows, on the terminal."""

    def __init__(self, path: Path):
        self.path, self.read, self.step, self.bar = path, 0, 0, None

    def show(self):
        """Prints what came since the last call; a line like `step 40/120` also moves the bar."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                text = file.read()
        except OSError:
            return
        self.read += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        steps = re.findall(rb"step (\d+)/(\d+)", text)
        if steps and sys.stderr.isatty():
            self.move(*map(int, steps[-1]))

    def move(self, step: int, total: int):
        """Moves the bar to a step."""
        from lib.utils.monitoring import console

        self.bar = self.bar or console.Progress(total, 0, True)
        self.bar.advance(step - self.step)
        self.step = step
