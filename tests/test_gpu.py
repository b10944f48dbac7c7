"""What needs a GPU (marked gpu), each in a process of its own: once it has touched CUDA, it cannot be forked."""

import json
import subprocess
import sys

import pytest
from runs import distance

from lib import config

AHEAD = """
import torch
from lib.utils import loader
from lib.utils.augment import Pixels
from lib.utils.data import Tensors
from lib.utils.distributed import World

images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
dataset = Tensors(images, torch.arange(64), on_device=Pixels((0.5,), (0.3,), pad=4, mirror=True))
plan, seen = loader.Plan(64, 8, 8), []
for device in ("cpu", "cuda"):
    for workers in (0, 1):
        world = World(device=torch.device(device))
        one = loader.Loader(dataset, plan, world, seed=0, shuffle=True, workers=workers)
        batches = []
        for key, (inputs, labels) in one.epoch(1):
            inputs @ inputs.transpose(2, 3)  # a step that takes a while
            assert inputs.device.type == labels.device.type == device
            batches.append((inputs.cpu(), labels.cpu()))
        one.fetched.close()
        seen.append(batches)
for batches in seen[1:]:
    for (inputs, labels), (others, same) in zip(seen[0], batches, strict=True):
        assert torch.equal(labels, same) and torch.allclose(inputs, others, atol=1e-5)
"""


def python(*words):
    done = subprocess.run([sys.executable, *words], cwd=config.ROOT, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.gpu
def test_batches_copied_ahead_are_those_of_the_cpu():
    code, said = python("-c", AHEAD)
    assert code == 0, said


@pytest.mark.gpu
def test_a_stopped_run_with_dropout_and_augmentation_ends_at_the_same_bits_on_a_gpu(tmp_path):
    words = ["-epochs", "2", "-convnet_dropout", "0.3", "-deterministic", "-out", str(tmp_path), "-gpus", "0"]
    for name, more in (("whole", []), ("parts", ["-limit_steps", "13"]), ("parts", [])):
        code, said = python("train.py", "-model", name, *words, *more)
        assert code == (75 if more else 0), said
    assert distance(tmp_path / "whole", tmp_path / "parts") == 0


def test_the_gpu_benchmark_runs_in_its_smallest_form_and_says_that_it_measured_no_gpu(tmp_path):
    code, said = python("scripts/bench/gpu.py", "-smoke", "-json", str(tmp_path / "found.json"))
    assert code == 0 and "GPU figures were not measured" in said, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["device"] == "cpu" and found["resumed_alike"] and found["nccl"]["right"]
    assert all(found[name]["tokens_per_s"] > 0 for name in ("GPT 124 M", "GPT 1 B")) and found["images"]["ratio"] > 0
