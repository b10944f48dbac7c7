"""What every script of this folder trains: random numbers to random numbers, as train.py -dataset random does.

Each script is what a user of one package would write, and imports nothing else; starts.py starts it and times it. It
goes on from the checkpoint in -out where there is one, tells of its steps as train.py does, and saves after the last.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH, WIDTH = 2048, 64, 1024
STEPS = SAMPLES // BATCH


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("-cpu", type=int, default=1, help="processes")
    parser.add_argument("-out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("-limit_steps", type=int, default=STEPS, help="save and stop after this step")
    return parser.parse_args()


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH))


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, WIDTH)
    )  # the mlp of train.py as it comes


def tell(step: int):
    print(f"step {step}/{STEPS}", flush=True)
