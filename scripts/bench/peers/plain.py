"""The best plain PyTorch: fused AdamW, whole batches, clipping, validation, best weights, a checkpoint each epoch.

    python scripts/bench/peers/plain.py [-epochs N ...]
    torchrun --nproc_per_node 2 scripts/bench/peers/plain.py

A run that was stopped continues from its checkpoint; one that was stopped inside an epoch begins that epoch again.
"""

import os
import sys

import task
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, Subset


def main():
    args = task.flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    data, share = task.datasets(args), args.batch_size // world
    sampler = DistributedSampler(data["train"], world, rank, seed=args.seed) if world > 1 else None
    train = task.loader(data["train"], share, sampler=sampler, shuffle=sampler is None)
    held_out = {}
    for name in data.keys() & {"val", "test"}:
        mine = Subset(data[name], range(rank, len(data[name]), world))
        held_out[name] = task.loader(mine, share, augmented_by=data[name])

    model = task.model(args)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
    optimizer = torch.optim.AdamW(task.groups(model, args), fused=True)
    checkpoint, step, first, best = args.out / "checkpoint.pt", 0, 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, first, best = saved["step"], saved["epoch"], saved["best"]

    def save(epoch: int):
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "epoch": epoch, "best": best}, checkpoint)

    figures = {}  # of the last whole epoch
    for epoch in range(first, args.epochs):
        if sampler:
            sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for inputs, targets in train:
            for group in optimizer.param_groups:
                group["lr"] = task.lr_at(step, len(train), args)
            loss = task.loss_of(args, replica(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if args.clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            total += torch.tensor([loss.detach() * len(targets), len(targets)])
            step += 1
            if step % task.LOG_EVERY == 0 and rank == 0:
                print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)
            if args.save_steps and step % args.save_steps == 0:
                save(epoch)
            if step == args.limit_steps:
                break
        if step == args.limit_steps:
            save(epoch)
            break
        figures["train_loss"] = mean(total, world)[0]
        if "val" in held_out:
            val = evaluate(args, model, held_out["val"], world)
            figures |= {"val_loss": val[0], "val_accuracy": val[1]}
            if rank == 0:
                print(f"epoch {epoch + 1}  val loss {val[0]:.4f}  accuracy {val[1]:.4f}", flush=True)
                if val[1] >= best:
                    best = val[1].item()
                    torch.save(model.state_dict(), args.out / "best.pt")
        if not args.save_steps or epoch + 1 == args.epochs:
            save(epoch + 1)
    else:
        if "test" in held_out:
            print("test", evaluate(args, model, held_out["test"], world).tolist())
        if rank == 0:
            torch.save(model.state_dict(), args.out / "final.pt")
    if rank == 0:
        task.report(args, step, **figures)
    if world > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # one time in ten, torch 2.15 ends a process of gloo with SIGABRT


@torch.no_grad()
def evaluate(args, model: nn.Module, batches, world: int) -> torch.Tensor:
    """Return the loss and the accuracy over a split."""
    model.eval()
    return mean(sum(task.sums(args, model(inputs), targets) for inputs, targets in batches), world)


def mean(sums: torch.Tensor, world: int) -> torch.Tensor:
    """Return the means of all processes: the sums but the last one, divided by the last, which counts samples."""
    if world > 1:
        dist.all_reduce(sums)
    return sums[:-1] / sums[-1]


if __name__ == "__main__":
    main()
