"""Nodes that share no disk: each has the whole state, and sends it to others; one id of a launch, the same flags."""

import os
import shutil

import pytest
import saves
from runs import distance, outcome, run, same_tensors
from saves import SMALL, log_of, names

import train
from lib import config
from lib.utils import distributed, watchdog
from lib.utils.checkpoint import run_folder

pytestmark = pytest.mark.usefixtures("small_plugins")


def _set_flags_by_rank(monkeypatch, change):
    """Make every process call change(rank, args), which returns flags for this rank, before it runs."""
    real = train.train

    def differing(args):
        mine = config.Args()
        vars(mine).update({**vars(args), **(change(int(os.environ["RANK"]), args) or {})})
        return real(mine)

    monkeypatch.setattr(train, "train", differing)


def _give_each_process_a_disk(monkeypatch):
    """Make every process a node with a folder OUT/nodeR of its own."""

    def node(rank, args):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        return {"out": f"{args.out}/node{rank}"}

    _set_flags_by_rank(monkeypatch, node)
    monkeypatch.setattr(run_folder, "PATIENCE_S", 0.0)


def _nodes(out):
    return [out / f"node{rank}" / "few_norm_net" for rank in range(2)]


def test_a_damaged_or_missing_checkpoint_of_a_node_is_sent_by_another(finished_run, tmp_path, monkeypatch):
    _give_each_process_a_disk(monkeypatch)
    one, two = _nodes(tmp_path)
    saves.run_until(tmp_path, f"{SMALL} -cpu 2", 7)
    assert [outcome(node)["state"] for node in (one, two)] == ["stopped"] * 2
    shard = next((two / "checkpoints" / names(two)[0]).glob("shard_*"))
    shard.write_bytes(shard.read_bytes()[:-8])
    saves.run_until(tmp_path, f"{SMALL} -cpu 3", 9)
    assert f"rank 1: {shard}: " in log_of(two, 1) and "; rank 0 sends it" in log_of(two, 1)
    assert "an older checkpoint is taken" not in log_of(two, 1)
    shutil.rmtree(one / "checkpoints" / names(one)[0])
    run(tmp_path, f"{SMALL} -cpu 2")
    assert distance(one, finished_run) < 1e-5 and "resuming from" in log_of(one)
    assert [outcome(node)["state"] for node in (one, two)] == ["finished"] * 2


def test_the_bits_are_the_same_after_a_node_is_replaced_by_an_empty_or_old_one(finished_run, tmp_path, monkeypatch):
    _give_each_process_a_disk(monkeypatch)
    one, two = _nodes(tmp_path)
    saves.run_until(tmp_path, f"{SMALL} -cpu 2", 3)
    shutil.copytree(two, tmp_path / "past", symlinks=True)
    shutil.rmtree(two.parent)
    for last, stop, node in ((3, 5, one), (5, 6, two), (6, 9, one)):
        saves.run_until(tmp_path, f"{SMALL} -cpu 2", stop)
        truth = saves.tensors(finished_run / "checkpoints" / saves.at_step(finished_run, stop))
        for rank, each in enumerate((one, two)):
            assert f"_step_{last}: epoch" in log_of(each, rank).rpartition("resuming from ")[2]
            assert same_tensors(saves.tensors(each / "checkpoints" / saves.at_step(each, stop)), truth)
        shutil.rmtree(node.parent)  # the next start finds an empty machine
        if node == two:
            shutil.copytree(tmp_path / "past", node, symlinks=True)
    run(tmp_path, f"{SMALL} -cpu 2")
    assert distance(one, finished_run) == 0.0
    assert [outcome(one)[name] for name in ("state", "step", "samples")] == ["finished", 12, 150]
    truth, *tensors = [{**saves.bits(each), "figures": None} for each in (finished_run, one, two)]
    assert tensors == [truth, truth]
    for name in ("best", "final"):
        assert len({(each / name / "weights.safetensors").read_bytes() for each in (one, two)}) == 1, name
    assert f"out: {tmp_path}/node1" in (two / "config.yaml").read_text()


