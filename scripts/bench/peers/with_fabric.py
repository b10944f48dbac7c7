"""Lightning Fabric, as in its quick start, with a loop of our own. It starts its second process itself."""

import task
import torch
from lightning.fabric import Fabric


def main():
    args = task.flags()
    fabric = Fabric(accelerator="cpu", devices=args.cpu)
    fabric.launch()
    data, share = task.datasets(args), args.batch_size // args.cpu
    train = fabric.setup_dataloaders(task.loader(data["train"], share, shuffle=True))
    held_out = {
        name: fabric.setup_dataloaders(task.loader(data[name], share)) for name in data.keys() & {"val", "test"}
    }
    model = task.model(args)
    optimizer = torch.optim.AdamW(task.groups(model, args), fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    checkpoint = args.out / "checkpoint.ckpt"
    state = {"model": model, "optimizer": optimizer, "step": 0, "epoch": 0, "best": 0.0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)

    train_loss, val = 0.0, None
    while state["epoch"] < args.epochs and state["step"] != args.limit_steps:
        model.train()
        total = torch.zeros(())
        for inputs, targets in train:
            for group in optimizer.param_groups:
                group["lr"] = task.lr_at(state["step"], len(train), args)
            optimizer.zero_grad()
            loss = task.loss_of(args, model(inputs), targets)
            fabric.backward(loss)
            if args.clip_grad:
                fabric.clip_gradients(model, optimizer, max_norm=args.clip_grad)
            optimizer.step()
            total += loss.detach() / len(train)
            state["step"] += 1
            if state["step"] % task.LOG_EVERY == 0:
                fabric.print(f"epoch {state['epoch'] + 1}  step {state['step']}  loss {loss.item():.4f}")
            if args.save_steps and state["step"] % args.save_steps == 0:
                fabric.save(checkpoint, state)
            if state["step"] == args.limit_steps:
                break
        if state["step"] == args.limit_steps:
            fabric.save(checkpoint, state)
            break
        state["epoch"] += 1
        train_loss = fabric.all_reduce(total)
        if "val" in held_out:
            val = evaluate(args, fabric, model, held_out["val"])
            fabric.print(f"epoch {state['epoch']}  val loss {val[0]:.4f}  accuracy {val[1]:.4f}")
            if val[1] >= state["best"]:
                state["best"] = val[1].item()
                fabric.save(args.out / "best.ckpt", {"model": model})
        if not args.save_steps or state["epoch"] == args.epochs:
            fabric.save(checkpoint, state)
    if state["epoch"] == args.epochs:
        if "test" in held_out:
            fabric.print("test", evaluate(args, fabric, model, held_out["test"]).tolist())
        fabric.save(args.out / "final.ckpt", {"model": model})
    if fabric.is_global_zero:
        figures = {"val_loss": val[0], "val_accuracy": val[1]} if val is not None else {}
        task.report(args, state["step"], train_loss=train_loss, **figures)


@torch.no_grad()
def evaluate(args, fabric, model, batches) -> torch.Tensor:
    """Return the loss and the accuracy over a split."""
    model.eval()
    sums = sum(task.sums(args, model(inputs), targets) for inputs, targets in batches)
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return sums[:-1] / sums[-1]


if __name__ == "__main__":
    main()
