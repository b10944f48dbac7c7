"""Settings that make a run faster are applied, restored afterwards, and do not override the user's."""

import gc
import math
import os
import types
from pathlib import Path

import pytest
import torch
from runs import plugins, run
from torch import nn
from torch.utils.data import Dataset, Subset

from lib.trainer import trainer
from lib.utils import distributed, runtime
from lib.utils.data import fetch
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World


class Circle:
    """Garbage that refers to itself and has a size; `alive` counts the instances of this process."""

    alive = 0

    def __init__(self):
        self.me, self.weight = self, bytearray(10_000)
        Circle.alive += 1

    def __del__(self):
        Circle.alive -= 1


def check_few_circles():
    """Raise MemoryError if more instances are alive than Python leaves between two collections."""
    if Circle.alive > 5000:
        raise MemoryError(f"{Circle.alive} circles")


class LeavesGarbage(Dataset):
    """A dataset that leaves a circle for each sample, in the process that reads it."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        Circle()
        check_few_circles()
        return torch.zeros(64), index % 4


class LeavesGarbageInSteps(trainer.Trainer):
    """Leaves circles in each step and each evaluation."""

    def training_step(self, batch):
        self.leave_garbage()
        return super().training_step(batch)

    def evaluation_step(self, model, batch, count):
        self.leave_garbage()
        return super().evaluation_step(model, batch, count)

    def leave_garbage(self):
        for _ in range(50):
            Circle()
        check_few_circles()


@pytest.mark.parametrize("workers", [0, 1])
def test_garbage_of_a_dataset_or_trainer_is_collected_even_with_short_epochs(workers, tmp_path):
    Circle.alive = 0
    data = {"littered": lambda args: {"train": LeavesGarbage(), "val": LeavesGarbage()}}
    with plugins(dataset=data, trainer={"litters": LeavesGarbageInSteps}):
        run(
            tmp_path,
            "-dataset littered -trainer litters -arch mlp -mlp_width 8 -image_size 8 -num_classes 4 -cpu 1 "
            f"-batch_size 50 -epochs 60 -save_every 60epochs -workers {workers}",
        )
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_number_of_threads_depends_only_on_the_work_of_a_pass_and_the_cores():
    chosen = [runtime.threads_for(work, share) for share in (1, 2, 16) for work in (1e6, 2e8, 1e9, 1e12, math.inf)]
    assert chosen == [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 2, 9, 16, 16]


def test_counting_the_work_of_a_pass_does_not_change_the_model():
    model, images = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False)), torch.randn(3, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert runtime.count_flops(model, (images, None)) == runtime.count_flops(model, images) == 2 * 3 * 8 * 4
    assert runtime.count_flops(model, {"images": images}) == math.inf, "the model does not take a dict: unknown"
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_counting_the_work_of_a_pass_restores_a_buffer_that_the_pass_changes():
    class Counts(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, inputs):
            self.passes += 1
            return super().forward(inputs)

    model = Counts()
    assert runtime.count_flops(model, torch.zeros(3, 4)) == 2 * 3 * 4 * 4
    assert model.passes == 0


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 8), ("250000 100000", 3), ("1600000 100000", 8)])
def test_a_container_has_as_many_cores_as_its_cpu_limit(limit, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr(Path, "read_text", lambda path: limit)
    assert runtime.cores_per_process(World()) == cores


def test_a_new_run_chooses_its_number_of_threads_by_its_model(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(runtime, "cores_per_process", lambda world: 2)
    before, model = torch.get_num_threads(), nn.Linear(1000, 1000, bias=False)
    try:
        for rows, wanted in ((50, 1), (300, 2)):
            args = types.SimpleNamespace(threads=None)
            threads = runtime.choose_threads(args, World(), None, model, lambda rows=rows: torch.rand(rows, 1000))
            assert threads == wanted == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "environ, threads",
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_MAX_RESTARTS": "0", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_MAX_RESTARTS": "0", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, None),
    ],
)
def test_omp_num_threads_set_by_a_launcher_does_not_count_as_the_users(environ, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert distributed.user_threads() == threads


def test_the_number_of_loader_processes_is_that_of_workers_or_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    memory, files = Tensors(torch.zeros(4)), [(0, 0)] * 4
    gpu = World(device=torch.device("cuda", 0), size=2, local_size=2)
    assert [fetch.count_workers(None, files, World(device=gpu.device, local_size=n)) for n in (1, 2, 4, 8, 16)] == [
        8,
        7,
        3,
        1,
        1,
    ]
    assert fetch.count_workers(None, memory, gpu) == fetch.count_workers(None, Subset(memory, [0, 1]), gpu) == 0
    assert fetch.count_workers(None, files, World()) == 0
    assert [
        fetch.count_workers(workers, data, world)
        for workers in (0, 3)
        for data in (memory, files)
        for world in (gpu, World())
    ] == [0] * 4 + [3] * 4


def test_deterministic_enables_deterministic_algorithms_and_keeps_the_users_setting():
    try:
        runtime.configure_kernels(World(), deterministic=False)
        assert not torch.are_deterministic_algorithms_enabled()
        runtime.configure_kernels(World(), deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        runtime.configure_kernels(World(), deterministic=False)
        assert torch.are_deterministic_algorithms_enabled(), "the user's own setting is kept"
        fast = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
        assert all(each() for each in fast)
        runtime.configure_kernels(World(device=torch.device("cuda", 0)), deterministic=True)
        assert not any(each() for each in fast) and torch.backends.cuda.math_sdp_enabled()
    finally:
        for kernel in runtime.FAST_ATTENTION:
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
