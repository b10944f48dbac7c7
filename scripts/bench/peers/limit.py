"""The limit: one epoch of finished batches in memory, and nothing but forward, backward and step.

No contender: it sees the same batches in every epoch, evaluates nothing, logs nothing. With -save_every Nsteps it
copies the state and leaves the copy to a thread that writes it to a file: no checksum, no fsync, nothing published.
"""

import concurrent.futures
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import task
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def main():
    args = task.flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    device = torch.device("cuda", 0) if args.gpus else torch.device("cpu")
    data = task.datasets(args)["train"]
    sampler = DistributedSampler(data, world, rank)
    batches = [
        [part.to(device) for part in batch] for batch in task.loader(data, args.batch_size // world, sampler=sampler)
    ]
    model = task.model(args).to(device)
    if args.gpus:
        model = nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    optimizer = torch.optim.AdamW(task.groups(model, args), args.lr_start, fused=True)
    if args.compile:
        model = torch.compile(model)
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    save = Save(model, optimizer, args.out / "state") if args.save_steps and rank == 0 else None
    total, step = torch.zeros((), device=device), 0
    for _ in range(args.epochs):
        began = time.perf_counter()
        total.zero_()
        for inputs, targets in batches:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = task.loss_of(args, model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            if save and step % args.save_steps == 0 and step < args.epochs * len(batches):
                save()
        train_loss = total.item() / len(batches)
        rate = len(data) / (time.perf_counter() - began)
    if rank == 0:
        copies = {"copy_ms": save.close()} if save else {}
        task.report(args, step, train_loss=train_loss, samples_per_s=rate, **copies)
    if world > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # one time in ten, torch 2.15 ends a process of gloo with SIGABRT


class Save:
    """Copies of the model and the optimizer's state, written by a thread of the lowest priority."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path):
        self.optimizer, self.path, self.parameters = optimizer, path, [*model.parameters()]
        moments = [parameter for parameter in self.parameters for _ in range(2)]
        self.copies = [torch.zeros_like(one) for one in [*self.parameters, *moments]]  # allocated once
        self.thread = concurrent.futures.ThreadPoolExecutor(1, initializer=give_way)
        self.written, self.seconds = None, []

    def __call__(self):
        """Wait for the last write, copy, and begin another."""
        if self.written:
            self.written.result()
        entries = [self.optimizer.state[parameter] for parameter in self.parameters]
        state = [entry[name] for entry in entries for name in ("exp_avg", "exp_avg_sq")]
        began = time.perf_counter()
        with torch.no_grad():
            for copy, values in zip(self.copies, [*self.parameters, *state], strict=True):
                copy.copy_(values)
        self.seconds.append(time.perf_counter() - began)
        self.written = self.thread.submit(self.write)

    def write(self):
        with self.path.open("wb", buffering=0) as file:
            for copy in self.copies:
                file.write(copy.numpy().data)

    def close(self) -> float:
        """Wait for the last write. Return a copy's milliseconds."""
        self.thread.shutdown()
        return 1000 * statistics.median(self.seconds)


def give_way():
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


if __name__ == "__main__":
    main()
