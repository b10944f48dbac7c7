"""The limit: one epoch of finished batches in memory, and nothing but forward, backward and step.

No contender: it sees the same batches in every epoch, evaluates nothing, logs nothing, saves nothing.
"""

import os
import sys
import time

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
    total = torch.zeros((), device=device)
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
        train_loss = total.item() / len(batches)
        rate = len(data) / (time.perf_counter() - began)
    if rank == 0:
        task.report(args, args.epochs * len(batches), train_loss=train_loss, samples_per_s=rate)
    if world > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # one time in ten, torch 2.15 ends a process of gloo with SIGABRT


if __name__ == "__main__":
    main()
