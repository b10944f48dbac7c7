"""What makes a run faster is there, is put back, and leaves alone what was asked for."""

import gc
import itertools
import os
import platform
import subprocess
import sys

import pytest
import torch
import truth
from runs import plugins, run
from torch.utils.data import Dataset, Subset

from lib import config
from lib.trainer import trainer
from lib.utils import runtime
from lib.utils.data import fetch
from lib.utils.data.loader import Loader
from lib.utils.data.plan import Plan
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World


def test_a_gpu_has_only_so_many_batches_to_compute_at_a_time(monkeypatch):
    """With a stand-in for CUDA's events, which are done once they were waited for."""
    asked, behind = [], []

    class Event:
        def __init__(self, blocking):
            assert blocking, "a core would spin meanwhile"

        def record(self):
            asked.append(self)

        def synchronize(self):
            assert asked.pop(0) is self, "in their order"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for _ in runtime.throttle(range(20), torch.device("cuda")):
        behind.append(len(asked))
    assert behind == [*range(runtime.LAUNCHED + 1), *[runtime.LAUNCHED] * (19 - runtime.LAUNCHED)]


FAULTS = """
import resource, sys, torch
from lib.utils import runtime as speed
from lib.utils.distributed import World
if sys.argv[1] == "kept":
    speed.kernels(World(), deterministic=False)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    parts = [torch.ones(1 << 23) for _ in range(4)]  # 32 MB each, freed at the end
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keeps memory by glibc's mallopt")
def test_memory_that_a_step_frees_is_not_fetched_page_by_page_for_the_next():
    def faults(word):
        done = subprocess.run([sys.executable, "-c", FAULTS, word], cwd=config.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert faults("kept") < 1000 < faults("usual"), "of up to 32,768 pages in a step"


class Circle:
    """Garbage that refers to itself, with a weight; `alive` counts those of this process."""

    alive = 0

    def __init__(self):
        self.me, self.weight = self, bytearray(10_000)
        Circle.alive += 1

    def __del__(self):
        Circle.alive -= 1


def few_circles():
    """Raises MemoryError where more are alive in this process than Python leaves between two collections."""
    if Circle.alive > 5000:
        raise MemoryError(f"{Circle.alive} circles")


class Littered(Dataset):
    """Each sample leaves a circle behind, in the process that reads it."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        Circle()
        few_circles()
        return torch.zeros(64), index % 4


class Litters(trainer.Trainer):
    """Leaves circles behind in each step and each evaluation, which must not pile up either."""

    def training_step(self, batch):
        self.litter()
        return super().training_step(batch)

    def evaluation_step(self, model, batch, count):
        self.litter()
        return super().evaluation_step(model, batch, count)

    def litter(self):
        for _ in range(50):
            Circle()
        few_circles()


@pytest.mark.parametrize("workers", [0, 1])
def test_garbage_of_a_dataset_or_a_trainer_is_collected_however_short_the_epochs_are(workers, tmp_path):
    Circle.alive = 0
    data = {"littered": lambda args: {"train": Littered(), "val": Littered()}}
    with plugins(dataset=data, trainer={"litters": Litters}):
        run(tmp_path, "-dataset littered -trainer litters -arch mlp -mlp_width 8 -image_size 8 -num_classes 4 -cpu 1 "
                      f"-batch_size 50 -epochs 60 -save_every 60epochs -workers {workers}")  # fmt: skip
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize(("micro", "made"), [(1, 4096), (64, 64), (8192, 1)])
def test_keys_are_made_many_at_once_but_for_no_more_samples_than_it_takes(micro, made, monkeypatch):
    count, plan = itertools.count(), Plan(1 << 16, 2 * micro, micro)
    one = Loader(Tensors(torch.arange(1 << 16)), plan, World(), seed=0, shuffle=True, workers=0)
    keys = one.keys
    monkeypatch.setattr(one, "keys", lambda *words: (key for key in keys(*words) if next(count) >= 0))
    key, (batch,) = next(one.epoch(0))
    assert next(count) == made and batch.tolist() == key.indices == truth.order(1 << 16)[:micro]


def test_loader_processes_are_those_asked_for_or_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    memory, files = Tensors(torch.zeros(4)), [(0, 0)] * 4
    gpu = World(device=torch.device("cuda", 0), size=2, local_size=2)
    assert [fetch.workers(None, files, World(device=gpu.device, local_size=n)) for n in (1, 2, 4, 8, 16)] == [
        8,
        7,
        3,
        1,
        1,
    ]
    assert fetch.workers(None, memory, gpu) == fetch.workers(None, Subset(memory, [0, 1]), gpu) == 0
    assert fetch.workers(None, files, World()) == 0
    assert [fetch.workers(asked, data, world) for asked in (0, 3) for data in (memory, files)
            for world in (gpu, World())] == [0] * 4 + [3] * 4  # fmt: skip


def test_the_same_bits_every_time_are_asked_of_torch():
    try:
        runtime.kernels(World(), deterministic=False)
        assert not torch.are_deterministic_algorithms_enabled()
        runtime.kernels(World(), deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        runtime.kernels(World(), deterministic=False)
        assert torch.are_deterministic_algorithms_enabled(), "what the user's own code asked for stays"
        fast = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
        assert all(each() for each in fast)
        runtime.kernels(World(device=torch.device("cuda", 0)), deterministic=True)
        assert not any(each() for each in fast) and torch.backends.cuda.math_sdp_enabled()
    finally:
        for kernel in runtime.FAST_ATTENTION:
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
