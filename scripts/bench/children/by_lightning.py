"""Lightning's Trainer without logger and bar, which starts its second process itself; goes on by ckpt_path.

It goes on counting from the middle of the epoch, but a stock DataLoader begins again with the epoch's first batches.
"""

import lightning
import task
import torch
from torch import nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, flags):
        super().__init__()
        self.model, self.flags = task.model(), flags

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            task.tell(self.global_step)
        if self.global_step == self.flags.limit_steps:
            self.trainer.save_checkpoint(self.flags.out / "checkpoint.ckpt")


def main():
    flags = task.flags()
    file = flags.out / "checkpoint.ckpt"
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=flags.cpu, max_epochs=1, max_steps=flags.limit_steps, **off
    )
    batches = DataLoader(task.dataset(), task.BATCH // flags.cpu, shuffle=True)
    trainer.fit(Module(flags), batches, ckpt_path=file if file.exists() else None)


if __name__ == "__main__":
    main()
