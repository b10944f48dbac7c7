"""Ranks of a gloo group that are forked from a test, so that a function of it runs on each of them."""

import datetime

import torch.distributed as dist
from torch import multiprocessing

LIMIT = datetime.timedelta(seconds=60)


def on_ranks(size, function, folder):
    """Run function(rank) on forked ranks of a gloo group; fails if one of them raises an error or waits for ever."""
    multiprocessing.start_processes(_run_rank, (size, function, folder), size, start_method="fork")


def _run_rank(rank, size, function, folder):
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
    function(rank)
