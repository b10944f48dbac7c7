"""The loops that peers.py compares: ours, a bare PyTorch one, Lightning's two, Accelerate's, and a template's.

Each is a function (Case) -> run, and run() trains one epoch and returns its seconds per step. All train the same
model on the same samples with AdamW, on the CPU, in this process, which may be one of several.
"""

import contextlib
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import train
from lib import config
from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.core import parallel
from lib.utils import runtime, seeding, watchdog
from lib.utils.checkpoint import run_folder
from lib.utils.checkpoint.state import State
from lib.utils.data import fetch, loader, prefetch
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.monitoring import logger, throughput


@dataclass
class Case:
    """What is trained: flags of train.py, and where this process stands."""

    words: str
    folder: str
    world: World
    clock: Callable[[], float] = time.perf_counter

    def args(self):
        here = ["-cpu", "1"] if self.world.device.type == "cpu" else []
        return config.parse_args([*self.words.split(), "-out", self.folder, "-epochs", "100000", *here])

    def model(self) -> nn.Module:
        args = self.args()
        seeding.for_building(args.seed)
        return train.plugin("arch", args.arch).get_model(args)

    def splits(self) -> dict:
        args = self.args()
        return loader.splits(train.plugin("dataset", args.dataset).get_dataset(args), args.dataset)

    def batches(self, sampler=None) -> DataLoader:
        """A stock DataLoader over the samples one by one, of this process's share of the batch."""
        each = self.args().batch_size // self.world.size
        return DataLoader(Plain(self.splits()["train"]), each, shuffle=sampler is None, sampler=sampler)

    def shared(self) -> DataLoader:
        """The same with torch's sampler for several processes, where there are several."""
        if self.world.size == 1:
            return self.batches()
        return self.batches(DistributedSampler(Plain(self.splits()["train"])))


class Plain(Dataset):
    """The samples one at a time, as most data sets give them; images as floats."""

    def __init__(self, dataset):
        finish, rows = prefetch.Finish(dataset, 0, torch.device("cpu")), list(range(len(dataset)))
        self.tensors = finish(0, rows, fetch.Fetch(dataset, 0)[0, rows])

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


def trainer_of(case: Case):
    """Baton's trainer, ready to train, which logs as it does by default."""
    args, world, splits = case.args(), case.world, case.splits()
    plan = Plan(len(splits["train"]), args.batch_size, args.batch_size // world.size, ranks=world.size)
    model = parallel.wrap(case.model(), args, world, arch=train.plugin("arch", args.arch))
    optimizer = optimizers.get_optimizer(model, args, plan.batch)
    folder = run_folder.run_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    log = logger.Logger(folder, world, args, total_steps=args.epochs * plan.steps, state=State())
    parts = (loader.get_loaders(splits, plan, world, args), model, losses.get_loss(args), optimizer, log)
    trainer = train.plugin("trainer", args.trainer).Trainer(args, world, *parts)
    trainer.rate = throughput.Rate(trainer.total_steps, trainer.state, world.device)
    watch = watchdog.watched(trainer.state, trainer.ballot, world, args.hang_minutes, trainer.folder)
    trainer.watchdog = contextlib.ExitStack().enter_context(watch)  # to the end of the process
    return trainer


def ours(case: Case) -> Callable[[], float]:
    """Baton."""
    runtime.kernels(case.world, deterministic=False)
    return timed(trainer_of(case), case.clock)


def timed(trainer, clock=time.perf_counter) -> Callable[[], float]:
    """A function that trains an epoch and returns its seconds per step; the last log line waits for the device."""

    def run():
        with runtime.frozen():  # as in fit
            began = clock()
            trainer.train_epoch()
            seconds = clock() - began
        trainer.state.epoch += 1
        trainer.state.sums = {}
        return seconds / trainer.plan.steps

    return run


def bare(case: Case) -> Callable[[], float]:
    """What most people write: a DataLoader, DistributedDataParallel, four lines."""
    model = case.model()
    model = DistributedDataParallel(model) if case.world.size > 1 else model
    return plain(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3), case.shared())


def plain(case: Case, model, optimizer, batches, backward=torch.Tensor.backward) -> Callable[[], float]:
    """The four lines, with the package's own way to call backward."""
    loss = losses.get_loss(case.args())

    def run():
        model.train()
        began = case.clock()
        for inputs, targets in batches:
            optimizer.zero_grad()
            backward(loss(model(inputs), targets))
            optimizer.step()
        return (case.clock() - began) / len(batches)

    return run


def template(case: Case) -> Callable[[], float]:
    """The habits of many templates: the loss read and written to TensorBoard at every step, and a progress bar."""
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    model, loss, batches = case.model(), losses.get_loss(case.args()), case.shared()
    model = DistributedDataParallel(model) if case.world.size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**9)
    writer, step = SummaryWriter(f"{case.folder}/template") if case.world.is_main else None, 0

    def run():
        nonlocal step
        model.train()
        began, total = case.clock(), 0.0
        with Path("/dev/null").open("w") as nowhere:
            for inputs, targets in tqdm(batches, file=nowhere):
                optimizer.zero_grad()
                value = loss(model(inputs), targets)
                value.backward()
                optimizer.step()
                schedule.step()
                total += value.item()
                step += 1
                if writer:
                    writer.add_scalar("train/loss", value.item(), step)
                    writer.add_scalar("train/lr", schedule.get_last_lr()[0], step)
        return (case.clock() - began) / len(batches)

    return run


def fabric(case: Case) -> Callable[[], float]:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", **_lightning("lightning.fabric", case.world))
    one.launch()
    model = case.model()
    model, optimizer = one.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return plain(case, model, optimizer, one.setup_dataloaders(case.batches()), one.backward)


def lightning(case: Case) -> Callable[[], float]:
    """Lightning's Trainer, without logger, bar and checkpoints: the time between its hooks around an epoch."""
    import lightning as lit

    class Module(lit.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.loss, self.seconds = case.model(), losses.get_loss(case.args()), 0.0

        def training_step(self, batch, _):
            return self.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_epoch_start(self):
            self.began = case.clock()

        def on_train_epoch_end(self):
            self.seconds = case.clock() - self.began

    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module, batches = Module(), case.batches()

    def run():
        words = _lightning("lightning.pytorch", case.world)  # a strategy serves one trainer
        trainer = lit.Trainer(accelerator="cpu", max_epochs=1, **off, **words)
        trainer.fit(module, batches)
        return module.seconds / trainer.num_training_batches

    return run


def accelerate(case: Case) -> Callable[[], float]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    one, model = Accelerator(cpu=True), case.model()
    parts = one.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), case.batches())
    return plain(case, *parts, one.backward)


def _lightning(package: str, world: World) -> dict:
    """Options of Lightning where other processes are there already."""
    if world.size == 1:
        return {"devices": 1}
    strategies = importlib.import_module(f"{package}.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    environment = environments.TorchElasticEnvironment()  # torchrun's variables
    strategy = strategies.DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
    return {"devices": world.size, "strategy": strategy}


ALL = {"Baton": ours, "bare PyTorch": bare, "Lightning Fabric": fabric, "Lightning Trainer": lightning,
       "Accelerate": accelerate, "source template": template}  # fmt: skip


@contextlib.contextmanager
def hushed():
    """Without what the packages have to say; the process group is left in the end."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
