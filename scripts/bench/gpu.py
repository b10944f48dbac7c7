"""How fast is Baton on this GPU? One command; every figure with what limits it.

    python scripts/bench/gpu.py [-json FILE]
    python scripts/bench/gpu.py -smoke      # the smallest form, on the CPU: it only shows that it runs

Whole runs of train.py; their speed is that of the last epoch's log line, as starts that compile take too unequally
long to be subtracted. ResNet-50 (bf16, compiled) next to peers/limit.py; GPTs of 124 million and 1 billion
parameters, in tokens a second and as a share of the rate at which this GPU multiplies matrices, and what a save adds
to the epoch after it; fp16 with its scaler; memory; NCCL; whether a stopped run, dropout and augmentation included,
ends at the same bits.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import torch
import torch.distributed as dist
from safetensors.torch import load_file

FULL = {
    "matrix": 8192,
    "images": "-dataset fake -fake_samples 10240 -arch resnet -resnet_depth 50 -batch_size 256 -bf16 -compile model",
    "GPT 124 M": "-dataset tokens -tokens_length 1024 -tokens_samples 640 -num_classes 50304 -gpt_depth 12 "
    "-gpt_width 768 -gpt_heads 12 -batch_size 32 -bf16 -compile -lr_start 1e-4",
    "GPT 1 B": "-dataset tokens -tokens_length 1024 -tokens_samples 160 -num_classes 50304 -gpt_depth 18 "
    "-gpt_width 2048 -gpt_heads 16 -batch_size 8 -bf16 -compile -lr_start 1e-4",
}
SMOKE = {
    "matrix": 256,
    "images": "-dataset fake -fake_samples 8 -image_size 32 -num_classes 10 -batch_size 4",
    "GPT 124 M": "-dataset tokens -tokens_length 16 -tokens_samples 8 -gpt_depth 1 -gpt_width 32 -batch_size 4",
    "GPT 1 B": "-dataset tokens -tokens_length 16 -tokens_samples 8 -gpt_depth 2 -gpt_width 32 -batch_size 4",
}
SAVED, UNSAVED = "-epochs 4", "-epochs 4 -save_every 99epochs"
RESUME = "-dataset digits -model NAME -epochs 2 -convnet_dropout 0.3 -deterministic -out"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-smoke", action="store_true", help="the smallest form, on the CPU")
    parser.add_argument("-json", help="write the figures to this file")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here, so nothing is measured; -smoke shows on the CPU that it runs")
        return 2
    sizes, device = (SMOKE, torch.device("cpu")) if args.smoke else (FULL, torch.device("cuda", 0))
    if args.smoke:
        print("on the CPU, in its smallest form: GPU figures were not measured")
    options = compare.Options(procs=1, threads=1) if args.smoke else compare.Options(procs=0)
    limit = matrix_rate(sizes["matrix"], device)
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "matrix_tflops": limit,
        "nccl": collective(device),
        "images": images(sizes["images"], options),
    }
    for name in ("GPT 124 M", "GPT 1 B"):
        found[name] = tokens(sizes[name], options, limit)
    found["fp16"] = None if args.smoke else half(sizes["GPT 124 M"], options)
    found["resumed_alike"] = resumed(device)
    print(json.dumps(found, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def matrix_rate(size: int, device: torch.device) -> float:
    """Return the TFLOP/s of a product of two square matrices in bfloat16, which no model can exceed."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return max(2 * size**3 / seconds(lambda: one @ other, device, 20) for _ in range(5)) / 1e12


def seconds(call, device: torch.device, times: int) -> float:
    """Return the seconds of one call, of several in a row."""
    call()
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return (time.perf_counter() - began) / times


def wait(device: torch.device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def collective(device: torch.device) -> dict:
    """Add up 4 MB over a process group of one, to see whether NCCL works."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        values = torch.ones(1 << 20, device=device)
        took = seconds(lambda: dist.all_reduce(values), device, 10)
        dist.destroy_process_group()
    return {"backend": backend, "right": bool((values == 1).all()), "ms_of_4_mb": 1e3 * took}


def images(flags: str, options: compare.Options) -> dict:
    """Return images a second, of a run and of the limit (a loop over preloaded batches)."""
    ours, limit = (train(name, f"{flags} {UNSAVED}", options) for name in (compare.BATON, compare.LIMIT))
    return {
        "ours_per_s": ours["samples_per_s"],
        "limit_per_s": limit["samples_per_s"],
        "ratio": ours["samples_per_s"] / limit["samples_per_s"],
        "memory_gb": ours["memory"] / 1e9,
    }


def tokens(flags: str, options: compare.Options, limit: float) -> dict:
    """Return tokens a second, and the share of the matrix rate.

    A token takes 6 N + 12 depth length width FLOPs (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).
    """
    unsaved, saved = (train(compare.BATON, f"{flags} {more}", options) for more in (UNSAVED, SAVED))
    depth, width, length = (flag(flags, name) for name in ("gpt_depth", "gpt_width", "tokens_length"))
    parameters = 12 * depth * width**2 + (2 * depth + 1) * width + flag(flags, "num_classes", 256) * width
    rate = unsaved["samples_per_s"] * length
    samples = flag(flags, "tokens_samples")  # between two saves
    return {
        "parameters": parameters,
        "tokens_per_s": rate,
        "share_of_matrix_rate": rate * (6 * parameters + 12 * depth * length * width) / limit / 1e12,
        "step_ms": 1e3 * flag(flags, "batch_size") / unsaved["samples_per_s"],
        "save_ms": 1e3 * samples * (1 / saved["samples_per_s"] - 1 / unsaved["samples_per_s"]),
        "memory_gb": unsaved["memory"] / 1e9,
    }


def half(flags: str, options: compare.Options) -> dict:
    """Train with fp16 and its scaler."""
    figures = train(compare.BATON, f"{flags.replace('-bf16', '-fp16')} {UNSAVED}", options)
    return {"loss": figures["train_loss"], "finite": math.isfinite(figures["train_loss"])}


def train(name: str, flags: str, options: compare.Options) -> dict[str, float]:
    """Return the figures of a whole run; samples a second are those of its last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        return compare.run(name, flags, Path(folder), options).figures


def flag(flags: str, name: str, default: int = 0) -> int:
    parts = flags.split()
    return int(parts[parts.index(f"-{name}") + 1]) if f"-{name}" in parts else default


def resumed(device: torch.device) -> bool:
    """Return whether a run that is stopped in between, with dropout and augmentation, ends with the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        where = [folder, *(["-cpu", "1"] if device.type == "cpu" else ["-gpus", "0"])]
        for name, more in (("whole", []), ("parts", ["-limit_steps", "13"]), ("parts", [])):
            command = [sys.executable, "train.py", *RESUME.replace("NAME", name).split(), *where, *more]
            subprocess.run(command, cwd=compare.ROOT, stdout=subprocess.DEVNULL, check=not more)
        whole, parts = (load_file(f"{folder}/{name}/final/weights.safetensors") for name in ("whole", "parts"))
    return all(torch.equal(value, parts[name]) for name, value in whole.items())


if __name__ == "__main__":
    sys.exit(main())
