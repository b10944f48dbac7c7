"""Runs on a real Slurm of two nodes: submitted, preempted, timed out, cancelled, killed; always the same weights."""

import json
import os
import re
import signal
import sys
import time

import cluster
import pytest
from cluster import Cluster, copy_of_the_code, steps_of
from processes import until
from runs import distance, outcome

pytestmark = cluster.needed(cluster.ENABLED_BY)
SHORT = "-cpu 1 -epochs 1 -slow_s 0.01"
LONG = "-slow_s 0.15"  # 60 steps in 9 s


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    return copy_of_the_code(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def slurm(code, out):
    """A Slurm as it comes: a preemption says SIGTERM and no more."""
    with Cluster(code, out, GRACE_S=25, KILL_WAIT_S=25) as one:
        yield one


@pytest.fixture(scope="module")
def telling(code, out):
    """A Slurm whose preemptions also send the signal of --signal; one run meets its time limit there meanwhile."""
    with Cluster(code, out, GRACE_S=25, USER_SIGNAL=1) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def limited(code, out):
    """A run whose minute is over several times before it is done, and one that crashes, while other tests go on."""
    with Cluster(code, out) as one:
        job = one.submit("-model limited -cpu 1 -slow_s 0.5 -slurm_timeout 1 -slurm_signal_s 25")
        doomed = one.submit("-model doomed -cpu 1 -slow_s 0.1 -slow_deadly 64")
        yield one, job, doomed


@pytest.fixture(scope="module")
def undisturbed(slurm, out):
    """A run that nothing disturbs."""
    said = slurm.train(f"-slurm -slurm_nnodes 2 -cpu 2 -slurm_cpus 1 -dataset slow {LONG} -model calm")
    job = re.search(r"submitted: +job (\d+)", said)[1]
    assert f"{job}_0_log.out" in said and f"scancel {job}" in said
    assert slurm.ended(job)["JobState"] == "COMPLETED", slurm.log("calm")()
    return out / "calm"


def test_a_submitted_run_ends_as_one_that_is_started_here(slurm, undisturbed, out):
    slurm.train("-cpu 4 -dataset slow -slow_s 0 -model here", OMP_NUM_THREADS="1")
    assert outcome(undisturbed)["test"]["accuracy"] > 0.9
    assert distance(undisturbed, out / "here") == 0.0
    assert (undisturbed / "slurm").stat().st_mode & 0o777 == 0o700


def test_a_preempted_run_goes_on_to_the_same_bits_on_a_slurm_as_it_comes(slurm, undisturbed, code, out):
    """Only SIGTERM tells, and leaving in time would end the job. The code submitted goes on, and -reset is past."""
    (out / "moved").mkdir()
    (out / "moved" / "old").touch()
    job = slurm.submit(f"-model moved {LONG} -reset")
    source = code / "train.py"
    slurm.trains("moved", step=6)
    text = source.read_text()
    source.write_text("raise SystemExit('not the code that was submitted')")
    slurm.urgent(1)
    ends = slurm.ended(job)
    source.write_text(text)
    assert (ends["JobState"], ends["Restarts"]) == ("COMPLETED", "1"), slurm.log("moved")()
    assert distance(out / "moved", undisturbed) == 0.0
    assert steps_of(out / "moved") == steps_of(undisturbed)
    assert len(list((out / ".old").glob("moved-*"))) == 1


def test_preempted_runs_are_requeued_once_where_two_signals_tell(telling, out):
    """A submitted one, and one of the sbatch file, by torchrun and with its words passed on."""
    log = f"--output={out}/by_file.log"
    words = f"-dataset slow -cpu 1 {LONG} -out {out} -model by_file".split()
    said = telling.do("sbatch", "--parsable", "-N2", log, "scripts/slurm/train.sbatch", *words, PYTHON=sys.executable)
    until(lambda: list((out / "by_file" / "slurm").glob("*.json")))  # it takes longer to start than the other one
    jobs = {"told": telling.submit(f"-model told -cpu 1 {LONG}"), "by_file": said.strip()}
    for name in jobs:
        telling.trains(name, step=4)
    telling.urgent(1)
    telling.train("-cpu 2 -dataset slow -slow_s 0 -model told_here", OMP_NUM_THREADS="1")
    for name, job in jobs.items():
        ends = telling.ended(job)
        assert (ends["JobState"], ends["Restarts"]) == ("COMPLETED", "1"), telling.log(name)()
        assert distance(out / name, out / "told_here") == 0.0


def test_a_cancelled_run_is_saved_and_stays_cancelled(slurm, out):
    job = slurm.submit(f"-model given_up -cpu 1 {LONG}")
    slurm.trains("given_up", step=2)
    assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.do("scancel", job)
    ends = slurm.ended(job)
    until(lambda: outcome(out / "given_up").get("state") == "stopped", what=slurm.log("given_up"))
    assert outcome(out / "given_up")["step"] >= 2
    assert (out / "given_up" / "checkpoints" / "latest").exists()
    time.sleep(2)
    assert (ends["JobState"], slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == (
        "CANCELLED",
        "CANCELLED",
        "0",
    )


def test_a_job_that_only_looks_at_a_run_ends_with_its_own_code(slurm, out):
    """By the sbatch file and submitted: no outcome tells of it. Cancelled, it ends at the word, not by force."""
    looking = slurm.submit("-model looking -cpu 1 -debug -limit_steps 1000 -slow_s 2")
    until(lambda: "step 1 " in slurm.log("looking")(), what=slurm.log("looking"))
    slurm.do("scancel", looking)
    assert slurm.ended(looking)["JobState"] == "CANCELLED"
    until(lambda: ": Terminated" in slurm.log("looking")(), what=slurm.log("looking"))
    words = f"-dataset slow -cpu=2 -debug -out {out} -model only_looks".split()  # more than it was given CPUs
    by_file = slurm.do(
        "sbatch",
        "--parsable",
        "-N2",
        f"--output={out}/by_file.log",
        "scripts/slurm/train.sbatch",
        *words,
        PYTHON=sys.executable,
    ).strip()
    submitted, wrong = slurm.submit("-model submitted -debug"), slurm.submit("-model none -eval -cpu 1", nodes=1)
    assert slurm.ended(by_file)["JobState"] == "COMPLETED", slurm.log("by_file")()
    assert slurm.ended(submitted)["JobState"] == "COMPLETED", slurm.log("submitted")()
    assert (slurm.ended(wrong)["JobState"], slurm.job(wrong)["ExitCode"]) == ("FAILED", "2:0"), slurm.log("none")()
    assert not any("was lost" in slurm.log(name)() for name in ("by_file", "submitted", "none", "looking"))
    assert "nanobind" not in slurm.log("none")(), "messages on leaks follow the one line that counts"


def test_a_run_whose_task_is_killed_is_started_again(slurm, out):
    job = slurm.submit("-model torn -cpu 1 -slow_s 0.1")
    slurm.trains("torn", step=24)
    until(lambda: (out / "torn" / "checkpoints" / "latest").exists())
    os.kill(slurm.pid_of(job, rank=1), signal.SIGKILL)
    ends = slurm.ended(job)
    assert (ends["JobState"], ends["Restarts"]) == ("COMPLETED", "1"), slurm.log("torn")()
    assert outcome(out / "torn")["state"] == "finished"
    assert "a process was lost: job" in slurm.log("torn")()


def test_a_run_that_crashes_again_and_again_ends(limited):
    """Killed after its first checkpoint, then at the first step of every start."""
    slurm, _, job = limited
    ends = slurm.ended(job)
    assert (ends["JobState"], ends["Restarts"]) == ("FAILED", "2"), slurm.log("doomed")()
    assert "not requeued: a process was lost, and two starts in a row gained nothing" in slurm.log("doomed")()


def test_two_jobs_share_a_node_and_nothing_of_where_they_were_submitted(slurm, out):
    leaking = {
        "MASTER_PORT": "1",
        "WORLD_SIZE": "9",
        "SLURM_RESTART_COUNT": "7",
        "SLURM_JOB_ID": "99",
        "SBATCH_PARTITION": "none",
        "SLURM_CPU_BIND": "none",
    }
    words = "-slurm_nodelist n2 -epochs 1 -slow_s 0.1"
    jobs = [slurm.submit(f"-model beside_{one} {words}", nodes=1, **leaking) for one in (1, 2)]
    ends = [slurm.ended(job) for job in jobs]
    assert [(end["JobState"], end["NodeList"]) for end in ends] == [("COMPLETED", "n2")] * 2, slurm.log("beside_1")()
    assert ends[1]["StartTime"] < ends[0]["EndTime"], "they did not run side by side"
    starts = json.loads((out / "beside_1" / "slurm" / f"{jobs[0]}.json").read_text())["starts"]
    assert [start["restart"] for start in starts] == [0]


def test_a_dry_run_shows_the_script_and_leaves_nothing(slurm, out):
    words = (
        "-slurm_dry -slurm_ngpus 2 -slurm_partition general -slurm_timeout 90 -slurm_cpus 3 "
        "-slurm_arg account=me -slurm_arg mem=1536M -slurm_signal_s 60 "
        "-slurm_arg exclusive -slurm_arg comment=a'b -model dry"
    )
    said = slurm.here(words)
    options = {line.removeprefix("#SBATCH --") for line in said.splitlines() if line.startswith("#SBATCH")}
    assert options >= {
        "nodes=1",
        "gpus-per-node=2",
        "ntasks-per-node=2",
        "partition=general",
        "time=90",
        "cpus-per-task=3",
        "account=me",
        "mem=1536M",
        "signal=USR2@60",
        "exclusive",
        "requeue",
        "open-mode=append",
        "job-name=dry",
        """comment='a'"'"'b'""",
    }
    assert "--kill-on-bad-exit=1" in said
    assert "Job " in said and " to start at " in said
    assert not (out / "dry").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-slurm_partition gpus", "-slurm: sbatch refused the job: sbatch: error: invalid partition specified: gpus"),
        ("-gpus 0", "-gpus 0 with -slurm: Slurm says which GPUs"),
    ],
)
def test_what_cannot_be_had_is_one_line(slurm, words, message):
    said = slurm.here(f"-slurm -slurm_cpus 1 -model none {words}", wanted=2)
    assert message in said and said.count("\n") == 1


