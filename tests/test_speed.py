"""What makes a run faster is there, is put back, and leaves alone what was asked for."""

import gc
import os

import torch
from torch.utils.data import Subset

from lib.utils import speed
from lib.utils.data import Tensors
from lib.utils.distributed import World


class Circle:
    def __init__(self):
        self.me = self


def alive():
    return sum(isinstance(one, Circle) for one in gc.get_objects())


def test_garbage_waits_for_its_turn_and_is_then_collected():
    assert gc.isenabled()
    with speed.quiet():
        frozen = gc.get_freeze_count()
        for _ in range(5000):  # beyond the threshold at which Python would collect
            Circle()
        assert not gc.isenabled() and frozen > 1000 and alive() == 5000
        speed.collect()
        assert alive() == 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_loader_processes_are_those_asked_for_or_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    memory, files = Tensors(torch.zeros(4)), [(0, 0)] * 4
    gpu = World(device=torch.device("cuda", 0), size=2, local_size=2)
    assert [speed.workers(None, files, World(device=gpu.device, local_size=n)) for n in (1, 2, 4, 8, 16)] == [
        8,
        7,
        3,
        1,
        1,
    ]
    assert speed.workers(None, memory, gpu) == speed.workers(None, Subset(memory, [0, 1]), gpu) == 0
    assert speed.workers(None, files, World()) == 0
    assert [speed.workers(asked, data, world) for asked in (0, 3) for data in (memory, files)
            for world in (gpu, World())] == [0] * 4 + [3] * 4  # fmt: skip


def test_the_same_bits_every_time_are_asked_of_torch():
    try:
        speed.kernels(World(), deterministic=False)
        assert not torch.are_deterministic_algorithms_enabled()
        speed.kernels(World(), deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        speed.kernels(World(), deterministic=False)
        assert torch.are_deterministic_algorithms_enabled(), "what the user's own code asked for stays"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
