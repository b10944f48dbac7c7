"""What a seed for every sample and every micro-batch costs: CPU time per step with the seeding over that without.

    python scripts/bench/seeding.py [-rounds 15] [-case N] [-json FILE]

The same trainer runs epochs with and without in turn, on one process and thread; the figure is the median of the
pairs' ratios. Processor time, not the clock's, so that other work on the machine counts less.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import contenders
import torch

from lib.utils import seeding
from lib.utils.data import fetch
from lib.utils.distributed import World

MLP = (
    "-dataset random -random_samples 16000 -image_size 8 -num_classes 10 -arch mlp -mlp_width 64 -mlp_depth 1 "
    "-batch_size 32"
)
RESNET = "-dataset fake -fake_samples 64 -image_size 64 -num_classes 10 -arch resnet -resnet_depth 18 -batch_size 32"
CASES = {  # words, how samples are made to be drawn, the most that is wanted
    "tiny MLP, the same samples every time": (MLP, lambda dataset: dataset, 0.05),
    "tiny MLP, a batch drawn at once": (MLP, lambda dataset: drawn(dataset), 0.05),
    "tiny MLP, each sample drawn": (MLP, lambda dataset: drawn(contenders.Plain(dataset)), None),
    "ResNet-18 at 64x64, each sample drawn": (RESNET, lambda dataset: drawn(contenders.Plain(dataset)), 0.02),
}


def drawn(dataset):
    """The dataset as one whose samples are not the same every time."""
    dataset.fixed = False
    return dataset


def unseeded(epoch) -> float:
    """CPU seconds a step of one epoch without seeds."""
    with mock.patch.multiple(seeding, for_sample=nothing, for_micro_batch=nothing):
        return epoch()


def nothing(*_):
    """No seed."""


def measure(words: str, changed, rounds: int) -> dict:
    """Medians of one case: microseconds a step without seeds, and the share that they add."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = contenders.trainer_of(contenders.Case(words, folder, World()))
        fetched = trainer.loaders["train"].fetched
        fetched.fetch = fetch.Fetch(changed(fetched.fetch.dataset), trainer.args.seed)
        epoch = contenders.timed(trainer, time.process_time)
        pairs = [(epoch(), unseeded(epoch)) for _ in range(rounds + 1)][1:]
        trainer.logger.bar.close()
    return {
        "step_us": 1e6 * statistics.median(without for _, without in pairs),
        "share": statistics.median(with_seeds / without - 1 for with_seeds, without in pairs),
    }


def calls(repeats: int = 2000) -> dict:
    """Microseconds of one call of each kind."""
    kinds = {
        "a sample": lambda number: seeding.for_sample(0, 1, number),
        "a micro-batch": lambda number: seeding.for_micro_batch(0, number, 0, torch.device("cpu")),
    }
    found = {name: [] for name in kinds}
    for _ in range(15):
        for name, call in kinds.items():
            began = time.process_time()
            for number in range(repeats):
                call(number)
            found[name].append((time.process_time() - began) / repeats)
    return {name: 1e6 * statistics.median(each) for name, each in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-rounds", type=int, default=15, help="pairs of epochs")
    parser.add_argument("-json", help="write the figures to this file")
    parser.add_argument("-case", type=int, choices=range(len(CASES)), help="only this one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {"calls_us": calls()}
    print("  ".join(f"{name}: {cost:.1f} us" for name, cost in found["calls_us"].items()))
    print(f"{'case':40} {'step us':>10} {'seeding':>8} {'wanted':>8}")
    for number, (name, (words, changed, wanted)) in enumerate(CASES.items()):
        if asked.case not in (None, number):
            continue
        found[name] = row = measure(words, changed, asked.rounds)
        print(f"{name:40} {row['step_us']:10.0f} {row['share']:8.2%} {f'< {wanted:.0%}' if wanted else '':>8}",
              flush=True)  # fmt: skip
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
