"""Runs on a real Slurm of two nodes: submitted, preempted, timed out, cancelled, killed; always the same weights."""

import json
import re
import sys
import time

import needs
import pytest
from cluster import DATASET, ENABLED_BY, Cluster, steps_of
from processes import copy_of_the_code, until
from runs import distance, outcome

from lib.utils.checkpoint import run_folder

pytestmark = needs.require(ENABLED_BY)
SHORT = "-cpu 1 -epochs 1 -slow_s 0.01"
LONG = "-slow_s 0.15 -threads 1"  # 60 steps in 9 s


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    folder = copy_of_the_code(tmp_path_factory.mktemp("code"))
    (folder / "lib" / "dataset" / "slow.py").write_text(DATASET)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def slurm(code, out):
    """A Slurm with default settings: a preemption sends SIGTERM only."""
    with Cluster(code, out, GRACE_S=25, KILL_WAIT_S=25) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def background_jobs(code, out):
    """A run that reaches its time limit several times, and one that crashes, in the background of the other tests."""
    with Cluster(code, out) as one:
        job = one.submit("-model limited -cpu 1 -slow_s 1.7 -slurm_timeout 1 -slurm_signal_s 1")
        yield one, job, one.submit("-model doomed -cpu 1 -slow_s 0.1 -slow_deadly 64")


@pytest.fixture(scope="module")
def uninterrupted(slurm, out):
    output = slurm.train(f"-slurm -slurm_nnodes 2 -cpu 2 -slurm_cpus 1 -dataset slow {LONG} -model calm")
    job = re.search(r"submitted: +job (\d+)", output)[1]
    assert f"{job}_0_log.out" in output and f"scancel {job}" in output
    assert slurm.wait_for_end(job)["JobState"] == "COMPLETED", slurm.log("calm")()
    return out / "calm"


def test_a_preempted_run_resumes_with_the_same_bits_on_a_slurm_with_default_settings(slurm, uninterrupted, code, out):
    """Only SIGTERM is sent. The run continues with the code that was submitted, and does not apply -reset again."""
    (out / "moved").mkdir()
    (out / "moved" / "old").touch()
    job = slurm.submit(f"-model moved -cpu 1 {LONG} -reset")
    source = code / "train.py"
    slurm.wait_until_it_trains("moved", step=6)
    text = source.read_text()
    source.write_text("raise SystemExit('not the code that was submitted')")
    slurm.submit_urgent(1)
    job_info = slurm.wait_for_end(job)
    source.write_text(text)
    assert (job_info["JobState"], job_info["Restarts"]) == ("COMPLETED", "1"), slurm.log("moved")()
    assert distance(out / "moved", uninterrupted) == 0.0 and steps_of(out / "moved") == steps_of(uninterrupted)
    assert len(list((out / ".old").glob("moved-*"))) == 1


def test_preempted_runs_are_requeued_once_if_slurm_sends_two_signals(code, out):
    """One run is submitted by -slurm, one by the sbatch file with torchrun; each waits for the other one's start."""
    wait = f"{LONG} -slow_wait 23"  # 6 readings at the start, and 17 in the training
    flags = f"-dataset slow -cpu 1 {wait} -out {out} -model by_file".split()
    command = "sbatch", "--parsable", "-N2", f"--output={out}/by_file.log", "scripts/slurm/train.sbatch"
    with Cluster(code, out, GRACE_S=25, USER_SIGNAL=1) as slurm:  # preemptions also send the signal of --signal
        output = slurm.run(*command, *flags, PYTHON=sys.executable)
        jobs = {"by_slurm": slurm.submit(f"-model by_slurm -cpu 1 {wait}"), "by_file": output.strip()}
        for name in jobs:
            slurm.wait_until_it_trains(name, step=2)
        slurm.submit_urgent(1)
        (out / "go").touch()
        slurm.train("-cpu 2 -dataset slow -slow_s 0 -model here_2", OMP_NUM_THREADS="1")
        for name, job in jobs.items():
            job_info = slurm.wait_for_end(job)
            assert (job_info["JobState"], job_info["Restarts"]) == ("COMPLETED", "1"), slurm.log(name)()
            assert distance(out / name, out / "here_2") == 0.0


def test_a_lost_task_costs_no_step(slurm, uninterrupted, out):
    job_info = slurm.wait_for_end(slurm.submit(f"-model one_lost -cpu 1 {LONG} -slow_lost 50"))
    assert (job_info["JobState"], job_info["Restarts"]) == ("COMPLETED", "1"), slurm.log("one_lost")()
    log = slurm.log("one_lost")()
    saved, resumed = (re.search(text, log) for text in (r"step (\d+) is saved", r"resuming .*step (\d+)"))
    assert saved and resumed and saved[1] == resumed[1] and int(saved[1]) % 20, log
    assert distance(out / "one_lost", uninterrupted) == 0.0


def test_a_cancelled_run_is_saved_and_is_not_requeued(slurm, out):
    job = slurm.submit(f"-model given_up -cpu 1 {LONG}")
    slurm.wait_until_it_trains("given_up", step=2)
    assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.run("scancel", job)
    job_info = slurm.wait_for_end(job)
    until(lambda: outcome(out / "given_up").get("state") == "stopped", what=slurm.log("given_up"))
    assert outcome(out / "given_up")["step"] >= 2 and run_folder.list_checkpoints(out / "given_up" / "checkpoints")
    time.sleep(2)
    assert job_info["JobState"] == slurm.job(job)["JobState"] == "CANCELLED" and slurm.job(job)["Restarts"] == "0"


