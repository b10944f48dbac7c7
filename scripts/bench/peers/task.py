"""What every script of this folder trains: data, model, loss and learning rate, from flags of train.py's names.

The builders are those of lib/dataset and lib/arch, so that all scripts train the same network, from the same first
weights, on the same samples. How they train it is their own.
"""

import argparse
import functools
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lib.core import scheduler
from lib.utils import seeding
from lib.utils.data.fetch import option

LOG_EVERY = 50  # steps


def flags() -> argparse.Namespace:
    """Return the flags of this process, with the defaults of train.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-dataset", default="digits")
    parser.add_argument("-arch", default="convnet")
    parser.add_argument("-out", type=Path, default=Path("out"), help="folder of the checkpoints and result.json")
    parser.add_argument("-cpu", type=int, default=1, help="processes")
    parser.add_argument("-gpus", help="limit.py: train on the first GPU")
    parser.add_argument("-bf16", action="store_true", help="limit.py: mixed precision")
    parser.add_argument("-compile", nargs="?", const="blocks", help="limit.py: torch.compile")
    parser.add_argument("-limit_steps", type=int, help="save and stop after this step")
    parser.add_argument("-save_every", default="1epoch", help="1epoch, or Nsteps")
    for name, default in {"lr_start": 1e-3, "lr_end": 1e-6, "lr_warmup": 0.0, "weight_decay": 0.01}.items():
        parser.add_argument(f"-{name}", type=float, default=default)
    for name in ("label_smoothing", "clip_grad"):
        parser.add_argument(f"-{name}", type=float, default=0.0)
    for name, default in {"epochs": 10, "batch_size": 64, "seed": 0}.items():
        parser.add_argument(f"-{name}", type=int, default=default)
    for name, default in {"num_classes": 10, "channels": 1, "image_size": 8}.items():
        parser.add_argument(f"-{name}", type=int, default=default)
    parser.set_defaults(data="data", augment=True, shuffle=True)
    for kind in ("dataset", "arch"):  # a dataset sets the default of -arch
        plugin = _plugin(kind, getattr(parser.parse_known_args()[0], kind))
        if hasattr(plugin, "add_args"):
            plugin.add_args(parser)
        if hasattr(plugin, "describe"):
            parser.set_defaults(**plugin.describe(parser.parse_known_args()[0]))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.save_steps = int(args.save_every.removesuffix("steps")) if args.save_every.endswith("steps") else None
    return args


def datasets(args) -> dict[str, Dataset]:
    """Return the splits: train, and val and test where the dataset has them."""
    found = _plugin("dataset", args.dataset).get_dataset(args)
    return found if isinstance(found, dict) else {"train": found}


def loader(dataset: Dataset, batch_size: int, *, augmented_by: Dataset | None = None, **options) -> DataLoader:
    """Return a stock DataLoader whose batches are fetched whole and finished (augmented, normalized).

    Args:
        augmented_by: the dataset whose `on_device` finishes a batch, if it is not `dataset` itself.
    """
    finish = option(augmented_by or dataset, "on_device")
    return DataLoader(dataset, batch_size, collate_fn=functools.partial(_finished, finish), **options)


def _finished(finish, batch: tuple) -> tuple:
    return finish(batch, torch.rand(len(batch[0]), 8)) if finish else batch


def model(args) -> nn.Module:
    """Return the network, with the first weights that train.py gives it."""
    seeding.seed(seeding.MODEL, args.seed)
    return _plugin("arch", args.arch).get_model(args)


def loss_of(args, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch: of classes (B, C), or tokens (B, length, C)."""
    outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(outputs, targets, label_smoothing=args.label_smoothing)


def sums(args, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what a batch adds to an evaluation: loss times samples, right answers (of tokens: shares), samples."""
    right = (outputs.argmax(-1) == targets).float().reshape(len(targets), -1).mean(1)
    return torch.stack([loss_of(args, outputs, targets) * len(targets), right.sum(), torch.tensor(len(targets))])


def groups(model: nn.Module, args) -> list[dict]:
    """Return the parameter groups: no weight decay on biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def lr_at(step: int, steps: int, args) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine, with so many steps an epoch."""
    warmup, total = args.lr_warmup * steps, args.epochs * steps
    return scheduler.lr_at(step, total=total, warmup=warmup, start=args.lr_start, end=args.lr_end)


def report(args, step: int, **figures):
    """Print the last line, and write it to result.json for compare.py."""
    result = {"step": step, **{name: float(value) for name, value in figures.items()}}
    print(json.dumps(result), flush=True)
    (args.out / "result.json").write_text(json.dumps(result))


def _plugin(kind: str, name: str):
    return importlib.import_module(f"lib.{kind}.{name}")
