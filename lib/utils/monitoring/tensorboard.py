"""TensorBoard: the event file of a run."""

import functools
import logging
from pathlib import Path

from torch import Tensor

log = logging.getLogger(__name__)


class Board:
    """Write scalars, images and histograms of a run for TensorBoard, by torch's SummaryWriter; rank 0 (main) only.

    The file is opened at the first use, as the package takes a moment to import. `scalars` flushes, so that every
    log line survives kill -9. If the file cannot be written, one warning says so and the rest is dropped.

    Args:
        folder: where the event file goes.
        main: whether this is rank 0.
        first_step: the first step that will be logged. TensorBoard drops what an earlier start of the run has written
            from there on.
        config: all flags and their values.
        hparams: names of the flags by which runs are compared.
    """

    def __init__(self, folder: Path, main: bool, first_step: int, config: dict, hparams: list[str]):
        self._folder, self._first_step = folder, first_step
        self._config, self._hparams = config, hparams
        self._on = main
        self._success = None  # marks the run as a success

    def scalars(self, step: int, values: dict[str, float | None]):
        """Add the points of one step, {"train/loss": 0.3, ...}, and flush. None is left out."""

        def write(writer):
            for tag, value in values.items():
                if value is not None:
                    writer.add_scalar(tag, value, step)
            writer.flush()

        self._write(write)

    def image(self, tag: str, image: Tensor, step: int):
        """Add an image (C, height, width) of uint8."""
        self._write(lambda writer: writer.add_image(tag, image, step))

    def histogram(self, tag: str, values: Tensor, step: int):
        """Add the distribution of the finite ones of these values, in 64 bins."""

        def write(writer):
            finite = values[values.isfinite()].float()
            if finite.numel():
                writer.add_histogram(tag, finite, step, bins=64)

        self._write(write)

    def close(self, finished: bool):
        """Close the file. A finished run is marked as a success; any other may be resumed some day."""
        if self._success is None:
            return
        if finished:
            self._write(lambda writer: writer.file_writer.add_summary(self._success))
        self._write(lambda writer: writer.close())

    def _write(self, write):
        if not self._on:
            return
        try:
            write(self._writer)
        except (ImportError, OSError) as error:
            self._on = False
            log.warning("nothing more is written for TensorBoard (%s); training continues", error)

    @functools.cached_property
    def _writer(self):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        writer.add_text("config", _table(self._config), self._first_step)
        # SummaryWriter.add_hparams would show each run twice: it writes them into a folder of their own.
        values = {name: _plain(self._config[name]) for name in self._hparams}
        experiment, start, self._success = hparams(values, dict.fromkeys(METRICS))
        writer.file_writer.add_summary(experiment)
        writer.file_writer.add_summary(start)
        return writer


METRICS = ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy")  # by which runs are compared


def _table(config):
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in config.items()]
    return "\n".join(["| flag | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def _plain(value):
    return value if type(value) in (int, float) else str(value)
