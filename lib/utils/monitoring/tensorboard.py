"""TensorBoard: the event file of a run, written by TensorBoard's own RecordWriter.

torch's SummaryWriter writes in a thread, and a flush waits for it: where the cores are at work, a log line costs 0.4
to 3.5 ms, and 0.1 to 0.2 ms so (`-arch mlp -mlp_width 32 -log_every 1`, two cores, 2026-11-22).
"""

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)


class Board:
    """The event file of a run, in its folder.

    It is opened at the first use, as the import takes a moment. Everything is flushed: kill -9 loses no log line. If
    the file cannot be written, one warning says so and the rest is dropped.

    Args:
        first_step: TensorBoard drops what an earlier start of the run has logged from this step on.
        hparams: the flags by which runs are compared, and their values.
    """

    def __init__(self, folder: Path, first_step: int, hparams: dict[str, Any]):
        self._folder, self._on, self._first_step, self._hparams = folder, True, first_step, hparams
        self._writer: Any = None
        self._summary: Any = None  # torch's module that makes the messages

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add the points of one step, {"train/loss": 0.3, ...}."""
        points = [{"tag": tag, "simple_value": float(value)} for tag, value in values.items()]
        self._try(lambda: self._add(step, summary={"value": points}))

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Add an image (height, width, 3) of uint8."""
        self._try(lambda: self._add(step, summary=self._summary.image(tag, image, dataformats="HWC")))

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
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary = summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"  # TensorBoard sorts files by name
        self._writer = RecordWriter((self._folder / name).open("xb"))
        self._add(file_version="brain.Event:2")
        self._add(self._first_step, session_log={"status": "START"})
        items = self._hparams.items()
        flags = {name: value if type(value) in (int, float) else str(value) for name, value in items}
        # Without torch's list of flags and metrics, which holds for one run, TensorBoard shows those of all runs.
        self._add(summary=summary.hparams(flags, {})[1])

    def _add(self, step: int = 0, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._writer.flush()
