"""TensorBoard: the event files of a run, and the server that -tb starts."""

import atexit
import importlib
import io
import json
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from lib.utils import console

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger(__name__)


class Board:
    """TensorBoard's event file of a run: scalars, text, configuration, hyper-parameters and images.

    Off rank 0 (main=False) every method does nothing. What comes before the first `scalars` is held back until then,
    so that the import is paid after the first steps. Each call is written through at once and by this thread: what
    was logged before a checkpoint is still there after kill -9, and a full disk or a missing package is one warning;
    torch's SummaryWriter, with its queue and thread, promises neither.

    purge_step: on resume, the first step that will be logged again; TensorBoard forgets older points from there on.
    """

    def __init__(self, folder: Path, main: bool, purge_step: int | None = None):
        self._folder, self._on, self._purge_step = Path(folder), main, purge_step
        self._held, self._file, self._header = [], None, b""
        self._session_began = False

    def scalars(self, step: int, values: dict):
        """Points of one step, {"train/loss": 0.3, ...}: before the slash is the group; None is left out."""
        self._hold(step, _scalars, {tag: float(value) for tag, value in values.items() if value is not None})
        self._release()

    def text(self, tag: str, text: str):
        """A text in markdown."""
        self._give(self._purge_step or 0, _text, tag, text)

    def config(self, values: dict):
        """The configuration, as a table of flags and values."""
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in values.items()]
        rows = [f"| {name} | {value} |" for name, value in cells]
        self.text("config", "\n".join(["| flag | value |", "|---|---|", *rows]))

    def hparams(self, values: dict, metric_names: list[str]):
        """What runs are compared by: hyper-parameters, and the tags of the scalars that judge them.

        They go into the run's own event file (SummaryWriter.add_hparams would make another run for them).
        """
        self._give(self._purge_step or 0, _session_start, values, metric_names)
        self._session_began = True

    def images(self, tag: str, images, step: int | None = None):
        """A grid of up to 64 samples: a tensor (B, C, H, W) of any range; only with 1 or 3 channels is it drawn."""
        if self._on and images.ndim == 4 and images.shape[1] in (1, 3) and len(images):
            self._give((self._purge_step or 0) if step is None else step, _image, tag, grid(images))

    def close(self, finished: bool = False):
        """Write what is still held. A finished run is marked as a success; any other may go on some day."""
        if finished and self._session_began:
            self._hold(self._purge_step or 0, _session_end)
        if self._held:
            self._release()
        if self._file is not None:
            self._file.close()
        self._on = False

    def _give(self, step, make, *values):
        self._hold(step, make, *values)
        if self._file is not None:
            self._release()

    def _hold(self, step, make, *values):
        if self._on:
            self._held.append((step, make, values))

    def _release(self):
        if not self._on or not self._opened():
            return
        held, self._held = self._held, []
        records = [_record(step=step, summary=make(*values)) for step, make, values in held]
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


def grid(images):
    """Up to 64 images (B, C, H, W) of any range as one picture (C, height, width) of uint8, as square as can be."""
    images = images.detach()[:64].float().cpu().nan_to_num()
    low, high = images.min(), images.max()
    images = ((images - low) / (high - low).clamp_min(1e-12) * 255).byte()
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    tiles = images.new_zeros(rows * columns, channels, height + 1, width + 1)  # one pixel between neighbours
    tiles[:count, :, :height, :width] = images
    tiles = tiles.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    return tiles.reshape(channels, rows * (height + 1), columns * (width + 1))


def _scalars(points):
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()])


def _text(tag, text):
    from torch.utils.tensorboard import summary

    return summary.text(tag, text)


def _image(tag, picture):
    from torch.utils.tensorboard import summary

    return summary.image(tag, picture, dataformats="CHW")


def _session_start(values, metric_names):
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    kinds = {bool: "bool", int: "number", float: "number", str: "string"}
    types = {"bool": api_pb2.DATA_TYPE_BOOL, "number": api_pb2.DATA_TYPE_FLOAT64, "string": api_pb2.DATA_TYPE_STRING}
    values = {
        name: value if type(value) in kinds else str(value) for name, value in values.items() if value is not None
    }
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        setattr(start.hparams[name], kinds[type(value)] + "_value", value)
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=types[kinds[type(value)]]) for name, value in values.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metric_names],
    )
    contents = {metadata.EXPERIMENT_TAG: {"experiment": experiment}}
    return _hparams({**contents, metadata.SESSION_START_INFO_TAG: {"session_start_info": start}})


def _session_end():
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams({metadata.SESSION_END_INFO_TAG: {"session_end_info": end}})


def _hparams(contents):
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    result = Summary()
    for tag, content in contents.items():
        data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
        plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
        result.value.add(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=metadata.NULL_TENSOR)
    return result


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


class Server:
    """TensorBoard's server while it runs: `address` once it answers; without a process, nothing."""

    def __init__(self, process: subprocess.Popen | None):
        self.address = ""
        self._process, self._owner = process, os.getpid()
        if process is not None:
            atexit.register(self.close)

    def close(self):
        """End the server; waits up to 2 seconds for it. In a forked child, which does not own it, nothing happens."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _announce(self, say):
        with self._process.stdout as stdout:
            answer = json.loads(stdout.readline() or '{"error": "it ended before it was ready"}')
        if self._process is None:  # closed in the meantime
            return
        if "error" in answer:
            log.warning("-tb: no TensorBoard server (%s); training goes on", answer["error"])
            return
        self.address = answer["address"]
        say(self.address)


def serve(folder: Path, say, enabled: bool = True) -> Server:
    """Start TensorBoard over `folder` on 127.0.0.1, on the first free port from 6006 on; returns at once.

    `say(address)` is called from a thread when it answers, after seconds; if it never does, there is one warning.
    TensorBoard knows no password, so a random word in the address keeps the machine's other users out: the word goes
    through a pipe, as command lines are public, and the data server, which would ask for no word, stays off.
    The server is in a session of its own (Ctrl-C goes to the run) and ends with this process, even after kill -9.
    """
    if not enabled:
        return Server(None)
    order = {"folder": str(Path(folder).resolve()), "word": secrets.token_urlsafe(16), "parent": os.getpid()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    command = [sys.executable, "-m", "lib.utils.tensorboard"]
    try:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    except OSError as error:
        log.warning("-tb: TensorBoard cannot be started (%s); training goes on", error)
        return Server(None)
    server = Server(process)
    with suppress(OSError), process.stdin:  # a child that is gone already shows in its answer
        process.stdin.write(json.dumps(order))
    threading.Thread(target=server._announce, args=(say,), daemon=True).start()
    return server


def _serve_until_orphaned():
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what packages print is not taken for the answer
    sys.excepthook = lambda kind, error, trace: _tell(answer, error=f"{kind.__name__}: {error}")
    order = json.load(sys.stdin)
    os.nice(10)
    from tensorboard import program

    server = program.TensorBoard()
    flags = ["--logdir", order["folder"], "--host", "127.0.0.1", "--path_prefix", "/" + order["word"]]
    server.configure(argv=["tensorboard", *flags, "--load_fast", "false"])
    _tell(answer, address=server.launch())
    # Asking for the parent serves any thread of it; PR_SET_PDEATHSIG fires when the thread ends that started us.
    while os.getppid() == order["parent"]:
        time.sleep(0.5)


def _tell(stream, **answer):
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":  # the process that serve() starts
    _serve_until_orphaned()
