"""Time per step of our loop over that of a bare hand-written one with a stock DataLoader, on one CPU process.

    python scripts/bench/loop.py [-rounds 9] [-json FILE]

Both train the same model on the same samples in one process, in turn; the figure is the median of the pairs' ratios.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils.data import DataLoader

from lib import config
from lib.core import loss as losses
from lib.core import optimizer as optimizers
from lib.utils import hangs, loader, report, run_folder, seeding
from lib.utils.distributed import World

CASES = {
    "tiny MLP (64-64-10), batch 32": "-dataset random -random_samples 16000 -image_size 8 -num_classes 10 -arch mlp "
    "-mlp_width 64 -mlp_depth 1 -batch_size 32",
    "ResNet-18 at 64x64, batch 32": "-dataset fake -fake_samples 128 -image_size 64 -num_classes 10 -arch resnet "
    "-resnet_depth 18 -batch_size 32",
}


def build(words: str, folder: str):
    """Our trainer and what a bare loop needs: model, loss, dataset."""
    import train

    args = config.parse_args([*words.split(), "-out", folder, "-epochs", "100000", "-model", "bench"])
    world = World()
    seeding.for_model(args.seed)
    splits = loader.splits(train.plugin("dataset", args.dataset).get_dataset(args), args.dataset)
    model = train.plugin("arch", args.arch).get_model(args)
    plan = loader.Plan(len(splits["train"]), args.batch_size, args.batch_size)
    loaders = loader.get_loaders(splits, plan, world, args)
    optimizer = optimizers.get_optimizer(model, args, plan.batch)
    trainer = train.plugin("trainer", args.trainer).Trainer(
        args, world, loaders, model, losses.get_loss(args), optimizer
    )
    trainer.report = report.Report(run_folder.path_of(args), world, args, trainer.total_steps, 0)
    trainer.hangs = hangs.Watch(trainer.state, trainer.ballot, world, math.inf, run_folder.path_of(args) / "hang.log")
    return args, splits["train"], trainer, train.plugin("arch", args.arch).get_model(args)


def ours(trainer) -> float:
    """Seconds a step of one epoch of our trainer, logging as it does by default."""
    began = time.perf_counter()
    trainer.train_epoch()
    trainer.state.epoch += 1
    trainer.metrics.end_epoch()
    return (time.perf_counter() - began) / trainer.plan.steps


def bare(dataset, batch_size, model, loss, optimizer) -> float:
    """Seconds a step of one epoch of what most people write."""
    batches = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model.train()
    began = time.perf_counter()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return (time.perf_counter() - began) / len(batches)


class Plain(torch.utils.data.Dataset):
    """The same samples, one at a time, as most data sets give them."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return (
            self.dataset[index]
            if not hasattr(self.dataset, "tensors")
            else tuple(t[index] for t in self.dataset.tensors)
        )


def measure(words: str, rounds: int) -> dict:
    """Medians of one case: microseconds a step of both, and the median of the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        args, dataset, trainer, model = build(words, folder)
        run_folder.path_of(args).mkdir(parents=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr_start)
        dataset = Plain(dataset)
        pairs = []
        for _ in range(rounds + 1):
            pairs.append((ours(trainer), bare(dataset, args.batch_size, model, losses.get_loss(args), optimizer)))
        pairs = pairs[1:]
        trainer.report.bar.close()
    ratios = [a / b for a, b in pairs]
    return {
        "ours_us": 1e6 * statistics.median(a for a, _ in pairs),
        "bare_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-rounds", type=int, default=9, help="pairs of epochs")
    parser.add_argument("-json", help="write the figures to this file")
    parser.add_argument("-case", type=int, choices=range(len(CASES)), help="only this one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    print(f"{'case':32} {'ours us':>10} {'bare us':>10} {'ratio':>7}  spread")
    for number, (name, words) in enumerate(CASES.items()):
        if asked.case not in (None, number):
            continue
        found[name] = row = measure(words, asked.rounds)
        print(f"{name:32} {row['ours_us']:10.0f} {row['bare_us']:10.0f} {row['ratio']:7.3f}  "
              f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}", flush=True)  # fmt: skip
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
