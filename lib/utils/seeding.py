"""Randomness without state: every draw comes from a seed that is a pure function of the run's position.

SplitMix64's finalizer mixes (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

import random
from typing import Any

import numpy as np
import torch

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
# The streams of draws, and the numbers that make a place in each: the same on every rank and at every start.
SAMPLE = 1  # seed, epoch, index: of a sample, or of the first of a batch that is fetched as one
PASS = 2  # seed, step, number: a micro-batch's passes; with 1: the dataset's on_device for it; 2: what is between
MODEL, TRAINER = 3, 5  # seed: building them
DRAWS = 4  # seed, epoch, index: see `uniform`
IMPORT = 8  # number of the kind of plugin: what its file draws when it is imported
EVALUATION = 6  # seed, 0, number: a micro-batch of an evaluation, at any step, and in -eval
STEP = 7  # seed, step: what follows its passes; with 0: what is before; 1: an epoch's end; seed, epoch, 2: its start
SAMPLER = 9  # seed, epoch: what a dataset's own sampler draws, or another order


def hash_ints(*numbers: int) -> int:
    """Return a 64-bit hash of several numbers: each of its bits depends on every bit of theirs."""
    state = 0
    for number in numbers:
        state = splitmix64((state + number + GOLDEN) & MASK)
    return state


def uniform(seed: int, epoch: int, indices: list[int], count: int = 8) -> torch.Tensor:
    """Return numbers in [0, 1), (len(indices), count) float32: row i is a function of (seed, epoch, indices[i])."""
    states = splitmix64(np.asarray(indices, np.int64).astype(np.uint64) + np.uint64(hash_ints(DRAWS, seed, epoch)))
    bits = splitmix64(states[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
    return torch.from_numpy((bits >> 40).astype(np.float32) / np.float32(1 << 24))


def splitmix64(state: Any) -> Any:
    """Return SplitMix64's mixture of the bits of a number, or of an array of uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def seed(stream: int, *place: int, device: torch.device | None = None) -> None:
    """Seed Python, NumPy and torch, on the CPU and on the device, for a place of a stream (see above)."""
    value = hash_ints(stream, *place)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)
