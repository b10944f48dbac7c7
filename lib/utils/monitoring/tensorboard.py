"""TensorBoard: the event file of a run, written by TensorBoard's own RecordWriter.

torch's SummaryWriter writes in a thread, and a flush waits for it: where the cores are at work, a log line costs 0.4
to 3.5 ms, and 0.1 to 0.2 ms so (`-arch mlp -mlp_width 32 -log_every 1`, two cores, 2026-11-22).
"""

import functools
import logging
import socket
import time
from pathlib import Path

from torch import Tensor

log = logging.getLogger(__name__)
METRICS = ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy")  # by which runs are compared


class Board:
    """The event file of a run; rank 0 (main) only.

    It is opened at the first use, as the import takes a moment. Everything is flushed: kill -9 loses no log line. If
    the file cannot be written, one warning says so and the rest is dropped.

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
        """Add the points of one step, {"train/loss": 0.3, ...}."""
        points = [{"tag": tag, "simple_value": float(value)} for tag, value in values.items()]
        self._write(lambda writer: _add(writer, step, summary={"value": points}))

    def image(self, tag: str, image: Tensor, step: int):
        """Add an image (C, height, width) of uint8."""

        def write(writer):
            from torch.utils.tensorboard import summary

            _add(writer, step, summary=summary.image(tag, image, dataformats="CHW"))

        self._write(write)

    def close(self, finished: bool):
        """Close the file, if it is open. A finished run is marked as a success."""
        if self._success is None:
            return
        if finished:
            self._write(lambda writer: _add(writer, summary=self._success))
        self._write(lambda writer: writer.close())
        self._success = None

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
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, text

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"  # TensorBoard sorts files by name
        writer = RecordWriter((self._folder / name).open("xb"))
        _add(writer, file_version="brain.Event:2")
        _add(writer, self._first_step, session_log={"status": "START"})
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in self._config.items()]
        rows = ["| flag | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]
        _add(writer, self._first_step, summary=text("config", "\n".join(rows)))
        flags = {name: self._config[name] for name in self._hparams}
        flags = {name: value if type(value) in (int, float) else str(value) for name, value in flags.items()}
        experiment, start, self._success = hparams(flags, dict.fromkeys(METRICS))
        _add(writer, summary=experiment)
        _add(writer, summary=start)
        return writer


def _add(writer, step: int = 0, **content):
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    writer.flush()
