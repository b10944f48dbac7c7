"""TensorBoard: the event file of a run."""

import importlib
import io
import logging
import os
import socket
import time
from pathlib import Path

from lib.utils.monitoring import console

log = logging.getLogger(__name__)


class Board:
    """TensorBoard's event file of a run: scalars, texts, hyper-parameters, pictures and histograms.

    Off rank 0 (main=False) every method does nothing. What comes before the first `scalars` is held back until then,
    so that the import is paid after the first steps. Each call is written through at once and by this thread: what
    was logged before a checkpoint is still there after kill -9, and a full disk or a missing package is one warning;
    torch's SummaryWriter, with its queue and thread, promises neither. What is written is torch's and TensorBoard's
    own: summaries, records, events.

    purge_step: on resume, the first step that will be logged again; TensorBoard forgets older points from there on.
    """

    def __init__(self, folder: Path, main: bool, purge_step: int | None = None):
        self._folder, self._on, self._purge_step = Path(folder), main, purge_step
        self._held, self._file, self._header, self._end = [], None, b"", None

    def scalars(self, step: int, values: dict):
        """Points of one step, {"train/loss": 0.3, ...}: before the slash is the group; None is left out."""
        self._hold(step, _scalars, {tag: float(value) for tag, value in values.items() if value is not None})
        self._release()

    def text(self, tag: str, text: str):
        """A text in markdown."""
        self._give(None, "text", tag, text)

    def config(self, values: dict):
        """The configuration, as a table of flags and values."""
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in values.items()]
        rows = [f"| {name} | {value} |" for name, value in cells]
        self.text("config", "\n".join(["| flag | value |", "|---|---|", *rows]))

    def hparams(self, values: dict, metric_names: list[str]):
        """What runs are compared by: hyper-parameters, and the tags of the scalars that judge them.

        They go into the run's own event file (SummaryWriter.add_hparams would make another run for them).
        """
        values = {name: value if type(value) in (int, float) else str(value) for name, value in values.items()}
        self._give(None, self._hparams, values, metric_names)

    def picture(self, tag: str, picture, step: int | None = None):
        """A picture: a tensor (C, height, width) of uint8, C being 1 or 3."""
        self._give(step, "image", tag, picture, 1, "CHW")

    def histogram(self, tag: str, values, step: int):
        """How the finite ones of these values (a tensor of any shape) are spread, in 64 bins."""
        finite = values[values.isfinite()] if self._on else values
        if self._on and finite.numel():
            self._give(step, "histogram", tag, finite.float().cpu().numpy(), 64)

    def close(self, finished: bool = False):
        """Write what is still held. A finished run is marked as a success; any other may go on some day."""
        if self._held:
            self._release()
        if finished and self._end is not None:
            self._give(None, lambda: self._end)
        if self._file is not None:
            self._file.close()
        self._on = False

    def _give(self, step, make, *values):
        self._hold((self._purge_step or 0) if step is None else step, make, *values)
        if self._file is not None:
            self._release()

    def _hold(self, step, make, *values):
        if self._on:
            self._held.append((step, make, values))

    def _release(self):
        if not self._on or not self._opened():
            return
        held, self._held = self._held, []
        records = [_record(step=step, summary=_made(make, values)) for step, make, values in held]
        # The header says how to read the file and what to purge: nothing may stand there before it.
        if self._file.append(b"".join([self._header, *records])):
            self._header = b""

    def _opened(self):
        if self._file is not None:
            return True
        try:
            importlib.import_module("torch.utils.tensorboard.summary")
            self._file = console.Appender(_next_event_file(self._folder))
        except (ImportError, AttributeError, TypeError, OSError) as error:  # the middle two: protobuf does not fit
            self._on = False
            log.warning("nothing is written for TensorBoard (%s); training goes on", error)
            return False
        self._header = _header(self._purge_step)
        return True

    def _hparams(self, values, metric_names):
        from torch.utils.tensorboard import summary

        experiment, start, self._end = summary.hparams(values, dict.fromkeys(metric_names))
        experiment.MergeFrom(start)
        return experiment


def _made(make, values):
    from torch.utils.tensorboard import summary

    return (getattr(summary, make) if isinstance(make, str) else make)(*values)


def _scalars(points):
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()])


def _header(purge_step):
    from tensorboard.compat.proto.event_pb2 import SessionLog

    version = _record(file_version="brain.Event:2")
    if purge_step is None:
        return version
    return version + _record(step=purge_step, session_log=SessionLog(status=SessionLog.START))


def _record(**event):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(Event(wall_time=time.time(), **event).SerializeToString())
    return framed.getvalue()


def _next_event_file(folder):
    # TensorBoard reads the files in the order of their names: a clock that is behind must not put this one in front.
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    stamp = max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])
    return folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
