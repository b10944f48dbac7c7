"""The order of an epoch: a pure function of (n, seed, epoch), of which any part can be computed alone."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lib.utils import seeding

TORCH_UP_TO = 1 << 24  # samples: so far the order is torch's own, kept as a tensor of 4 bytes each
BLOCK = 1 << 13  # places computed at once: the temporary arrays stay in the processor's cache
ROUNDS = 8
SIDE = 8  # the least a and b: on fewer than 5 x 4 pairs, eight rounds do not draw every permutation equally often


@dataclass(frozen=True)
class Order:
    """A sequence of n indices, on the CPU: `len(order)`, `order[start:stop:step]`, `order.take(places)`."""

    n: int
    take: Callable[[Tensor], Tensor]  # (k,) int64, places in 0..n-1, to the indices there: (k,) int64

    def __len__(self):
        return self.n

    def __getitem__(self, part: slice) -> Tensor:
        places = range(self.n)[part]
        stop = places.start + len(places) * places.step
        return self.take(torch.arange(places.start, stop, places.step, device="cpu"))


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> Order | Tensor:
    """Return the indices 0..n-1 in the order in which one epoch draws them: an Order, or a tensor with its methods.

    Up to 2^24 samples it is exactly what torch's DistributedSampler deals out, before its padding. Beyond, torch's
    would cost seconds and gigabytes and is not followed: a keyed permutation is, which starts anywhere at once.
    """
    if not shuffle:
        return Order(n, lambda places: places)
    if n > TORCH_UP_TO:
        return Order(n, KeyedPermutation(n, seed, epoch).take)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(n, generator=generator, dtype=torch.int32, device="cpu")


class KeyedPermutation:
    """A permutation of 0..n-1, n up to 2^62, drawn by (n, seed, epoch); its state is eight keys, whatever n is.

    A Feistel network of 8 rounds (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
    functions", 1988) over pairs (left, right) in a x b, with a and b close to the square root of n and addition
    modulo a and b in place of xor. What falls outside 0..n-1 is sent through again until it falls inside (generalised
    Feistel and cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); from n = 64 on,
    hardly one index in the square root of n does. The round function is SplitMix64's, brought below a or b by a
    multiplication (Lemire, "Fast random integer generation in an interval", 2019); the keys are a BLAKE2b digest.
    Good for drawing samples; no cipher.
    """

    def __init__(self, n: int, seed: int, epoch: int):
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a keyed permutation of {n} places cannot be made: 1 to 2^62 can")
        self.n = n
        self.left = max(math.isqrt(n - 1) + 1, SIDE)
        self.right = max(-(-n // self.left), SIDE)
        digest = hashlib.blake2b(f"{n}/{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def take(self, places: Tensor) -> Tensor:
        """Return where these places are sent, computed block by block: (k,) int64 in 0..n-1, in and out."""
        indices = places.numpy().view(np.uint64).copy()
        for start in range(0, len(indices), BLOCK):
            block = indices[start : start + BLOCK]
            outside = np.arange(len(block))
            while outside.size:
                block[outside] = self._encrypt(block[outside])
                outside = outside[block[outside] >= np.uint64(self.n)]
        return torch.from_numpy(indices.view(np.int64))

    def _encrypt(self, places: np.ndarray) -> np.ndarray:
        left, right = np.divmod(places, np.uint64(self.right))
        for key in range(0, ROUNDS, 2):
            left = _add(left, _draw(right ^ self.keys[key], self.left), self.left)
            right = _add(right, _draw(left ^ self.keys[key + 1], self.right), self.right)
        return left * np.uint64(self.right) + right


def _add(half: np.ndarray, other: np.ndarray, size: int) -> np.ndarray:
    """Return their sum modulo `size`, both below it."""
    total = half + other
    return np.minimum(total, total - np.uint64(size))  # unsigned: below size the difference wraps to a huge number


def _draw(states: np.ndarray, size: int) -> np.ndarray:
    """Return a number below `size` for each state."""
    bits = size.bit_length()  # the high 64 - bits of 64 are kept: times size they still fit into 64
    return (seeding.scramble(states) >> np.uint64(bits)) * np.uint64(size) >> np.uint64(64 - bits)
