"""How fast is Baton on this GPU? One command, under eight minutes; every figure beside what limits it.

    python scripts/bench/gpu.py [-json FILE]
    python scripts/bench/gpu.py -smoke      # the smallest form, on the CPU: it runs, and its figures say nothing

ResNet-50 (bf16, channels_last, compiled) against a bare loop; GPTs of 124 million and 1 billion parameters, in tokens
a second and as a share of the rate at which this card multiplies matrices; fp16 with its scaler; stall of a save;
memory; NCCL; whether a stopped run, dropout and augmentation included, ends at the same bits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import contenders
import torch
import torch.distributed as dist
from contenders import Case
from safetensors.torch import load_file
from torch import nn

from lib import config
from lib.utils import runtime
from lib.utils.distributed import World

FULL = {
    "matrix": 8192,
    "images": "-dataset fake -fake_samples 10240 -arch resnet -resnet_depth 50 -batch_size 256 -optimizer sgd -bf16 "
    "-lr_start 0.1 -compile model",
    "GPT 124 M": "-dataset text -text_length 1024 -text_samples 640 -num_classes 50304 -gpt_depth 12 -gpt_width 768 "
    "-gpt_heads 12 -batch_size 32 -bf16 -compile -lr_start 1e-4",
    "GPT 1 B": "-dataset text -text_length 1024 -text_samples 160 -num_classes 50304 -gpt_depth 18 -gpt_width 2048 "
    "-gpt_heads 16 -batch_size 8 -bf16 -compile -lr_start 1e-4",
    "rounds": 4,
}
SMOKE = {
    "matrix": 256,
    "images": "-dataset fake -fake_samples 8 -image_size 32 -num_classes 10 -batch_size 4 -optimizer sgd",
    "GPT 124 M": "-dataset text -text_length 16 -text_samples 8 -gpt_depth 1 -gpt_width 32 -batch_size 4",
    "GPT 1 B": "-dataset text -text_length 16 -text_samples 8 -gpt_depth 2 -gpt_width 32 -batch_size 4",
    "rounds": 1,
}
RESUME = "-dataset digits -model NAME -epochs 2 -convnet_dropout 0.3 -deterministic -out"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-smoke", action="store_true", help="the smallest form, on the CPU")
    parser.add_argument("-json", help="write the figures to this file")
    asked = parser.parse_args()
    if not asked.smoke and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here, so nothing is measured; -smoke shows on the CPU that it runs")
        return 2
    sizes, device = (SMOKE, torch.device("cpu")) if asked.smoke else (FULL, torch.device("cuda", 0))
    if asked.smoke:
        torch.set_num_threads(1)
        print("on the CPU, in its smallest form: GPU figures were not measured")
    found = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    runtime.kernels(World(device=device), deterministic=False)
    with contenders.hushed():
        found |= {"matrix_tflops": matrix_rate(sizes["matrix"], device), "nccl": collective(device)}
        found["images"] = images(sizes, World(device=device))
        for name in ("GPT 124 M", "GPT 1 B"):
            found[name] = tokens(sizes[name], sizes["rounds"], World(device=device), found["matrix_tflops"])
        found["fp16"] = half(sizes["GPT 124 M"], World(device=device)) if device.type == "cuda" else None
        found["resumed_alike"] = resumed(device)
    print(json.dumps(found, indent=2))
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def matrix_rate(size: int, device: torch.device) -> float:
    """TFLOP/s of a product of two square matrices in bfloat16: what no model can pass."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return max(2 * size**3 / seconds(lambda: one @ other, device, 20) for _ in range(5)) / 1e12


def seconds(act, device: torch.device, times: int) -> float:
    """Seconds of one call, of several in a row."""
    act()
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        act()
    wait(device)
    return (time.perf_counter() - began) / times


