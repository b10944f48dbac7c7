"""Steps whose gradient or buffers are not finite: they are skipped and counted; too many in a row end the run."""

from pathlib import Path

import torch

from lib.utils.checkpoint.state import State

HELP = "a lower -lr_start, -clip_grad or -bf16 for -fp16 may help"


class BadSteps(RuntimeError):
    """Too many steps in a row were skipped, or all of them."""


def count(norms: list, state: State):
    """Counts the bad ones of the steps with these gradient norms (0-d tensors) in the state. Waits for the device."""
    finite = torch.isfinite(torch.stack(norms)).tolist() if norms else []
    state.bad_row = next((i for i, good in enumerate(reversed(finite)) if good), len(finite) + state.bad_row)
    state.bad_steps += finite.count(False)


def too_many(state: State, most: int, samples: list[int], good: Path | None) -> str:
    """Why the run ends after `most` bad steps in a row or more, the last of them of these samples, and what may help;
    `good`: its last checkpoint."""
    return (
        f"{state.bad_row} steps in a row without a finite gradient (-max_bad_steps {most}), the last of them "
        f"step {state.step - 1} with the samples {samples[:64]}; last good checkpoint: {good or 'none'}; {HELP}"
    )
