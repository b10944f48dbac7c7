"""TensorBoard: the event file of a run."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)


class EventWriter:
    """The event file of a run, in its folder.

    Each call of `write` is flushed: kill -9 loses none. If the file cannot be written, one warning says so and the
    rest is dropped.

    Args:
        first_step: TensorBoard drops what an earlier start of the run has logged from this step on.
        hparams: the flags by which runs are compared, and their values.
    """

    def __init__(self, folder: Path, first_step: int, hparams: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter, summary

        flags = {name: value if type(value) in (int, float) else str(value) for name, value in hparams.items()}
        self._writer: SummaryWriter | None = SummaryWriter(folder, purge_step=first_step)
        # Without torch's list of flags and metrics, which holds for one run, TensorBoard shows those of all runs.
        self._writer.file_writer.add_summary(summary.hparams(flags, {})[1])

    def write(self, step: int, scalars: dict[str, float], images: dict[str, np.ndarray] | None = None) -> None:
        """Add points of a step, {"train/loss": 0.3, ...}, and images (height, width, 3) of uint8."""
        if self._writer is None:
            return
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
            for tag, image in (images or {}).items():
                self._writer.add_image(tag, image, step, dataformats="HWC")
            self._writer.flush()
        except OSError as error:
            self._writer = None
            log.warning("nothing more is written for TensorBoard (%s); training continues", error)

    def close(self) -> None:
        """Close the file."""
        if self._writer:
            with contextlib.suppress(OSError):
                self._writer.close()