def test_a_job_that_does_not_train_ends_with_its_own_exit_code(slurm, out):
    """With -debug and -eval there is no outcome.json. If cancelled, the job ends at SIGTERM, without SIGKILL."""
    debug_job = slurm.submit("-model debug_run -cpu 1 -debug -limit_steps 1000 -slow_s 2")
    until(lambda: "step 1 " in slurm.log("debug_run")(), what=slurm.log("debug_run"))
    slurm.run("scancel", debug_job)
    assert slurm.wait_for_end(debug_job)["JobState"] == "CANCELLED"
    until(lambda: ": Terminated" in slurm.log("debug_run")(), what=slurm.log("debug_run"))
    flags = f"-dataset slow -cpu=2 -debug -out {out} -model no_training".split()  # more processes than CPUs
    command = "sbatch", "--parsable", "-N2", f"--output={out}/debugged.log", "scripts/slurm/train.sbatch"
    output = slurm.run(*command, *flags, PYTHON=sys.executable)
    debugged, wrong = output.strip(), slurm.submit("-model none -eval -cpu 1", nodes=1)
    assert slurm.wait_for_end(debugged)["JobState"] == "COMPLETED", slurm.log("debugged")()
    assert (slurm.wait_for_end(wrong)["JobState"], slurm.job(wrong)["ExitCode"]) == ("FAILED", "2:0")
    assert not any("was lost" in slurm.log(name)() for name in ("debugged", "none", "debug_run"))
    assert "nanobind" not in slurm.log("none")(), "messages about leaks must not follow the error"


def test_a_run_that_crashes_at_every_start_is_not_requeued_forever(background_jobs):
    """It is killed after its first checkpoint, then at the first step of every start."""
    slurm, _, job = background_jobs
    job_info = slurm.wait_for_end(job)
    assert (job_info["JobState"], job_info["Restarts"]) == ("FAILED", "2"), slurm.log("doomed")()
    assert "not requeued: a process was lost, and two starts in a row gained nothing" in slurm.log("doomed")()


def test_two_jobs_run_on_one_node_and_take_nothing_from_the_environment_of_the_submission(slurm, out):
    leaking = {"MASTER_PORT": "1", "WORLD_SIZE": "9", "SLURM_RESTART_COUNT": "7", "SLURM_JOB_ID": "99"}
    leaking |= {"SBATCH_PARTITION": "none", "SLURM_CPU_BIND": "none"}
    flags = "-slurm_nodelist n2 -cpu 1 -epochs 1 -slow_s 0.1"
    jobs = [slurm.submit(f"-model same_node_{one} {flags}", nodes=1, **leaking) for one in (1, 2)]
    job_info = [slurm.wait_for_end(job) for job in jobs]
    assert [(info["JobState"], info["NodeList"]) for info in job_info] == [("COMPLETED", "n2")] * 2, jobs
    assert job_info[1]["StartTime"] < job_info[0]["EndTime"], "they did not run side by side"
    assert json.loads((out / "same_node_1" / "slurm" / f"{jobs[0]}.json").read_text())["restart"] == 0


def test_slurm_dry_prints_the_script_and_writes_nothing(slurm, out):
    flags = "-slurm_dry -slurm_ngpus 2 -slurm_partition general -slurm_timeout 90 -slurm_cpus 3 -slurm_signal_s 60 "
    flags += "-slurm_arg account=me -slurm_arg mem=1536M -slurm_arg exclusive -slurm_arg comment=a'b -model dry"
    output = slurm.run_here(flags)
    options = {line.removeprefix("#SBATCH --") for line in output.splitlines() if line.startswith("#SBATCH")}
    wanted = "nodes=1 gpus-per-node=2 ntasks-per-node=2 partition=general time=90 cpus-per-task=3 account=me"
    wanted += " mem=1536M signal=USR2@60 exclusive requeue open-mode=append job-name=dry"
    assert options >= {*wanted.split(), """#SBATCH '--comment=a'"'"'b'"""}
    assert "--wait=61" in output and "Job " in output and " to start at " in output
    assert not (out / "dry").exists()


def test_an_array_runs_each_trial_of_a_sweep(slurm, out):
    grid = f"{sys.executable} scripts/sweep.py -dataset slow {SHORT} -seed 1,2 -out {out}"
    array = ["sbatch", "-N1", "--array=1-2", "--wait", "-o", out / "array_%a.log"]
    slurm.run(*array, "--wrap", f"{grid} -only $SLURM_ARRAY_TASK_ID")
    assert re.search(r"^all +.* 2 +finished ", slurm.run(*grid.split(), "-show"), re.M)


def test_in_an_allocation_srun_starts_one_run_and_plain_python_one_process(slurm, out):
    flags = f"train.py -dataset slow {SHORT} -out {out} -model by_srun"
    script = f"srun --cpus-per-task=1 {sys.executable} {flags}; {sys.executable} {flags} -reset"
    output = slurm.run("salloc", "-N2", "--ntasks-per-node=1", "-J", "mine", "bash", "-c", script)
    assert output.count("finished:") == 2, output
    [old] = (out / ".old").glob("by_srun-*")
    assert (old / "logs" / "rank_1.log").exists() and not (out / "by_srun" / "logs" / "rank_1.log").exists()


def test_a_run_that_reaches_its_time_limit_several_times_finishes(background_jobs, out):
    slurm, job, _ = background_jobs
    job_info = slurm.wait_for_end(job, limit=480)  # Slurm may send a signal 30 s too early
    assert job_info["JobState"] == "COMPLETED" and int(job_info["Restarts"]) >= 2, slurm.log("limited")()
    assert slurm.log("limited")().count(f"time limit: job {job} is requeued") == int(job_info["Restarts"])
    assert steps_of(out / "limited") == sorted(set(steps_of(out / "limited")))
