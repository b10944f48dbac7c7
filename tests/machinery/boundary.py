"""Let something happen to a run's folder or disk after a step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lib.trainer import trainer


def after_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[Path], object]):
    """Call act(folder) in a run of one process after this step, before what is due then and after the last save."""
    real = trainer.Trainer.after_step

    def boundary(self):
        if self.state.step == step:
            self.checkpoints.finish()
            act(self.folder)
        return real(self)

    patch.setattr(trainer.Trainer, "after_step", boundary)
