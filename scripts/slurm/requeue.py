"""Decides whether a Slurm job whose run was interrupted is requeued: the job's shell runs it after the tasks.

JOB.json in the job's folder has what the job's last start found: the run's newest checkpoint and outcome. `verdict`
decides from that, from outcome.json and from Slurm's facts on the job. Imports no torch, to be quick.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE

HISTORY = "BATON_HISTORY"  # the variable with the path of JOB.json
RUNNING = ("RUNNING", "SIGNALING")  # states of a job that runs; the second while it is sent a signal
PREEMPTED = "preempted"


def record_start(history: Path, run: Path) -> None:
    """Record what this start of the job finds."""
    start = {
        "run": str(run.resolve()),
        "restart": restart_count(),
        "checkpoint": newest_checkpoint(run),
        "outcome": run_folder.read_json(run / "outcome.json").get("written"),
        "in_vain": run_folder.read_json(history).get("in_vain", False),  # whether the start before gained nothing
    }
    write_history(history, start)


def record_refusal(reason: str) -> None:
    """Record that a usage error ended this start: a requeue would meet it again. Without a job it does nothing."""
    history = Path(os.environ.get(HISTORY, ""))
    if start := run_folder.read_json(history):
        write_history(history, {**start, "refused": reason})


def recorded(main: Callable[[], int]) -> Callable[[], int]:
    """Return `main` for a job's process, which also records the exception that ends it."""

    def run() -> int:
        try:
            return main()
        except Exception as error:
            history = Path(os.environ.get(HISTORY, ""))
            start = run_folder.read_json(history)
            if start and "error" not in start and not run_folder.is_lost_peer(error):  # the first is the cause
                facts = {"error": f"{type(error).__name__}: {error}", "may_pass": may_pass(error)}
                write_history(history, {**start, **facts})
            raise

    return run


def may_pass(error: BaseException | None) -> bool:
    """Whether a requeue may help: this error, or one that led to it, is of a lost process, a disk or a network."""
    while error and not (isinstance(error, OSError) or run_folder.is_lost_peer(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def finish_job(history: Path, code: int) -> int:
    """Requeue the job if its run must go on, else say why not. `code` is the tasks' exit code.

    Returns the job's exit code: 0 for a run that is finished or requeued, 75, 2, or the tasks' own.
    """
    start = run_folder.read_json(history)
    if start.get("restart") != restart_count():
        print(f"no training began in this start: job {job_name()} is not requeued")
        return code
    run = Path(start["run"])
    outcome = run_folder.read_json(run / "outcome.json")
    if outcome.get("written") == start["outcome"]:
        outcome = {}  # of an earlier start
    gained = newest_checkpoint(run) != start["checkpoint"]
    job = dict(re.findall(r"(?:^| )(\w+)=(\S*)", scontrol("show", "job", "-o").stdout))
    requeue, reason = verdict(start, outcome, gained, job)
    if requeue:
        print(f"{reason}: job {job_name()} is requeued, and resumes", flush=True)
        write_history(history, {**start, "in_vain": not gained and reason != PREEMPTED, "requeued": reason})
        answer = scontrol("requeue")
        if answer.returncode == 0:
            return FINISHED
        write_history(history, start)
        reason = f"{answer.stderr.strip()}; the state is saved; type: scontrol requeue {job_name()}"
    print(f"job {job_name()} is not requeued: {reason}")
    if "refused" in start:
        return USAGE
    return {"finished": FINISHED, "stopped": STOPPED}.get(outcome.get("state", ""), code or FAILED)


def verdict(start: dict, outcome: dict, gained: bool, job: dict) -> tuple[bool, str]:
    """Return whether the job is to be requeued, and why or why not.

    Args:
        start: what JOB.json has.
        outcome: outcome.json, {} if this start did not write it.
        gained: whether this start published a checkpoint.
        job: what Slurm says of the job (JobState, StartTime, PreemptTime, ...), {} if it does not answer.
    """
    state, reason = outcome.get("state"), outcome.get("reason")
    if "refused" in start:
        return False, f"the run was refused ({start['refused']})"
    if state == "finished":
        return False, "the run is finished"
    if job.get("JobState", "RUNNING") not in RUNNING:
        return False, f"it was ended from outside ({job['JobState']}); the state is saved"
    if state == "failed" and not outcome.get("lost_peer"):
        return False, f"the run failed ({reason})"
    error = None if state else start.get("error")  # before it had the run's folder, as in get_dataset
    if error and not start["may_pass"]:
        return False, f"the run failed ({error})"
    preempted_at = job.get("PreemptTime", "None")
    if preempted_at[0].isdigit() and preempted_at >= job.get("StartTime", "~"):  # in this start
        return True, PREEMPTED
    if state == "stopped" and outcome.get("signal") not in ("SIGUSR1", "SIGUSR2"):
        return False, f"it was asked to stop ({reason}); the state is saved"
    lost = f"the start failed ({error})" if error else "a process was lost"
    why = "time limit" if state == "stopped" else lost
    if start["in_vain"] and not gained:
        return False, f"{why}, and two starts in a row gained nothing"
    return True, why


def restart_count() -> int:
    """Return how often Slurm has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def job_name() -> str:
    """Return the job's number, or ARRAY_TASK for a task of an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    return os.environ["SLURM_JOB_ID"]


def scontrol(*command: str) -> subprocess.CompletedProcess:
    """Ask Slurm about this job. If scontrol is missing, or says nothing for a minute, it counts as failed."""
    words = ["scontrol", *command, job_name()]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, FAILED, "", str(error))


def newest_checkpoint(run: Path) -> str | None:
    """Return the name of the run's newest checkpoint."""
    return next((found.name for found in run_folder.list_checkpoints(run / "checkpoints")), None)


def write_history(history: Path, facts: dict) -> None:
    """Replace JOB.json."""
    atomic.write_file(history, json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(finish_job(Path(sys.argv[1]), int(sys.argv[2])))
