"""Checks that what every rank holds a copy of is the same on all: weights that part train two models."""

import zlib

from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.checkpoint import shards
from lib.utils.checkpoint.state import unwrap
from lib.utils.distributed import World


def check(tensors: dict[str, Tensor], world: World, step: int, agreed: int) -> None:
    """Compare a digest of each tensor that is not sharded. All ranks call this at the same step.

    Raises RuntimeError on all ranks; it names the first tensor that differs, the ranks, and the step at which all
    `agreed`.
    """
    if world.size == 1:
        return
    mine = {name: digest(tensor) for name, tensor in tensors.items() if not shards.is_sharded(tensor)}
    first = distributed.broadcast(mine, world)
    odd = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
    parted = [(rank, names[0]) for rank, names in enumerate(distributed.gather(odd, world)) if names]
    if parted:
        name, ranks = parted[0][1], ", ".join(str(rank) for rank, _ in parted)
        raise RuntimeError(
            f"the copies of {name} differ: rank {ranks} and rank 0 have other values at step {step}; at step "
            f"{agreed} all were the same. Each process must change weights and buffers in the same way"
        )


def plain_numbers(modules: dict[str, nn.Module]) -> dict[str, float]:
    """Return the numbers that modules keep in plain attributes, by name: they are in no checkpoint."""
    found = {}
    for part, root in modules.items():
        for name, module in unwrap(root).named_modules(prefix=part):
            found |= {f"{name}.{key}": value for key, value in vars(module).items() if type(value) in (int, float)}
    return found


def digest(tensor: Tensor) -> int:
    """Return the CRC32 of a tensor's bytes."""
    return zlib.crc32(shards.as_bytes(tensor.detach().cpu()))