def images(sizes: dict, world: World) -> dict:
    """Images a second of ours and of a bare loop over batches that lie on the device, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(sizes["images"], folder, world)
        trainer = contenders.trainer_of(case)
        ours, other = contenders.timed(trainer), bare(case, trainer)
        pairs = [(ours(), other()) for _ in range(sizes["rounds"] + 1)][1:]
        size = trainer.plan.batch
        trainer.logger.close()
    return {
        "ours_per_s": size / statistics.median(a for a, _ in pairs),
        "bare_per_s": size / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),  # of images a second
        "memory_gb": memory(world),
    }


def bare(case: Case, trainer):
    """Seconds per step of a hand-written loop that has its batch on the device already."""
    device, steps = case.world.device, trainer.plan.steps
    model = case.model().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=device.type == "cuda")
    inputs, targets = trainer.loaders["train"].sample()
    run, loss = torch.compile(model) if device.type == "cuda" else model, nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(run(inputs), targets)
        value.backward()
        optimizer.step()

    return lambda: seconds(step, device, steps)


def tokens(words: str, rounds: int, world: World, limit: float) -> dict:
    """Tokens a second, the share of the matrix rate (6 N + 12 depth length width FLOPs a token: Chowdhery et al.,
    PaLM, arXiv:2204.02311, appendix B), memory, and what a save costs the loop."""
    memory(world)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(words, folder, world)
        trainer, args = contenders.trainer_of(case), case.args()
        run = contenders.timed(trainer)
        run()
        step = statistics.median(run() for _ in range(rounds))
        trainer.resume(None)
        stalls = [stall(trainer, run, step) for _ in range(2)]  # the first makes its buffers
        trainer.checkpoints.close()
        trainer.logger.close()
    count = sum(parameter.numel() for parameter in trainer.parameters)
    rate = trainer.plan.batch * args.text_length / step
    flops = 6 * count + 12 * args.gpt_depth * args.text_length * args.gpt_width
    return {"parameters": count, "tokens_per_s": rate, "share_of_matrix_rate": rate * flops / limit / 1e12,
            "step_ms": 1e3 * step, "first_save_stall_ms": 1e3 * stalls[0], "save_stall_ms": 1e3 * stalls[1],
            "memory_gb": memory(world)}  # fmt: skip


def stall(trainer, run, step: float) -> float:
    """How many seconds longer an epoch takes, of steps that took so many each, with a save begun at its start."""
    began = time.perf_counter()
    trainer.save()
    longer = time.perf_counter() - began + (run() - step) * trainer.plan.steps
    trainer.checkpoints.finish()
    return longer


def half(words: str, world: World) -> dict:
    """fp16 with its scaler: the loss and the scale after an epoch or two."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = contenders.trainer_of(Case(words.replace("-bf16", "-fp16"), folder, world))
        run = contenders.timed(trainer)
        run()
        step = run()
        trainer.logger.close()
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.parameters)
    return {"step_ms": 1e3 * step, "scale": trainer.scaler.get_scale(), "finite": finite}


def collective(device: torch.device) -> dict:
    """A sum over the processes of a group, here of one: NCCL is there and answers."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        values = torch.ones(1 << 20, device=device)
        took = seconds(lambda: dist.all_reduce(values), device, 10)
        dist.destroy_process_group()
    return {"backend": backend, "right": bool((values == 1).all()), "ms_of_4_mb": 1e3 * took}


def resumed(device: torch.device) -> bool:
    """Whether a run that is stopped in between, with dropout and augmentation, ends at the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        where = [folder, *(["-cpu", "1"] if device.type == "cpu" else ["-gpus", "0"])]
        for name, more in (("whole", []), ("parts", ["-limit_steps", "13"]), ("parts", [])):
            words = [sys.executable, "train.py", *RESUME.replace("NAME", name).split(), *where, *more]
            subprocess.run(words, cwd=config.ROOT, stdout=subprocess.DEVNULL, check=not more)
        whole, parts = (load_file(f"{folder}/{name}/final/weights.safetensors") for name in ("whole", "parts"))
    return all(torch.equal(value, parts[name]) for name, value in whole.items())


def wait(device: torch.device):
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(world: World) -> float:
    """The most GB that were in use since the last call; 0 on the CPU."""
    if world.device.type != "cuda":
        return 0.0
    most = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return most


if __name__ == "__main__":
    sys.exit(main())
