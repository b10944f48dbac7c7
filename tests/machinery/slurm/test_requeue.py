"""What a task of a Slurm job decides, tested without Slurm: by the output and variables of a real one."""

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_line import parsed, usage_error
from processes import fake_program, python

from lib import launch
from lib.launch import local, slurm
from lib.utils import distributed
from lib.utils.checkpoint import run_folder
from lib.utils.errors import FINISHED, STOPPED, UsageError
from scripts.slurm import requeue

START = {"restart": 0, "checkpoint": "000002_step_20", "outcome": 1, "in_vain": False}
RUNNING = {"JobState": "RUNNING", "StartTime": "2026-11-21T03:22:53", "PreemptTime": "None"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-11-21T03:22:56"}


def verdict_for(state="stopped", *, job=RUNNING, gained=True, in_vain=False, recorded=(), **facts):
    """Whether a job is requeued, and why. state: None if there is no outcome.json; `facts`: further entries of it."""
    start = {**START, "in_vain": in_vain, **dict(recorded)}
    return requeue.verdict(start, {"state": state, "reason": "a sentence", **facts} if state else {}, gained, job)


def test_a_preemption_is_distinguished_from_a_cancellation_even_if_the_run_could_not_save_in_time():
    """Then its outcome.json says that it runs, or that a process lost its peer, or does not exist yet."""
    assert verdict_for(job=PREEMPTED) == (True, "preempted")
    assert verdict_for(job={**PREEMPTED, "JobState": "SIGNALING"}) == (True, "preempted")
    for state in ("stopped", "running", "failed", None):
        assert verdict_for(state, lost_peer=True, job=PREEMPTED, gained=False, in_vain=True) == (True, "preempted")
    assert "the run failed" in verdict_for("failed", job=PREEMPTED)[1]
    assert "was refused" in verdict_for(None, recorded={"refused": "-epochs 0"}, job=PREEMPTED)[1]
    assert "asked to stop" in verdict_for(signal="SIGTERM")[1]
    for state in ("CANCELLED", "COMPLETING"):
        for why in ("SIGTERM", "SIGUSR2"):
            assert "ended from outside" in verdict_for(signal=why, job={**RUNNING, "JobState": state})[1]
    before = {**RUNNING, "PreemptTime": "2026-11-21T03:11:00"}
    assert "asked to stop" in verdict_for(job=before)[1], "a preemption before this start does not count"
    assert "asked to stop" in verdict_for(job={})[1], "Slurm does not answer, and nothing indicates a preemption"


def test_time_limits_and_lost_processes_are_requeued_and_failures_are_not():
    assert verdict_for(signal="SIGUSR2") == verdict_for(signal="SIGUSR2", job={}) == (True, "time limit")
    assert verdict_for("failed", lost_peer=True) == verdict_for("running") == (True, "a process was lost")
    assert verdict_for("failed", reason="rank 1: no", lost_peer=False) == (False, "the run failed (rank 1: no)")
    assert verdict_for("finished") == (False, "the run is finished")
    error = {"error": "ValueError: no", "may_pass": False}
    assert verdict_for(None, recorded=error) == (False, "the run failed (ValueError: no)")
    assert verdict_for(None, recorded={**error, "may_pass": True})[0] and verdict_for("running", recorded=error)[0]


def test_the_exception_that_ends_a_start_is_recorded_and_errors_that_mean_a_lost_peer_are(stopped, monkeypatch):
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5")
    aborted = torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1")
    others = ConnectionResetError(104, "of a tracker's server"), RuntimeError("data/igloo/1.jpg is no image")
    assert [*map(run_folder.is_lost_peer, (closed, aborted, *others))] == [True, True, False, False]
    monkeypatch.setenv(requeue.HISTORY, str(stopped))
    for error in (torch.distributed.DistBackendError("gone"), ValueError("no class"), OSError("later")):
        with pytest.raises(type(error)):
            requeue.recorded(mock.Mock(side_effect=error))()
    start = json.loads(stopped.read_text())
    assert (start["error"], start["may_pass"], requeue.may_pass(error)) == ("ValueError: no class", False, True)


def test_a_second_start_in_a_row_without_progress_is_the_last():
    for why, facts in (("time limit", {"state": "stopped", "signal": "SIGUSR2"}), ("a process was lost", {})):
        facts = {"state": "running", **facts}
        assert verdict_for(**facts, gained=False) == (True, why)
        assert verdict_for(**facts, gained=True, in_vain=True) == (True, why)
        wanted = (False, f"{why}, and two starts in a row gained nothing")
        assert verdict_for(**facts, gained=False, in_vain=True) == wanted


def test_a_refused_start_is_not_requeued_whatever_the_outcome_of_other_starts(stopped, monkeypatch, capsys):
    """A second job for a run that is in use and saves; and one with a changed flag after a stopped start."""
    fake_scontrol(stopped.parent, "JobState=RUNNING PreemptTime=None")
    monkeypatch.setenv(requeue.HISTORY, str(stopped))
    assert local.report_usage_error(UsageError("-model run:\nin use by job 11")) == 2
    assert capsys.readouterr().err == "train.py: -model run: in use by job 11\n"
    run = stopped.parent / "run"
    for other in ({"state": "running"}, {"state": "stopped", "signal": "SIGUSR2"}, {"state": "finished"}):
        write_outcome(run, "11.0", {**other})
        assert requeue.finish_job(stopped, 1) == 2
    assert "requeue" not in (stopped.parent / "calls").read_text()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    requeue.record_start(stopped, run)
    assert requeue.finish_job(stopped, 137) == 0, "a process was lost"
    assert (stopped.parent / "calls").read_text().splitlines()[-1] == "requeue 12"


def test_only_the_interrupted_task_of_a_job_array_is_requeued(stopped, monkeypatch):
    """The last task has the job id of the array, which to Slurm means all its tasks."""
    fake_scontrol(stopped.parent, "JobState=RUNNING PreemptTime=None")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert requeue.finish_job(stopped, 0) == 0
    assert (stopped.parent / "calls").read_text().splitlines() == ["show job -o 12_2", "requeue 12_2"]


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The history of a job that its time limit stopped. It has no scontrol, unless a test makes one."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    run, history = tmp_path / "run", tmp_path / "12.json"
    requeue.record_start(history, run)
    (run / "checkpoints" / "000001_step_9").mkdir(parents=True)
    write_outcome(run, "12.0", {"state": "stopped", "signal": "SIGUSR2"})
    return history


def write_outcome(run: Path, launch: str, facts: dict):
    (run / "outcome.json").write_text(json.dumps({**facts, "launch": launch, "written": time.time_ns()}))


def fake_scontrol(folder: Path, job: str):
    """Make an scontrol that answers with this job and appends its arguments to the file `calls`."""
    fake_program(folder, "scontrol", f'echo "$@" >> {folder}/calls\necho "JobId=12 {job}"')


def test_a_job_is_requeued_once_for_each_start_and_without_scontrol_the_command_is_printed(stopped, monkeypatch):
    said = python("-m", "scripts.slurm.requeue", stopped, "0", code=75, env=dict(os.environ))
    assert "type: scontrol requeue 12" in said and "requeued" not in json.loads(stopped.read_text())
    fake_scontrol(stopped.parent, "JobState=RUNNING PreemptTime=None")
    assert requeue.finish_job(stopped, 0) == 0
    assert (stopped.parent / "calls").read_text().splitlines()[-1] == "requeue 12"
    assert json.loads(stopped.read_text())["requeued"] == "time limit"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue.finish_job(stopped, 1) == 1, "the beginning of this start was not recorded"
    for count, code in enumerate((0, 137), 1):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        requeue.record_start(stopped, stopped.parent / "run")
        assert requeue.finish_job(stopped, 137) == code, "no progress in the second start either"
    write_outcome(stopped.parent / "run", "12.0", {"state": "finished"})
    assert requeue.finish_job(stopped, 137) == 0


@pytest.mark.parametrize(("seen", "of_job", "ordinals"), [(4, "", "0123"), (1, "4", "0000"), (2, "4", "0101")])
def test_each_task_uses_its_own_gpu_of_those_that_slurm_makes_visible(monkeypatch, seen, of_job, ordinals):
    """With gpus-per-node all are visible; with gpus-per-task or gpu-bind only the task's own, counted from 0."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", of_job)
    assert "".join(str(distributed.pick_device(parsed(""), rank).index) for rank in range(4)) == ordinals
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    said = usage_error(distributed.pick_device, parsed(""), seen)
    assert f"local rank {seen} has no device: {seen} are visible" in said


def test_a_run_that_should_have_a_gpu_is_refused_if_it_cannot_use_one(monkeypatch):
    """The GPU is expected by -gpus, by the driver, which counts one that CUDA cannot start, or by Slurm."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert distributed.pick_device(parsed(""), 0).type == "cpu"
    with pytest.raises(UsageError, match=r"-gpus 0: .* cannot use the GPUs of .*-cpu N"):
        distributed.pick_device(parsed("-gpus 0"), 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert "cannot use the GPUs" in usage_error(distributed.pick_device, parsed(""), 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "gpu:4")
    assert "cannot use the GPUs" in usage_error(distributed.pick_device, parsed(""), 0)
    assert distributed.pick_device(parsed("-cpu 1"), 0).type == "cpu"


def test_one_task_starts_its_own_processes(task, monkeypatch):
    assert launch.is_launched()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not launch.is_launched()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.delenv("SLURM_LOCALID")
    assert not launch.is_launched(), "variables that were left over"


@pytest.fixture
def task():
    """The environment of the first of three tasks on one node, restored after the test."""
    ids = {"JOB_ID": "5", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_NUM_TASKS": "3"}
    ids |= {"GTIDS": "0,1,2", "STEP_NODELIST": "n1"}
    with mock.patch.dict(os.environ, {f"SLURM_{name}": value for name, value in ids.items()}):
        yield


def test_a_task_finds_its_rank_and_a_port_of_its_own(task, monkeypatch, tmp_path):
    seen, names = [], ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    monkeypatch.setattr(local, "call_target", lambda target, args: seen.append(dict(os.environ)) or 0)
    for name, value in (("SLURM_JOB_ID", "6"), ("SLURM_STEP_ID", "1"), ("SLURM_RESTART_COUNT", "1")):
        assert slurm.run_task(parsed(f"-out {tmp_path}"), "train:train") == 0
        monkeypatch.setenv(name, value)
    assert [seen[0][name] for name in names] == ["0", "0", "3", "3", "127.0.0.1", "5.0"]
    assert len({one["MASTER_PORT"] for one in seen}) == 3


def test_slurm_tasks_meet_at_the_steps_first_node_by_its_name_on_the_fast_network(task, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "jwb[0001-0003]")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "jwb[0002-0003]")
    for system, name in (("juwelsbooster", "jwb0002i"), ("elsewhere", "jwb0002")):
        monkeypatch.setenv("SYSTEMNAME", system)
        assert slurm.rendezvous_address()[0] == name
    monkeypatch.setenv("SLURM_STEP_NODELIST", "jwb0003")
    assert slurm.rendezvous_address()[0] == "127.0.0.1", "a single node needs no network"


def test_modules_that_may_receive_a_signal_early_are_imported_without_torch():
    """They handle a signal from the first moment; FSDP's import, which takes long, is needed by no checkpoint."""
    checkpoint = "lib.utils.checkpoint"
    for modules, avoided in (
        (f"lib.launch.slurm, scripts.slurm.requeue, {checkpoint}.run_folder, {checkpoint}.atomic", "torch"),
        ("scripts.status", "torch"),
        (f"{checkpoint}.manager, {checkpoint}.resume, {checkpoint}.weights", "torch.distributed.tensor"),
    ):
        python("-c", f"import {modules}, sys; sys.exit({avoided!r} in sys.modules)")


def test_only_rank_0_of_a_stopped_job_exits_with_75(task, monkeypatch, tmp_path):
    """srun would kill the other tasks at once."""
    monkeypatch.setattr(local, "call_target", lambda target, args: STOPPED)
    codes = []
    for rank in range(3):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        codes.append(slurm.run_task(parsed(f"-out {tmp_path}"), "train:train"))
    assert codes == [STOPPED, FINISHED, FINISHED]
