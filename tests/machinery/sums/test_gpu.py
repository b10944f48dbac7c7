"""Tests that need a GPU (marked gpu), each in its own process, as CUDA needs; tests with a card that does nothing."""

import concurrent.futures
import os

import cards
import ports
import pytest
from processes import python
from runs import distance

NORMS = """
import torch
from lib.core import optimizer

def norm(values, dim=None, real=torch.linalg.vector_norm):
    print(values.data_ptr() % 16)
    return real(values, dim=dim)

torch.linalg.vector_norm = norm
bucket = torch.ones(1000, device="cuda")
parameter = torch.nn.Parameter(bucket[1:129].view(1, 128))
parameter.grad = bucket[201:329].view(1, 128)
optimizer.clip([parameter], 1.0, exact=True)
"""
GPT = "-dataset tokens -tokens_samples 165"


@pytest.mark.gpu
def test_a_stopped_run_with_dropout_and_augmentation_resumes_with_the_same_bits_on_a_gpu(tmp_path):
    flags = f"-epochs 2 -convnet_dropout 0.3 -deterministic -workers 1 -out {tmp_path} -gpus 0"
    for more in ("-model whole", "-model parts -limit_steps 13", "-model parts"):
        python("train.py", *f"{flags} {more}".split(), code=75 if "-limit_steps" in more else 0)
    assert distance(tmp_path / "whole", tmp_path / "parts") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["-clip_grad 0.1", "-bf16", "-parallel fsdp", f"-parallel fsdp -bf16 {GPT}"])
def test_one_and_two_processes_on_gpus_end_at_the_same_bits(flags, tmp_path):
    """On one GPU, too: NCCL takes two processes on it if their names of the host differ."""
    command = f"train.py {flags} -epochs 2 -micro_batch 16 -deterministic -out {tmp_path} -model".split()
    python(*command, "one", "-gpus", "0")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free())}
    place |= {"LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [{**os.environ, **place, "RANK": n, "LOCAL_RANK": n, "NCCL_HOSTID": f"host{n}"} for n in "01"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert len([*pool.map(lambda env: python(*command, "two", env=env), ranks)]) == 2
    assert distance(tmp_path / "one", tmp_path / "two") == 0


COMPARE = pytest.param("compare.py mlp resnet gpt", "as many", 3, marks=pytest.mark.slow)


@pytest.mark.parametrize(("command", "sign", "count"), [("gpu.py -only gpt", '"ratio', 1), COMPARE])
def test_the_benchmarks_run_in_their_smallest_form_on_the_cpu(command, sign, count):
    output = python(*f"scripts/bench/{command} -smoke".split())
    assert output.count(sign) == count, output


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    missing = cards.missing()
    if missing and (not os.environ.get("CI") or not missing.startswith("needs gcc")):
        pytest.skip(missing)
    return cards.build(tmp_path_factory.mktemp("card"))


@pytest.mark.parametrize(
    "flags",
    [
        "-bf16 -augment -optimizer sgd -class_weights 1,1,1,1,1,1,1,1,1,2",
        "-gpus 0,1 -fp16 -micro_batch 16 -workers 1",
        "-gpus 0,1 -parallel fsdp -dataset tokens -tokens_samples 176 -arch gpt -fp16 -recompute -workers 1 "
        "-clip_grad 1",
    ],
    ids=["one", "ddp", "fsdp"],
)
def test_on_a_fake_card_runs_finish_and_resume_and_no_step_waits_for_the_device(card, flags, tmp_path):
    """The number of waits and of copies from unpinned memory is the same for nine steps as for four."""
    flags = ["-W", "ignore", "train.py", *flags.split(), "-epochs", "1", "-log_every", "999", "-out", str(tmp_path)]
    flags += ["-max_bad_steps", "999", "-allow_change", "nan"]  # a card that computes nothing gives arbitrary norms
    env, waits = {**card, "CARDS": "2" if "0,1" in flags else "1"}, []
    for steps in ("4", "9"):
        waits.append(python(*flags, "-model", steps, "-limit_steps", steps, code=75, env=env).count("card: "))
    assert waits[0] == waits[1] > 0
    assert "resuming from" in python(*flags, "-model", "9", env=env)


def test_the_norm_of_a_row_does_not_depend_on_its_place_in_a_bucket(card):
    """torch's sum over a row takes what lies before a multiple of 16 bytes apart: ATen/native/cuda/Reduce.cuh."""
    output = python("-W", "ignore", "-c", NORMS, env=card)
    assert [line for line in output.splitlines() if line.isdigit()] == ["0", "0"], output
