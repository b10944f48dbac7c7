"""Whether a Slurm job whose run was interrupted goes on: requeued once, or not at all.

A job's history, JOB.json in the job folder, holds what each start of it began with. From it, from outcome.json and
from what Slurm says of the job follows what is to be done. Knows nothing of torch, so that it costs no time.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import FAILED, FINISHED, STOPPED, USAGE

log = logging.getLogger(__name__)
CODE = "code_"  # the beginning of a snapshot's name
HISTORY = "BATON_HISTORY"  # the variable with the path of the job's history
RUNNING = ("RUNNING", "SIGNALING")  # the states of a job that runs; the second while it is sent a signal
COUNTED = ("time limit", "a process was lost")  # by -slurm_requeues; preemptions are not


def begin(history: Path, run: Path, requeues: int, looks: bool = False):
    """Notes what this start of the job begins with. `looks`: it trains nothing, and so writes no outcome."""
    before = read(history).get("starts", [])
    start = {
        "restart": restart(),
        "checkpoint": newest(run),
        "outcome": run_folder.outcome(run).get("written"),
        "looks": looks,
    }
    starts = [one for one in before if one["restart"] != restart()] + [start]
    write(history, {"run": str(run.resolve()), "requeues": requeues, "starts": starts})


def refuse(reason: str):
    """Notes that this start was refused for a usage error, which another start would meet again. Not in a Slurm job,
    it does nothing."""
    history = Path(os.environ.get(HISTORY, ""))
    facts = read(history)
    for start in facts.get("starts", []):
        if start["restart"] == restart():
            start["refused"] = reason
            with contextlib.suppress(OSError):  # the reason was printed already
                write(history, facts)


def after(history: Path, code: int) -> int:
    """Requeues the job if its run is to go on, and says why not if it is not. Returns the exit code: 0 for a run that
    is finished or goes on, else 75, 2 or 1; of a start that only looked at a run its own."""
    facts, job = read(history), asked_of_slurm(os.environ["SLURM_JOB_ID"])
    mine = [start for start in facts.get("starts", []) if start["restart"] == restart()]
    if not mine:
        log.error("the run did not get as far as its first line: not requeued")
        tidy(history.parent, job)
        return code or FAILED
    run, looks = Path(facts["run"]), mine[-1].get("looks")
    outcome = run_folder.outcome_of(run, os.environ["SLURM_JOB_ID"])
    if outcome.get("written") == mine[-1]["outcome"]:  # an earlier start's
        outcome = {}
    if looks:
        why, why_not = "preempted" if code and preempted(job) else "", ""
    else:
        why, why_not = verdict(facts, mine[-1], outcome, newest(run), job)
    if why:
        mine[-1]["requeued"] = why
        write(history, facts)
        log.info("%s: job %s is requeued, and goes on", why, os.environ["SLURM_JOB_ID"])
        if accepted(name(job)):
            return FINISHED
        del mine[-1]["requeued"]
        write(history, facts)
    else:
        if why_not:
            log.info("job %s is not requeued: %s", os.environ["SLURM_JOB_ID"], why_not)
        tidy(history.parent, job)
    if looks:
        return code
    if not outcome and "refused" in mine[-1]:
        return USAGE
    return {"finished": FINISHED, "stopped": STOPPED}.get(outcome.get("state"), code or FAILED)


def verdict(facts: dict, start: dict, outcome: dict, checkpoint: str | None, job: dict) -> tuple[str, str]:
    """Why the job is to be requeued, or why not; one of them is empty, and both are for a finished run.

    start: the last of `facts`; outcome: what outcome.json says, {} if this start did not write it; checkpoint: the
    newest; job: Slurm's words of it, {} where it does not answer.
    """
    state, reason = outcome.get("state"), outcome.get("reason")
    if state == "finished":
        return "", ""
    if job.get("JobState", "RUNNING") not in RUNNING:
        return "", f"it was ended from outside ({job['JobState']}); the state is saved"
    if not outcome and "refused" in start:
        return "", f"the run was refused ({start['refused']})"
    if state == "failed" and not outcome.get("lost_peer"):
        return "", f"the run failed ({reason})"
    if preempted(job):
        return "preempted", ""
    if state == "stopped" and outcome.get("signal") != "SIGUSR2":
        return "", f"it was asked to stop ({reason}); the state is saved"
    why = COUNTED[0] if state == "stopped" else COUNTED[1]
    before = facts["starts"][-2] if len(facts["starts"]) > 1 else {}
    in_vain = before.get("requeued") in COUNTED and before["checkpoint"] == start["checkpoint"]
    if in_vain and (not outcome or checkpoint == start["checkpoint"]):
        return "", f"{why}, and two starts in a row gained nothing"
    done = sum(one.get("requeued") in COUNTED for one in facts["starts"])
    if done >= facts["requeues"]:
        return "", f"{why}, and it was {done} times already: -slurm_requeues {facts['requeues']}"
    return why, ""


def preempted(job: dict) -> bool:
    """Whether this start of the job runs and has to make room."""
    since, start = job.get("PreemptTime", "None"), job.get("StartTime", "~")
    return job.get("JobState") in RUNNING and since[0].isdigit() and since >= start


def restart() -> int:
    """How often Slurm has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def asked_of_slurm(job: str) -> dict:
    """What Slurm says of a job: JobState, StartTime, PreemptTime, ...; {} where it does not answer."""
    try:
        words = ["scontrol", "show", "job", "-o", job]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    # The last task of an array has the array's own id, for which Slurm shows all of them: that one first.
    first = said.stdout.partition("\n")[0]
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", first)) if said.returncode == 0 else {}


def nodes() -> list[str]:
    """The names of this job step's nodes, [] where they cannot be known."""
    try:
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (KeyError, OSError, subprocess.SubprocessError):
        return []


def name(job: dict) -> str:
    """What scontrol is to call this job. A task of an array has a name of its own, which no other task goes by."""
    task = job.get("ArrayTaskId", "")
    return f"{job['ArrayJobId']}_{task}" if task.isdecimal() else os.environ["SLURM_JOB_ID"]


def accepted(job: str) -> bool:
    """Has Slurm end this job and start it again. Where it will not, says what to type."""
    try:
        said = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        fault = said.stderr.strip() if said.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    if fault is not None:
        log.error("job %s could not be requeued (%s): the state is saved; type: scontrol requeue %s", job, fault, job)
    return fault is None


def pickle_of(folder: Path, job: str) -> Path:
    """Submitit's pickle of a job, which says what each start of it is to do."""
    return folder / f"{job}_submitted.pkl"


def tidy(folder: Path, job: dict):
    """Removes what a submitted job needs to start again: its pickle, and the snapshot of the code that it runs in.
    Does nothing if the job does not end by itself: somebody may have typed `scontrol requeue`."""
    with contextlib.suppress(OSError):
        here = Path.cwd()
        if job.get("JobState") in RUNNING:
            pickle_of(folder, os.environ["SLURM_JOB_ID"]).unlink(missing_ok=True)
            if here.name.startswith(CODE) and here.parent.samefile(folder):
                shutil.rmtree(here)


def newest(run: Path) -> str | None:
    """The name of the checkpoint that was saved last."""
    found = run_folder.newest(run / "checkpoints")
    return found.name if found else None


def read(history: Path) -> dict:
    """The history of a job, {} where there is none."""
    try:
        return json.loads(history.read_text())
    except (OSError, ValueError):
        return {}


def write(history: Path, facts: dict):
    """Replaces the history of a job."""
    atomic.write_file(history, json.dumps(facts, indent=1) + "\n")
