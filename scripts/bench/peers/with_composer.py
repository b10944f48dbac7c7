"""MosaicML's Composer, as in its quick start; two processes are started by `composer -n 2`."""

import collections

import task
import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from torchmetrics import MeanMetric


class Loss(MeanMetric):
    """The mean loss."""


class Accuracy(MeanMetric):
    """The share of right answers."""


class Module(ComposerModel):
    def __init__(self, args, steps: int):
        super().__init__()
        self.model, self.args = task.model(args), args
        self.losses = collections.deque(maxlen=steps)  # of the last epoch; Composer's metrics begin again each step
        self.val_metrics = {"loss": Loss(), "accuracy": Accuracy()}

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        loss = task.loss_of(self.args, outputs, batch[1])
        self.losses.append(loss.detach())
        return loss

    def get_metrics(self, is_train: bool):
        return {} if is_train else self.val_metrics

    def update_metric(self, batch, outputs, metric):
        loss, right, samples = task.sums(self.args, outputs, batch[1])
        metric.update((loss if isinstance(metric, Loss) else right) / samples, samples)


def main():
    args = task.flags()
    data, share = task.datasets(args), args.batch_size // args.cpu
    train = task.loader(data["train"], share, sampler=dist.get_sampler(data["train"], shuffle=True))
    val, test = (
        task.loader(data[name], share, sampler=dist.get_sampler(data[name], shuffle=False)) if name in data else None
        for name in ("val", "test")
    )
    module = Module(args, len(train))
    optimizer = torch.optim.AdamW(task.groups(module, args), lr=1.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.lr_at(step, len(train), args))
    trainer = Trainer(
        model=module,
        train_dataloader=train,
        eval_dataloader=val,
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        max_duration=f"{args.limit_steps}ba" if args.limit_steps else f"{args.epochs}ep",
        device="cpu",
        save_folder=str(args.out / "checkpoints"),
        save_interval=f"{args.save_steps}ba" if args.save_steps else "1ep",
        save_num_checkpoints_to_keep=2,
        run_name="run",
        autoresume=True,
    )
    trainer.fit()
    if test and not args.limit_steps:
        trainer.eval(eval_dataloader=test)
    figures = {"train_loss": torch.stack(list(module.losses)).mean()}
    if val and not args.limit_steps:
        figures |= {f"val_{name}": metric.compute() for name, metric in trainer.state.eval_metrics["eval"].items()}
    if dist.get_global_rank() == 0:
        task.report(args, trainer.state.timestamp.batch.value, **figures)
    trainer.close()


if __name__ == "__main__":
    main()
