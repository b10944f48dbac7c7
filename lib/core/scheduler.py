"""The learning rate as a pure function of the step."""

import math

SCALES = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


def lr_at(step: int, *, total: int, warmup: float, start: float, end: float) -> float:
    """The learning rate of optimizer step `step` (from 0) of `total`.

    A linear rise to `start` over the first `warmup` steps, then a cosine fall to `end` at the last step
    (Loshchilov and Hutter, SGDR, arXiv:1608.03983, without restarts).
    """
    if step < warmup:
        return start * (step + 1) / (math.floor(warmup) + 1)
    done = min(1.0, (step - warmup) / max(1.0, total - 1 - warmup))
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * done))


def scale(kind: str, batch_size: int, lr_batch: int) -> float:
    """The factor on the learning rate for a batch of this size, none | linear | sqrt against `lr_batch`.

    linear: Goyal et al., arXiv:1706.02677. sqrt: Malladi et al., arXiv:2205.10287, where Adam's betas and eps
    change too (`lib.core.optimizer.scaled_adam`).
    """
    return SCALES[kind](batch_size / lr_batch)
