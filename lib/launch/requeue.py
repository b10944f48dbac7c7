"""Decides whether a Slurm job whose run was interrupted is requeued.

The job's history, JOB.json in the job folder, records the run's checkpoint and outcome at each start of the job.
`verdict` decides from that, from outcome.json and from Slurm's facts on the job. Imports no torch, to be quick.
"""

import json
import os
import re
import subprocess
from pathlib import Path

from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE

HISTORY = "BATON_HISTORY"  # the variable with the path of the job's history
RUNNING = ("RUNNING", "SIGNALING")  # states of a job that runs; the second while it is sent a signal
PREEMPTED = "preempted"


def record_start(history: Path, run: Path) -> None:
    """Record the run's newest checkpoint and outcome as this start of the job finds them."""
    starts = [one for one in run_folder.read_json(history).get("starts", []) if one["restart"] != restart_count()]
    written = run_folder.read_outcome(run).get("written")
    starts.append({"restart": restart_count(), "checkpoint": newest_checkpoint(run), "outcome": written})
    write_history(history, {"run": str(run.resolve()), "starts": starts})


def record_refusal(reason: str) -> None:
    """Record that a usage error ended this start: a requeue would meet it again. Without a job it does nothing."""
    history = Path(os.environ.get(HISTORY, ""))
    facts = run_folder.read_json(history)
    if facts and facts["starts"][-1]["restart"] == restart_count():
        facts["starts"][-1]["refused"] = reason
        write_history(history, facts)


def finish_job(history: Path, code: int) -> int:
    """Requeue the job if its run must go on, else say why not. `code` is the tasks' exit code.

    Returns:
        The job's exit code: 0 for a run that is finished or requeued, 75, 2, or the tasks' own.
    """
    facts = run_folder.read_json(history)
    start = facts["starts"][-1] if facts else {}
    if start.get("restart") != restart_count():
        print(f"no training began in this start: job {job_name()} is not requeued")
        return code
    run = Path(facts["run"])
    outcome = run_folder.read_outcome(run)
    job = str(outcome.get("launch")).partition(".")[0]  # launches are called JOB or JOB.STEP
    if job != os.environ["SLURM_JOB_ID"] or outcome.get("written") == start["outcome"]:
        outcome = {}  # of another job, or of an earlier start
    why, why_not = verdict(facts["starts"], outcome, newest_checkpoint(run), job_facts())
    if why:
        print(f"{why}: job {job_name()} is requeued, and resumes", flush=True)
        start["requeued"] = why
        write_history(history, facts)
        answer = scontrol("requeue")
        if answer.returncode == 0:
            return FINISHED
        del start["requeued"]
        write_history(history, facts)
        reason = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        command = f"scontrol requeue {job_name()}"
        print(f"job {job_name()} could not be requeued ({reason}): the state is saved; type: {command}")
    elif why_not:
        print(f"job {job_name()} is not requeued: {why_not}")
    if not outcome and "refused" in start:
        return USAGE
    return {"finished": FINISHED, "stopped": STOPPED}.get(outcome.get("state", ""), code or FAILED)


def verdict(starts: list[dict], outcome: dict, checkpoint: str | None, job: dict) -> tuple[str, str]:
    """Return why the job is to be requeued, and why not: one is empty, and both are for a finished run.

    Args:
        starts: all of the job so far.
        outcome: outcome.json, {} if the last start did not write it.
        checkpoint: the name of the newest one.
        job: what Slurm says of the job, {} if it does not answer.
    """
    start, before = starts[-1], starts[-2] if len(starts) > 1 else {}
    state, reason = outcome.get("state"), outcome.get("reason")
    if state == "finished":
        return "", ""
    if job.get("JobState", "RUNNING") not in RUNNING:
        return "", f"it was ended from outside ({job['JobState']}); the state is saved"
    if not outcome and "refused" in start:
        return "", f"the run was refused ({start['refused']})"
    if state == "failed" and not outcome.get("lost_peer"):
        return "", f"the run failed ({reason})"
    if is_preempted(job):
        return PREEMPTED, ""
    if state == "stopped" and outcome.get("signal") != "SIGUSR2":
        return "", f"it was asked to stop ({reason}); the state is saved"
    why = "time limit" if state == "stopped" else "a process was lost"
    in_vain = before.get("requeued", PREEMPTED) != PREEMPTED and before["checkpoint"] == start["checkpoint"]
    if in_vain and (not outcome or checkpoint == start["checkpoint"]):
        return "", f"{why}, and two starts in a row gained nothing"
    return why, ""


def is_preempted(job: dict) -> bool:
    """Whether this start of the job runs and must make room for another job."""
    since, start = job.get("PreemptTime", "None"), job.get("StartTime", "~")
    return job.get("JobState") in RUNNING and since[0].isdigit() and since >= start


def restart_count() -> int:
    """Return how often Slurm has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def job_name() -> str:
    """Return the job's number, or ARRAY_TASK for a task of an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    return os.environ["SLURM_JOB_ID"]


def job_facts() -> dict:
    """Return what Slurm says of this job (JobState, StartTime, PreemptTime, ...), {} if it does not answer."""
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", scontrol("show", "job", "-o").stdout))


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
    """Replace the history of a job."""
    atomic.write_file(history, json.dumps(facts, indent=1) + "\n")
