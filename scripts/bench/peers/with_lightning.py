"""Lightning's Trainer with its defaults: logger, progress bar, checkpoints. It starts its second process itself."""

import lightning
import task
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    def __init__(self, args, steps: int):
        super().__init__()
        self.model, self.args, self.steps = task.model(args), args, steps

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = task.loss_of(self.args, self.model(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        self.evaluate("val", batch)

    def test_step(self, batch, _):
        self.evaluate("test", batch)

    def evaluate(self, split: str, batch):
        inputs, targets = batch
        loss, right, samples = task.sums(self.args, self.model(inputs), targets)
        figures = {f"{split}_loss": loss / samples, f"{split}_accuracy": right / samples}
        self.log_dict(figures, batch_size=len(targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(task.groups(self.model, self.args), lr=1.0, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.lr_at(step, self.steps, self.args))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    args = task.flags()
    data, share = task.datasets(args), args.batch_size // args.cpu
    train = task.loader(data["train"], share, shuffle=True)
    val, test = (task.loader(data[name], share) if name in data else None for name in ("val", "test"))
    if args.save_steps:
        keep = ModelCheckpoint(args.out, every_n_train_steps=args.save_steps)
    else:
        best = {"monitor": "val_accuracy", "mode": "max"} if val else {}
        keep = ModelCheckpoint(args.out, save_last=True, **best)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.cpu,
        max_epochs=args.epochs,
        max_steps=args.limit_steps or -1,
        gradient_clip_val=args.clip_grad or None,
        default_root_dir=args.out,
        callbacks=[keep],
        log_every_n_steps=task.LOG_EVERY,
    )
    module, stopped = Module(args, -(-len(train) // args.cpu)), args.out / "stopped.ckpt"
    trainer.fit(module, train, val, ckpt_path=stopped if stopped.exists() else None)
    figures = {name: trainer.callback_metrics.get(name) for name in ("train_loss_epoch", "val_loss", "val_accuracy")}
    if args.limit_steps:
        trainer.save_checkpoint(stopped)
    elif test:
        trainer.test(module, test)
    if trainer.is_global_zero:
        figures["train_loss"] = figures.pop("train_loss_epoch")
        task.report(
            args, trainer.global_step, **{name: value for name, value in figures.items() if value is not None}
        )


if __name__ == "__main__":
    main()
