"""Hugging Face Accelerate, as in its quick start. Two processes are started by torchrun."""

import task
import torch
from accelerate import Accelerator


def main():
    args = task.flags()
    accelerator = Accelerator(cpu=True)
    data, share = task.datasets(args), args.batch_size // args.cpu
    train = task.loader(data["train"], share, shuffle=True)
    held_out = {name: task.loader(data[name], share) for name in data.keys() & {"val", "test"}}
    held_out = {name: accelerator.prepare(batches) for name, batches in held_out.items()}
    model = task.model(args)
    optimizer = torch.optim.AdamW(task.groups(model, args), fused=True)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    step = max((int(folder.name[5:]) for folder in args.out.glob("step_*")), default=0)
    first, done = divmod(step, len(train))
    if step:
        accelerator.load_state(args.out / f"step_{step}")

    train_loss, val, best = 0.0, None, 0.0
    for epoch in range(first, args.epochs):
        model.train()
        total = torch.zeros(())
        for inputs, targets in accelerator.skip_first_batches(train, done) if done else train:
            for group in optimizer.param_groups:
                group["lr"] = task.lr_at(step, len(train), args)
            optimizer.zero_grad()
            loss = task.loss_of(args, model(inputs), targets)
            accelerator.backward(loss)
            if args.clip_grad:
                accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            total += loss.detach() / len(train)
            step += 1
            if step % task.LOG_EVERY == 0:
                accelerator.print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}")
            if args.save_steps and step % args.save_steps == 0:
                accelerator.save_state(args.out / f"step_{step}")
            if step == args.limit_steps:
                break
        done = 0
        if step == args.limit_steps:
            accelerator.save_state(args.out / f"step_{step}")
            break
        train_loss = accelerator.reduce(total, "mean")
        if "val" in held_out:
            val = evaluate(args, accelerator, model, held_out["val"])
            accelerator.print(f"epoch {epoch + 1}  val loss {val[0]:.4f}  accuracy {val[1]:.4f}")
            if val[1] >= best:
                best = val[1].item()
                accelerator.save_model(model, args.out / "best")
        if not args.save_steps or epoch + 1 == args.epochs:
            accelerator.save_state(args.out / f"step_{step}")
    else:
        if "test" in held_out:
            accelerator.print("test", evaluate(args, accelerator, model, held_out["test"]).tolist())
        accelerator.save_model(model, args.out / "final")
    if accelerator.is_main_process:
        figures = {"val_loss": val[0], "val_accuracy": val[1]} if val is not None else {}
        task.report(args, step, train_loss=train_loss, **figures)
    accelerator.end_training()


@torch.no_grad()
def evaluate(args, accelerator, model, batches) -> torch.Tensor:
    """Return the loss and the accuracy over a split."""
    model.eval()
    total = torch.zeros(3)
    for inputs, targets in batches:
        outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
        total += task.sums(args, outputs, targets)
    return total[:-1] / total[-1]


if __name__ == "__main__":
    main()
