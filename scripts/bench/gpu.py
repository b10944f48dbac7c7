"""How fast is Baton on this GPU? Whole runs of train.py, each figure next to what limits it.

    python scripts/bench/gpu.py [-only NAME,NAME] [-json FILE]
    python scripts/bench/gpu.py -smoke      # the smallest form, on the CPU: it only shows that it runs

Each part is printed as soon as it is known, and added to FILE as a line of JSON; a part that fails does not end the
others. Speeds are those of the last epoch's log line, as starts that compile take too unequally long to be
subtracted. Next to ResNet-50 and GPTs stands peers/limit.py, which does nothing but forward, backward and step; next
to a GPT's operations the rate at which this GPU multiplies matrices, and that which its maker promises (MFU).
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import torch
import torch.distributed as dist
from safetensors.torch import load_file

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # makers' FLOP/s in bfloat16, not sparse
IMAGES = "-dataset fake -arch resnet -resnet_depth 50 -bf16 -epochs 3"
GPT = "-dataset tokens -tokens_length 1024 -num_classes 50304 -bf16 -lr_start 1e-4"
GPT_SMALL = f"{GPT} -compile model -gpt_depth 12 -gpt_width 768 -gpt_heads 12 -batch_size 32 -tokens_samples 1920"
GPT_LARGE = f"{GPT} -compile -gpt_depth 18 -gpt_width 2048 -gpt_heads 16 -batch_size 8 -tokens_samples 160"
TINY_IMAGES = "-dataset fake -fake_samples 8 -image_size 32 -num_classes 10 -epochs 1"
TINY_GPT = "-dataset tokens -tokens_length 16 -tokens_samples 32 -gpt_depth 1 -gpt_width 32 -batch_size 4"
UNSAVED = "-save_every 99epochs"
RESUME = "-dataset digits -model NAME -epochs 2 -convnet_dropout 0.3 -deterministic -out"
INTERVALS = 8  # of log lines in an epoch in which saves are timed; the save is in the middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-smoke", action="store_true", help="the smallest form, on the CPU")
    parser.add_argument("-only", help="names of parts, with commas (all)")
    parser.add_argument("-json", type=Path, help="add the figures to this file")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("gpu.py: there is no GPU here, so nothing is measured; -smoke shows on the CPU that it runs")
        return 2
    parts = parts_of(args.smoke)
    names = args.only.split(",") if args.only else [*parts]
    if unknown := {*names} - {*parts}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    if args.smoke:
        print("on the CPU, in its smallest form: GPU figures were not measured")
    device = "cpu" if args.smoke else torch.cuda.get_device_name()
    failed = 0
    for name in names:
        found = {"part": name, "device": device, "torch": torch.__version__, "date": f"{datetime.date.today()}"}
        try:
            found |= parts[name]()
        except Exception:  # noqa: BLE001  # of any part
            failed += 1
            found["error"] = traceback.format_exc()[-2000:]
        text = json.dumps(found)
        print(text, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(text + "\n")
    return 1 if failed else 0


def parts_of(smoke: bool) -> dict:
    """Return what is measured: functions by name."""
    device = torch.device("cpu") if smoke else torch.device("cuda", 0)
    options = compare.Options(procs=1, threads=1) if smoke else compare.Options(procs=0)
    small, large = (TINY_GPT, TINY_GPT) if smoke else (GPT_SMALL, GPT_LARGE)
    parts = {
        "matrix": partial(matrix_rate, 256 if smoke else 8192, device),
        "nccl": partial(collective, device),
        "gpt": partial(tokens, small, options, device),
        "gpt_1b": partial(tokens, large, options, device),
        "save": partial(save, small, options),
    }
    for batch in (4,) if smoke else (32, 64, 256):
        flags = TINY_IMAGES if smoke else f"{IMAGES} -fake_samples {60 * batch}"
        flags += f" -batch_size {batch}"
        parts[f"resnet_{batch}"] = partial(images, flags, options)
        parts[f"resnet_{batch}_compiled"] = partial(images, f"{flags} -compile model", options)
    if smoke:
        del parts["resnet_4_compiled"]
    else:
        parts["fp16"] = partial(half, options)
    parts["resume"] = partial(resumed, device)
    return parts


def matrix_rate(size: int, device: torch.device) -> dict:
    """Measure the FLOP/s of a product of two square matrices in bfloat16, which no model can exceed."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {"flops": max(2 * size**3 / seconds(lambda: one @ other, device, 20) for _ in range(5))}


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
    """Measure images a second, of a run and of the limit (a loop over preloaded batches)."""
    ours = train(compare.BATON, f"{flags} -workers 4 {UNSAVED}", options)
    limit = train(compare.LIMIT, f"{flags} {UNSAVED}", options)
    return {
        "command": f"train.py {flags} -workers 4",
        "ours_per_s": ours["samples_per_s"],
        "limit_per_s": limit["samples_per_s"],
        "ratio": ours["samples_per_s"] / limit["samples_per_s"],
        "memory_gb": ours["memory_gb"],
    }


