"""Randomness without state: every draw comes from a seed that is a pure function of the run's position.

The mixing function is SplitMix64's finalizer (Steele, Lea and Flood, Fast splittable pseudorandom number generators,
OOPSLA 2014).
"""

import random
from typing import Any

import numpy as np
import torch

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
SAMPLE, MICRO_BATCH, MODEL, DRAWS, TRAINER, EVALUATION, STEP = 1, 2, 3, 4, 5, 6, 7  # one stream each


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


def seed_building(seed: int, stream: int = MODEL) -> None:
    """Seed Python, NumPy and torch, the same on every rank and at every start, to build a part of the run."""
    _seed(hash_ints(stream, seed))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch for drawing one sample (or one fetched batch that begins with it)."""
    _seed(hash_ints(SAMPLE, seed, epoch, index))


def seed_micro_batch(seed: int, step: int, micro: int, device: torch.device) -> None:
    """Seed Python, NumPy and torch for the forward and backward pass of micro-batch `micro` of step `step`."""
    _seed(hash_ints(MICRO_BATCH, seed, step, micro), device)


def seed_step(seed: int, step: int, device: torch.device) -> None:
    """Seed Python, NumPy and torch, the same on every rank, for what follows the passes of a step."""
    _seed(hash_ints(STEP, seed, step), device)


def seed_evaluation(seed: int, micro: int, device: torch.device) -> None:
    """Seed Python, NumPy and torch for micro-batch `micro` of an evaluation, at any step, and in -eval."""
    _seed(hash_ints(EVALUATION, seed, micro), device)


def _seed(value: int, device: torch.device | None = None) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)
