"""Submits the run to Slurm with Submitit: one task per GPU, or with -cpu N, N tasks per node.

slurm_task.py has what the job does then.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from lib.launch import slurm_task
from lib.utils.errors import FINISHED, UsageError

ROOT = Path(__file__).resolve().parents[2]
# Set by an allocation or a launcher around this process, or secret: the job must not inherit them.
FOREIGN = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "TORCHELASTIC_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "NGROK_AUTHTOKEN",
)


def submit(args, target: str) -> int:
    """Submit the run and print the job's number and log. Returns the exit code.

    Raises:
        UsageError: there is no sbatch, it refuses the job, or the job's files cannot be written.
    """
    if args.gpus:
        raise UsageError(f"-gpus {args.gpus} with -slurm: Slurm says which GPUs; -slurm_ngpus says how many a node")
    if args.slurm_dry:
        return show(args)
    if not shutil.which("sbatch"):
        raise UsageError("-slurm: there is no sbatch on this machine: start on a login node, or without -slurm")
    folder = slurm_task.folder_of(args)
    try:
        job = submit_job(args, target, folder)
    except OSError as error:
        raise UsageError(f"-slurm_dir {folder}: the job's files cannot be written ({error})") from None
    log = folder / f"{job}_0_log.out"
    print(f"submitted:   job {job}")
    print(f"log:         {log}")
    print(f"follow:      tail -F {shlex.quote(str(log))}")
    print(f"cancel:      scancel {job}", flush=True)
    return FINISHED


def show(args) -> int:
    """Print the script that would be submitted, and what sbatch says to it. Returns the exit code."""
    script = script_of(args, slurm_task.folder_of(args), ROOT)
    print(script, flush=True)
    test_only = sbatch(script, "--test-only").stderr if shutil.which("sbatch") else "no sbatch here: not tested"
    print(test_only.strip())
    return FINISHED


def submit_job(args, target: str, folder: Path) -> str:
    """Submit the job. Returns its number. A job that sbatch refuses leaves no files."""
    from submitit.core.utils import DelayedSubmission

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the pickle in it runs as code
    snapshot = folder / f"code_{uuid.uuid4().hex}"
    try:
        if not args.slurm_live:
            copy_code(snapshot)
        script = script_of(args, folder, ROOT if args.slurm_live else snapshot)
        job = re.findall(r"job (\d+)", sbatch(script).stdout)[0]
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        raise
    (folder / f"{job}_submission.sh").write_text(script)
    temporary = folder / f"{job}.pkl"
    DelayedSubmission(slurm_task.work, args, target, str(Path.cwd())).dump(temporary)
    temporary.rename(slurm_task.pickle_of(folder, job))
    return job


def sbatch(script: str, *options: str) -> subprocess.CompletedProcess:
    """Give the script to sbatch. Raises UsageError with sbatch's own message if it refuses."""
    prefixes = (*FOREIGN, "SBATCH_") if "SLURM_JOB_ID" in os.environ else FOREIGN
    inherited = [name for name in os.environ if name == "SLURM_CONF" or not name.startswith(prefixes)]
    env = {name: os.environ[name] for name in inherited}
    answer = subprocess.run(["sbatch", *options], input=script, env=env, capture_output=True, text=True)
    if answer.returncode:
        raise UsageError(f"-slurm: sbatch refused the job: {' '.join(answer.stderr.split())}")
    return answer


def script_of(args, folder: Path, code: Path) -> str:
    """Return the batch script, with all that the job asks Slurm for."""
    import submitit

    class Executor(submitit.SlurmExecutor):
        """Submitit's, but it also writes a script where there is no Slurm."""

        @classmethod
        def affinity(cls):
            return 2

    python = f"{shlex.quote(sys.executable)} -u -m lib.launch.slurm_task"
    executor = Executor(folder=folder, python=f"{python} task")
    executor.update_parameters(**resources(args), **commands(args, python, folder, code))
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def resources(args) -> dict:
    """Return what the job asks Slurm for, under Submitit's names."""
    asked = {
        "job_name": args.model,
        "nodes": args.slurm_nnodes,
        "ntasks_per_node": args.cpu or args.slurm_ngpus,
        "cpus_per_task": cpus_per_task(args),
        "gpus_per_node": None if args.cpu else args.slurm_ngpus,
        "mem": f"{round(args.slurm_mem_gb * 1024)}MB" if args.slurm_mem_gb else None,
        "partition": args.slurm_partition,
        "account": args.slurm_account,
        "qos": args.slurm_qos,
        "constraint": args.slurm_constraint,
        "exclude": args.slurm_exclude,
        "signal_delay_s": args.slurm_signal_s,
    }
    # Submitit's own time limit is 5 minutes; None leaves the partition's.
    return {"time": args.slurm_timeout} | {name: value for name, value in asked.items() if value is not None}


def commands(args, python: str, folder: Path, code: Path) -> dict:
    """Return what the job's shell does before, with and after the tasks, under Submitit's names."""
    options = {"requeue": True, "chdir": str(code)}
    if args.slurm_nodelist:
        options["nodelist"] = args.slurm_nodelist
    for key, equals, value in (option.partition("=") for option in args.slurm_arg):
        options[key] = value if equals else True
    return {
        "stderr_to_stdout": True,
        "setup": [
            *args.slurm_setup,
            "trap : TERM",  # the shell must outlive the signal that stops its tasks
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        ],
        # srun does not inherit --cpus-per-task since Slurm 22.05.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus_per_task(args)}"],
        "teardown": [f"exec {python} after {shlex.quote(str(folder))}/$SLURM_JOB_ID.json $?"],
        "additional_parameters": options,
    }


def cpus_per_task(args) -> int:
    """Return -slurm_cpus, or enough for the loader's workers."""
    return args.slurm_cpus or (8 if args.workers is None else args.workers) + 2


def copy_code(target: Path):
    """Copy the files that git tracks and new Python files; without git, train.py and lib."""
    listing = "git ls-files -z && git ls-files -z --others --exclude-standard '*.py'"
    git = subprocess.run(listing, shell=True, cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:
        names = [name for name in git.stdout.split("\0") if name]
    else:
        names = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.py"), *ROOT.glob("lib/**/*.py"))]
    target.mkdir()
    (target / ".gitignore").write_text("*\n")  # the next snapshot must not list this one
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
