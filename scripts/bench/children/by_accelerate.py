"""Accelerate; goes on by load_state and skip_first_batches. Two processes are torchrun's to start."""

import task
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    flags = task.flags()
    accelerator, model = Accelerator(cpu=True), task.model()
    batches = DataLoader(task.dataset(), task.BATCH // flags.cpu, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)
    done = max((int(folder.name[5:]) for folder in flags.out.glob("step_*")), default=0)
    if done:
        accelerator.load_state(flags.out / f"step_{done}")
        batches = accelerator.skip_first_batches(batches, done)

    for step, (inputs, targets) in enumerate(batches, done + 1):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        if accelerator.is_main_process:
            task.tell(step)
        if step == flags.limit_steps:
            break
    accelerator.save_state(flags.out / f"step_{step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