def tokens(flags: str, options: compare.Options, device: torch.device) -> dict:
    """Measure tokens a second, of a run and of the limit, and the share of the matrix rate and of the maker's.

    A token takes 6 N + 12 depth length width FLOPs (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).
    """
    ours, limit = (train(name, f"{flags} -epochs 3 {UNSAVED}", options) for name in (compare.BATON, compare.LIMIT))
    depth, width, length = (flag(flags, name) for name in ("gpt_depth", "gpt_width", "tokens_length"))
    parameters = 12 * depth * width**2 + (2 * depth + 1) * width + flag(flags, "num_classes", 256) * width
    rate = ours["samples_per_s"] * length
    flops = rate * (6 * parameters + 12 * depth * length * width)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((value for card, value in PEAK.items() if card in name), math.nan)
    matrix = matrix_rate(8192 if device.type == "cuda" else 256, device)["flops"]
    return {
        "command": f"train.py {flags}",
        "parameters": parameters,
        "tokens_per_s": rate,
        "mfu": flops / peak,
        "share_of_matrix_rate": flops / matrix,
        "step_ms": 1e3 * flag(flags, "batch_size") / ours["samples_per_s"],
        "ratio_to_limit": ours["samples_per_s"] / limit["samples_per_s"],
        "memory_gb": ours["memory_gb"],
    }


def save(flags: str, options: compare.Options) -> dict:
    """Measure what a save in the middle of an epoch adds to it: its intervals' time above their median.

    The first epoch is left out: it compiles, and its save takes the memory that later ones use again.
    """
    steps = flag(flags, "tokens_samples") // flag(flags, "batch_size")
    every = max(1, steps // INTERVALS)
    with tempfile.TemporaryDirectory() as folder:
        more = f"-epochs 4 -log_every {every} -save_every {steps // 2}steps"
        compare.run(compare.BATON, f"{flags} {more}", Path(folder), options)
        (file,) = Path(folder).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        size = max(file.stat().st_size for file in Path(folder).glob("*/checkpoints/*/shard_*"))
    rates = {line["step"]: line["perf/samples_per_s"] for line in lines if "perf/samples_per_s" in line}
    took = [1e3 * every * flag(flags, "batch_size") / rate for step, rate in rates.items() if step > steps]
    return {
        "command": f"train.py {flags} {more}",
        "bytes": size,
        "step_ms": statistics.median(took) / every,
        "save_ms": (sum(took) - len(took) * statistics.median(took)) / 3,
        "intervals_ms": [round(one) for one in took],
    }


def half(options: compare.Options) -> dict:
    """Train with fp16 and its scaler."""
    figures = train(compare.BATON, f"{GPT_SMALL.replace('-bf16', '-fp16')} -epochs 2 {UNSAVED}", options)
    return {"loss": figures["train_loss"], "finite": math.isfinite(figures["train_loss"])}


def train(name: str, flags: str, options: compare.Options) -> dict[str, float]:
    """Return the figures of a whole run; samples a second are those of its last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        return compare.run(name, flags, Path(folder), options).figures


def flag(flags: str, name: str, default: int = 0) -> int:
    parts = flags.split()
    return int(parts[parts.index(f"-{name}") + 1]) if f"-{name}" in parts else default


def resumed(device: torch.device) -> dict:
    """Find out whether a run that is stopped in between, with dropout and augmentation, ends with the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        where = [folder, *(["-cpu", "1"] if device.type == "cpu" else ["-gpus", "0"])]
        for name, more in (("whole", []), ("parts", ["-limit_steps", "13"]), ("parts", [])):
            command = [sys.executable, "train.py", *RESUME.replace("NAME", name).split(), *where, *more]
            subprocess.run(command, cwd=compare.ROOT, stdout=subprocess.DEVNULL, check=not more)
        whole, parts = (load_file(f"{folder}/{name}/final/weights.safetensors") for name in ("whole", "parts"))
    return {"same_bits": all(torch.equal(value, parts[name]) for name, value in whole.items())}


if __name__ == "__main__":
    sys.exit(main())
