"""TensorBoard: the event file of a run."""

import functools
import logging
from pathlib import Path

from torch import Tensor

log = logging.getLogger(__name__)
METRICS = ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy")  # by which runs are compared


class Board:
    """The event file of a run, written by torch's SummaryWriter; rank 0 (main) only.

    It is opened at the first use, as the import takes a moment. `scalars` flushes: kill -9 loses no log line. If the
    file cannot be written, one warning says so and the rest is dropped.

    Args:
        first_step: TensorBoard drops what an earlier start of the run has logged from this step on.
        config: all flags and their values.
        hparams: names of the flags by which runs are compared.
    """

    def __init__(self, folder: Path, main: bool, first_step: int, config: dict, hparams: list[str]):
        self._folder, self._on, self._first_step = folder, main, first_step
        self._config, self._hparams = config, hparams
        self._success = None  # what marks the run as a success

    def scalars(self, step: int, values: dict[str, float]):
        """Add the points of one step, {"train/loss": 0.3, ...}, and flush."""

        def write(writer):
            for tag, value in values.items():
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
        """Close the file, if it is open. A finished run is marked as a success."""
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
        except (ImportError, OSError, AttributeError, TypeError) as error:  # the last two: another protobuf
            self._on = False
            log.warning("nothing more is written for TensorBoard (%s); training continues", error)

    @functools.cached_property
    def _writer(self):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in self._config.items()]
        rows = ["| flag | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]
        writer.add_text("config", "\n".join(rows), self._first_step)
        # Not SummaryWriter.add_hparams: it makes a second run of them, in a folder of its own.
        flags = {name: self._config[name] for name in self._hparams}
        flags = {name: value if type(value) in (int, float) else str(value) for name, value in flags.items()}
        experiment, start, self._success = hparams(flags, dict.fromkeys(METRICS))
        for summary in (experiment, start):
            writer._get_file_writer().add_summary(summary)
        return writer
