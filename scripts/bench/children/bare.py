"""Bare PyTorch: mp.spawn where there are two processes; goes on by loading, and begins the epoch again."""

import os
import socket

import task
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(work):
    """Runs work(rank, flags) here, or in as many new processes."""
    flags = task.flags()
    if flags.cpu == 1:
        return work(0, flags)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    return mp.spawn(joined, (flags, work), nprocs=flags.cpu)


def joined(rank: int, flags, work):
    dist.init_process_group("gloo", rank=rank, world_size=flags.cpu)
    work(rank, flags)
    dist.destroy_process_group()


def train(rank: int, flags, bar=iter, logged=lambda loss, step: None):
    """`bar` goes round the batches; `logged` hears of each loss."""
    file, data, model = flags.out / "checkpoint.pt", task.dataset(), task.model()
    model = DistributedDataParallel(model) if flags.cpu > 1 else model
    optimizer, done = torch.optim.AdamW(model.parameters()), 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]

    sampler = DistributedSampler(data) if flags.cpu > 1 else None
    batches = DataLoader(data, task.BATCH // flags.cpu, shuffle=sampler is None, sampler=sampler)
    for step, (inputs, targets) in enumerate(bar(batches), done + 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        logged(loss, step)
        if rank == 0:
            task.tell(step)
        if step == flags.limit_steps:
            break
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)


if __name__ == "__main__":
    main(train)
