"""Time to the first step of a run on two CPU processes, over that of a bare mp.spawn script.

    python scripts/bench/launch.py [-rounds 7] [-json FILE]

Whole processes, started in turn, from the start to the first line that tells of a step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import torchvision

def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1024)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(256, 1024), torch.randn(256, 1024))
    for x, y in DataLoader(data, batch_size=32, sampler=DistributedSampler(data)):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            print("step 1/", flush=True)
        break
    dist.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)
"""


def first_step(command: list[str]) -> float:
    """Seconds from the start of a command to its first line with "step 1/"; it is then waited for."""
    began = time.perf_counter()
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = next((time.perf_counter() - began for line in run.stdout if "step 1/" in line), None)
    run.stdout.read()
    if run.wait() or seconds is None:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode} and told of no step")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-rounds", type=int, default=7, help="starts of each")
    parser.add_argument("-json", help="write the figures to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        words = "-cpu 2 -dataset random -random_samples 64 -batch_size 64 -epochs 1 -log_every 1 -reset"
        ours = [sys.executable, "train.py", *words.split(), "-out", folder]
        pairs = [(first_step(ours), first_step([sys.executable, str(script)])) for _ in range(asked.rounds + 1)][1:]
    row = {
        "ours_s": statistics.median(a for a, _ in pairs),
        "bare_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }
    print(f"time to the first step, two processes: ours {row['ours_s']:.2f} s, mp.spawn {row['bare_s']:.2f} s, "
          f"ratio {row['ratio']:.3f}")  # fmt: skip
    if asked.json:
        Path(asked.json).write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
