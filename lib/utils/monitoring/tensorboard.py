"""TensorBoard: the event file of a run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)


class NoEventWriter:
    """The methods of EventWriter, which do nothing."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Do nothing."""

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class EventWriter:
    """The event file of a run, in its folder.

    It is opened at the first use, as the import takes a moment. Each log line is flushed: kill -9 loses none. If the
    file cannot be written, one warning says so and the rest is dropped.

    Args:
        first_step: TensorBoard drops what an earlier start of the run has logged from this step on.
        hparams: the flags by which runs are compared, and their values.
    """

    def __init__(self, folder: Path, first_step: int, hparams: dict[str, Any]):
        self._folder, self._on, self._first_step, self._hparams = folder, True, first_step, hparams
        self._writer: Any = None  # torch's SummaryWriter

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add the points of one step, {"train/loss": 0.3, ...}."""

        def write() -> None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()

        self._try(write)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Add an image (height, width, 3) of uint8."""
        self._try(lambda: self._writer.add_image(tag, image, step, dataformats="HWC"))

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._writer is not None:
            self._try(self._writer.close)
        self._on = False

    def _try(self, write: Callable[[], None]) -> None:
        if not self._on:
            return
        try:
            if self._writer is None:
                self._open()
            write()
        except (ImportError, OSError, AttributeError, TypeError) as error:  # the last two: another protobuf
            self._on = False
            log.warning("nothing more is written for TensorBoard (%s); training continues", error)

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter, summary

        self._writer = SummaryWriter(self._folder, purge_step=self._first_step)
        items = self._hparams.items()
        flags = {name: value if type(value) in (int, float) else str(value) for name, value in items}
        # Without torch's list of flags and metrics, which holds for one run, TensorBoard shows those of all runs.
        self._writer.file_writer.add_summary(summary.hparams(flags, {})[1])