def test_fsdp_without_a_shared_disk_is_refused_before_a_checkpoint_is_sent(tmp_path, monkeypatch, refused):
    _give_each_process_a_disk(monkeypatch)
    run(tmp_path, f"{SMALL} -cpu 2 -limit_steps 3", wanted=75)
    shutil.rmtree(_nodes(tmp_path)[1])
    assert "a sharded model needs a folder that all nodes share" in refused(f"{SMALL} -cpu 2 -parallel fsdp")


def test_a_shared_disk_is_detected(tmp_path, monkeypatch):
    _give_each_process_a_disk(monkeypatch)
    for node in ("node1", "node2"):
        (tmp_path / node).symlink_to(tmp_path / "node0")
    (tmp_path / "node0").mkdir()
    run(tmp_path, f"{SMALL} -cpu 3")
    folder = _nodes(tmp_path)[0]
    newest = folder / "checkpoints" / names(folder)[0]
    assert len(list(newest.glob("shard_*"))) == 1, "rank 0 writes what all ranks have"
    assert not list(folder.rglob("*.partial")) and not list((tmp_path / "node0").glob("*.partial"))


def test_a_restart_of_nodes_with_different_launch_ids_does_not_apply_reset_again(tmp_path, monkeypatch):
    """This happens under torchrun on several nodes without --rdzv-id; the first start fails on the other node."""
    _set_flags_by_rank(monkeypatch, lambda rank, args: os.environ.update(TORCHELASTIC_RUN_ID=f"node{rank}-1"))

    def fail(folder):
        if os.environ["RANK"] == "1":
            raise ValueError("a broken sample")

    flags = f"{SMALL} -cpu 2 -reset -save_every 2steps"
    with monkeypatch.context() as patch:
        saves.after_step(patch, 6, fail)
        folder = run(tmp_path, flags, wanted=1)
    facts = {"state": "failed", "reason": "rank 1: ValueError: a broken sample", "lost_peer": False}
    assert outcome(folder).items() >= {**facts, "launch": "node0-1"}.items()
    run(tmp_path, flags)
    assert "resuming from" in log_of(folder) and not (tmp_path / ".old").exists()
    monkeypatch.undo()
    run(tmp_path, flags)
    assert (tmp_path / ".old").exists(), "a new command applies -reset"


@pytest.mark.parametrize("more", [{}, {"SLURM_JOB_ID": "7"}, {"PET_NNODES": "1:4"}])
def test_each_command_of_torchrun_applies_reset_also_under_one_id(more, tmp_path, monkeypatch, caplog):
    """By the agent that starts it; where agents come and go, -reset is not applied again, and a line says so."""
    usual = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in {**usual, **more}.items():
        monkeypatch.setenv(name, value)
    for agent in (11, 11, 12):
        monkeypatch.setattr(distributed.os, "getppid", lambda agent=agent: agent)
        monkeypatch.setattr(watchdog, "PARENT", agent)
        run(tmp_path, f"{SMALL} -reset -epochs 1 -threads 1")  # with more, later forks of this process hang
    assert len(list(tmp_path.glob(".old/*"))) == (0 if "PET_NNODES" in more else 1)
    assert caplog.text.count("another --rdzv_id") == (2 if "PET_NNODES" in more else 1)


def test_a_flag_that_differs_between_nodes_is_refused_with_both_values(tmp_path, monkeypatch, refused):
    _set_flags_by_rank(monkeypatch, lambda rank, args: {"lr_start": 0.5, "out": f"{tmp_path}/own"} if rank else {})
    message = refused(f"{SMALL} -cpu 3")
    assert message == "train.py: -lr_start is 0.5 on rank 1 and 0.001 on rank 0: give all processes the same"
    assert not list(tmp_path.iterdir()), "something was written"
