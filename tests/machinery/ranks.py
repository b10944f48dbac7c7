"""Ranks of a gloo group that are forked from a test, so that a function of it runs on each of them."""

import os
import signal
import time
import traceback

import torch.distributed as dist


def on_ranks(size, function, folder):
    """Run function(rank) on forked ranks of a gloo group; fails if one of them raises an error or hangs."""
    children = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, size, function, folder)
        children[pid] = rank
    end = time.monotonic() + 60
    while children and time.monotonic() < end:
        children = {pid: rank for pid, rank in children.items() if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    message = {file.stem: file.read_text() for file in folder.glob("rank_*.txt")}
    assert message == {f"rank_{rank}": "done" for rank in range(size)}, "\n".join(message.values())


def _run_rank(rank, size, function, folder):
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        function(rank)
        text = "done"
    except BaseException:
        text = traceback.format_exc()
        raise
    finally:
        (folder / f"rank_{rank}.txt").write_text(text)
        os._exit(0)
