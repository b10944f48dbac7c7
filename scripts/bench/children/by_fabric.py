"""Lightning Fabric, which starts its second process itself; goes on by loading, and begins the epoch again."""

import task
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader


def main():
    flags = task.flags()
    fabric = Fabric(accelerator="cpu", devices=flags.cpu)
    fabric.launch()
    model = task.model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    batches = fabric.setup_dataloaders(DataLoader(task.dataset(), task.BATCH // flags.cpu, shuffle=True))
    file, state = flags.out / "checkpoint.ckpt", {"model": model, "optimizer": optimizer, "step": 0}
    if file.exists():
        fabric.load(file, state)

    for step, (inputs, targets) in enumerate(batches, state["step"] + 1):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        if fabric.is_global_zero:
            task.tell(step)
        if step == flags.limit_steps:
            break
    fabric.save(file, {**state, "step": step})


if __name__ == "__main__":
    main()
