"""What each process and loader of a run has for itself: collected garbage, opened files, cores, kernels."""

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from command_line import parsed
from items import Items
from runs import plugins, run
from torch import nn
from torch.utils.data import Dataset, Subset

from lib.utils import runtime
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


def leave_garbage():
    """A sample that leaves a circle in the process that reads it, which refuses to leave many."""
    Circle()
    if Circle.alive > 5000:  # more than Python leaves between two collections
        raise MemoryError(f"{Circle.alive} circles")
    return torch.zeros(64), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_garbage_of_the_rank_and_of_loader_processes_is_collected_even_with_short_epochs(workers, tmp_path):
    Circle.alive = 0
    with plugins(dataset={"littered": lambda args: dict.fromkeys(("train", "val"), Items([leave_garbage] * 100))}):
        flags = "-dataset littered -arch mlp -mlp_width 8 -image_size 8 -num_classes 4 -cpu 1 "
        run(tmp_path, f"{flags} -batch_size 50 -epochs 60 -save_every 60epochs -workers {workers}")
    assert gc.isenabled()


class Lazy(Dataset):
    """Opens something at the first sample, as a file, whose place two processes would share."""

    def __getitem__(self, index):
        self.opener = getattr(self, "opener", os.getpid())
        assert self.opener == os.getpid(), "another process reads this file"
        assert torch.get_num_threads() == 1, "sums by another number of threads have other bits"
        return torch.full((64,), float(index)), index % 4


@pytest.mark.parametrize("more", ["-workers 2", "-workers 0 -val_workers 2", "-workers 2 -val_workers 0"])
def test_what_a_dataset_makes_at_its_first_sample_is_made_in_each_process_that_reads_samples(more, tmp_path):
    whole = Lazy()
    data = {"train": Subset(whole, range(16)), "val": Subset(whole, range(16, 32))}
    get_dataset = lambda args: 1 // (torch.get_num_threads() == 1) and data  # noqa: E731
    with plugins(arch={"first": lambda args: nn.Linear(64, 4)}, dataset={"first": get_dataset}):
        flags = "-arch first -dataset first -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 2 -cpu 2 -threads 2"
        run(tmp_path, f"{flags} {more} -hang_minutes 0.5")


@pytest.mark.parametrize(
    ("limit", "siblings", "cores"),
    [("max 100000", None, 8), ("250000 100000", None, 3), (None, lambda cpu: cpu // 2, 4)],  # two threads a core
)
def test_a_process_has_as_many_cores_as_torch_would_use_and_its_container_allows(limit, siblings, cores, monkeypatch):
    def read(path):
        if path.name == "cpu.max" and limit:
            return limit
        if path.name == "thread_siblings_list" and siblings:
            return str(siblings(int(re.findall(r"cpu(\d+)/", str(path))[0])))
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr(Path, "read_text", read)
    found = [runtime.cores_per_process(World(local_size=size)) for size in (1, 2, 3, 16)]
    assert found == [cores, cores // 2, max(1, cores // 3), 1]


def test_the_number_of_loader_processes_is_that_of_workers_or_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    memory, files = Tensors(torch.zeros(4)), [(0, 0)] * 4
    gpu = World(device=torch.device("cuda", 0), size=2, local_size=2)

    def count(data, world, flags="", split="train"):
        return fetch.count_workers(parsed(flags), split, data, world)

    worlds = [World(device=gpu.device, local_size=n) for n in (1, 2, 4, 8, 16)]
    assert [count(files, world) for world in worlds] == [8, 7, 3, 1, 1]
    assert count(memory, gpu) == count(Subset(memory, [0, 1]), gpu) == count(files, World()) == 0
    for flags, wanted in (("-workers 0", 0), ("-workers 3", 3), ("-workers 3 -debug", 0)):
        assert {count(data, world, flags) for data in (memory, files) for world in (gpu, World())} == {wanted}
    for flags, wanted in (("", 3), ("-val_workers 0", 0), ("-val_workers 1", 1)):
        assert count(files, gpu, f"-workers 3 {flags}", "val") == wanted


def test_deterministic_enables_deterministic_algorithms_and_keeps_the_users_setting():
    torch.use_deterministic_algorithms(False)  # a run before this test may have set it
    try:
        with torch.autocast("cpu"):  # as around train.main in a notebook
            runtime.configure_kernels(World(), deterministic=False)
            assert not (torch.are_deterministic_algorithms_enabled() or torch.is_autocast_enabled("cpu"))
            assert not torch._C._get_graph_executor_optimize(), "TorchScript's first calls have other bits then"
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
