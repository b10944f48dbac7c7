"""Nodes without a shared disk: each holds the whole state, and who lost it is sent it."""

import json
import os
import shutil

import pytest
import saves
import torch
from runs import distance, plugins, run
from saves import SMALL, everything, log_of, names

import train
from lib import config


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    with plugins(**saves.PLUGINS):
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run on two processes with all its checkpoints, one a step."""
    out = tmp_path_factory.mktemp("done")
    return run(out, f"{SMALL} -cpu 2 -save_every 1steps -keep_last 99")


# Nodes with a disk of their own


def _on_nodes(monkeypatch, patience=0.0):
    """Every process a node, with a folder OUT/nodeR of its own."""
    from lib.utils import disks

    real = train.run

    def at(args):
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        mine = config.Args()
        vars(mine).update({**vars(args), "out": f"{args.out}/node{rank}"})
        return real(mine)

    monkeypatch.setattr(train, "run", at)
    monkeypatch.setattr(disks, "PATIENCE_S", patience)


def _nodes(out, words, wanted=0):
    run(out, words, wanted)
    return [out / f"node{rank}" / "few_norm_net" for rank in range(3)]


def test_nodes_that_share_no_disk_each_hold_all_and_send_it_to_those_that_lost_theirs(done, tmp_path, monkeypatch):
    _on_nodes(monkeypatch)
    with monkeypatch.context() as patch:
        saves.stop_at(patch, 5)
        one, two, _ = _nodes(tmp_path, f"{SMALL} -cpu 2", wanted=75)
    held = [saves.tensors(node / "checkpoints" / names(node)[0]) for node in (one, two)]
    truth = saves.tensors(done / "checkpoints" / "step_00000005")
    for whole in held:
        assert whole.keys() == truth.keys() and all(torch.equal(whole[name], truth[name]) for name in truth)
    shutil.rmtree(one)
    with monkeypatch.context() as patch:
        saves.stop_at(patch, 7)
        _nodes(tmp_path, f"{SMALL} -cpu 2", wanted=75)
    assert names(one)[0] == names(two)[0] == "step_00000007"
    shard = next((two / "checkpoints" / "step_00000007").glob("shard_*"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with monkeypatch.context() as patch:
        saves.stop_at(patch, 9)
        _nodes(tmp_path, f"{SMALL} -cpu 3", wanted=75)
    assert "step_00000007.corrupt" in everything(two) and "set aside" in log_of(two, 1)
    shutil.rmtree(one / "checkpoints" / names(one)[0])
    one, two, _ = _nodes(tmp_path, f"{SMALL} -cpu 2")
    assert distance(one, done) < 1e-5 and "going on from" in log_of(one)
    assert json.loads((one / "outcome.json").read_text())["state"] == "finished"


def test_nodes_that_share_no_disk_start_anew_together(tmp_path, monkeypatch):
    _on_nodes(monkeypatch)
    with monkeypatch.context() as patch:
        saves.stop_at(patch, 5)
        one, two, _ = _nodes(tmp_path, f"{SMALL} -cpu 2", wanted=75)
    shutil.rmtree(one)
    one, two, _ = _nodes(tmp_path, f"{SMALL} -cpu 2 -reset")
    assert "going on from" not in log_of(one) and "going on from" not in log_of(two, 1)
    assert (two.parent / ".old").exists()


def test_nodes_that_do_share_a_disk_are_found_to(tmp_path, monkeypatch):
    _on_nodes(monkeypatch)
    for node in ("node1", "node2"):
        (tmp_path / node).symlink_to(tmp_path / "node0")
    (tmp_path / "node0").mkdir()
    folder = _nodes(tmp_path, f"{SMALL} -cpu 3")[0]
    newest = folder / "checkpoints" / names(folder)[0]
    assert len(list(newest.glob("shard_*"))) == 3
    assert not list(folder.rglob("*.partial")) and not list((tmp_path / "node0").glob("*.partial"))
