"""Steps whose gradient or buffers are not finite: they are skipped and counted; too many in a row end the run."""

from pathlib import Path

import torch


class BadSteps(RuntimeError):
    """Too many steps in a row had no finite gradient."""


class Counter:
    """How many steps were bad: `total` in the run, `row` in a row until now. `most` in a row are too many."""

    def __init__(self, most: int):
        self.most, self.total, self.row = most, 0, 0

    def count(self, norms: list):
        """Takes in the gradient norms (0-d tensors) of the steps since the last call. Waits for the device."""
        finite = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        self.row = next((i for i, good in enumerate(reversed(finite)) if good), len(finite) + self.row)
        self.total += finite.count(False)

    @property
    def too_many(self) -> bool:
        return self.row >= self.most

    def told(self, step: int, samples: list[int], good: Path | None) -> str:
        """Why the run ends at a step of these samples, and what may help; `good`: its last checkpoint."""
        return (
            f"{self.row} steps in a row without a finite gradient (-max_bad_steps {self.most}), the last of them "
            f"step {step} with the samples {samples[:64]}; last good checkpoint: {good or 'none'}; a lower "
            f"-lr_start, -clip_grad or -bf16 for -fp16 may help"
        )
