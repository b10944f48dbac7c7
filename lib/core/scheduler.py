"""The learning rate as a pure function of the step."""

import math

# -lr_schedule: functions from the share of the steps after the warm-up that is done, 0 to 1, to the height of the
# learning rate: 1 is -lr_start, 0 is -lr_end. Yours must depend on nothing else: then a resume stays exact.
BY_NAME = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),  # SGDR, arXiv:1608.03983, without restarts
    "linear": lambda done: 1.0 - done,
    "constant": lambda done: 1.0,
    "step": lambda done: 0.1 ** min(2, math.floor(3 * done + 1e-9)),  # a tenth of the height after each third
    "wsd": lambda done: min(1.0, 5 * (1.0 - done)),  # warm-up, stable, decay in the last fifth: arXiv:2404.06395
}


def lr_at(step: int, *, kind: str = "cosine", total: int, warmup: float, start: float, end: float) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total`, of which `warmup` rise to `start`."""
    if step < warmup:
        return start * (step + 1) / (math.floor(warmup) + 1)
    return end + (start - end) * float(BY_NAME[kind](min(1.0, (step - warmup) / max(1.0, total - 1 - warmup))))