def test_no_sbatch_is_one_line(slurm):
    said = slurm.here("-slurm", wanted=2, PATH="/nowhere")
    assert said.count("\n") == 1 and "there is no sbatch on this machine" in said


def test_an_allocation_is_used_by_srun_and_left_alone_by_python(slurm, out):
    """Under srun one run of two processes; typed without it, one process here, and -reset each time."""
    words = f"train.py -dataset slow {SHORT} -out {out} -model by_srun"
    again = f"{sys.executable} {words} -reset"
    script = f"srun --cpus-per-task=1 {sys.executable} {words}; {again}; {again}"
    said = slurm.do("salloc", "-N2", "--ntasks-per-node=1", "-J", "mine", "bash", "-c", script)
    assert said.count("finished:") == 3, said
    kept = [(old / "logs" / "rank_1.log").exists() for old in sorted((out / ".old").glob("by_srun-*"))]
    assert kept == [True, False] and not (out / "by_srun" / "logs" / "rank_1.log").exists()


def test_a_run_that_its_time_limit_ends_several_times_finishes(limited, out):
    slurm, job, _ = limited
    ends = slurm.ended(job)
    assert ends["JobState"] == "COMPLETED" and int(ends["Restarts"]) >= 2, slurm.log("limited")()
    assert "not requeued" not in slurm.log("limited")()
    starts = json.loads((out / "limited" / "slurm" / f"{job}.json").read_text())["starts"]
    assert [start.get("requeued") for start in starts] == ["time limit"] * int(ends["Restarts"]) + [None]
    assert steps_of(out / "limited") == sorted(set(steps_of(out / "limited")))
