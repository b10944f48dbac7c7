"""The order of an epoch: a pure function of (n, seed, epoch), of which any part can be computed alone."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from lib.utils import seeding

TORCH_UP_TO = 1 << 24  # samples: so far the order is torch's own, kept as a tensor of 4 bytes each
ROUNDS = 8
LEAST_BITS = 4  # of a half: in fewer, eight rounds do not draw every permutation equally often


def order(n: int, seed: int, epoch: int, shuffle: bool = True) -> "Tensor | KeyedPermutation":
    """Return the indices 0..n-1 in the order in which one epoch draws them: `len(order)`, `order[start:stop:step]`.

    Up to 2^24 samples it is exactly what torch's DistributedSampler deals out, before its padding. Beyond, torch's
    would cost seconds and gigabytes and is not followed: a keyed permutation is, which starts anywhere at once.
    """
    if n > TORCH_UP_TO or not shuffle:
        return KeyedPermutation(n, seed, epoch, shuffle)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(n, generator=generator, dtype=torch.int32, device="cpu")


class KeyedPermutation:
    """A permutation of 0..n-1, n up to 2^62, drawn by (n, seed, epoch); its state is a key for each round.

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
    1988) over the smallest even number of bits that holds n. What falls outside 0..n-1 is sent through again until it
    falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); on average four
    times at most, from n = 65 on. The round function is SplitMix64's; the keys are a BLAKE2b digest. Good for drawing
    samples; no cipher. Without `shuffle` it has no rounds, and is the identity.
    """

    def __init__(self, n: int, seed: int, epoch: int, shuffle: bool = True):
        self.n, self.half = n, max(-(-(n - 1).bit_length() // 2), LEAST_BITS)
        digest = hashlib.blake2b(f"{n}/{seed}/{epoch}".encode()).digest()  # 64 bytes
        self.keys = np.frombuffer(digest, "<u8").astype(np.uint64)[: ROUNDS if shuffle else 0]

    def __len__(self):
        return self.n

    def __getitem__(self, part: slice) -> Tensor:
        places = range(self.n)[part]
        return self.take(torch.from_numpy(np.arange(places.start, places.stop, places.step)))

    def take(self, places: Tensor) -> Tensor:
        """Return where these places are sent: (k,) int64 in 0..n-1, in and out."""
        indices = places.numpy().astype(np.uint64)
        outside = np.arange(len(indices))
        while outside.size:
            indices[outside] = self._encrypt(indices[outside])
            outside = outside[indices[outside] >= self.n]
        return torch.from_numpy(indices.astype(np.int64))

    def _encrypt(self, places: np.ndarray) -> np.ndarray:
        left, right = places >> self.half, places & ((1 << self.half) - 1)
        for key in self.keys:
            left, right = right, left ^ (seeding.splitmix64(right ^ key) >> (64 - self.half))
        return left << self.half | right
