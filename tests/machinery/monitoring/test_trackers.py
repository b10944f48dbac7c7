"""-track: a real MLflow server, W&B offline, a TrainJob; killed runs, lost servers, and no key in any file."""

import json
import math
import os
import random
import signal
import ssl
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import ports
import pytest
import runs
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request
from processes import python, session, until

from scripts import track

SECRET = "3f" * 20
NEEDS = "needs uv pip install -r pyproject.toml --group track"


def logged_points(folder) -> dict[str, list[tuple[int, float]]]:
    """The points of metrics.jsonl by tag, without speeds, of which the tracker keeps the first values."""
    points = {}
    for line in runs.lines(folder):
        for tag, value in line.items():
            if "/" in tag and not tag.startswith("perf/"):
                points.setdefault(tag, []).append((line["step"], math.nan if value is None else value))
    return points


def has_no_key(folder) -> bool:
    return not any(SECRET.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def run_killed_at(start, name, flags, env, step, sent):
    """Kill a run at a step, after the tracker has received more than the newest checkpoint contains."""
    run = start(name, *flags, cpu=1, env=env, fault={"do": "pause", "step": step})
    [note] = run.wait_for_notes(1)
    until(lambda: sent(run.folder), what=lambda: f"figures in the tracker:\n{run.text()}")
    os.kill(note["pid"], signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    return run


class Server:
    """What MLflow's server at this address has."""

    def __init__(self, uri: str):
        self.uri, self.client = uri, pytest.importorskip("mlflow", reason=NEEDS).MlflowClient(uri)

    def is_ready(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        return False

    def tracked(self) -> list:
        """All runs of the experiment, oldest first."""
        experiment = self.client.get_experiment_by_name("baton")
        found = self.client.search_runs([experiment.experiment_id]) if experiment else []
        return sorted(found, key=lambda run: run.info.start_time)

    def points(self, run) -> dict[str, list[tuple[int, float]]]:
        history = {tag: self.client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
        points = {tag: [(one.step, one.value) for one in points] for tag, points in history.items()}
        assert len(points.pop("perf/samples_per_s")) == len(points["train/loss"])
        return {tag: values for tag, values in points.items() if not tag.startswith("perf/")}


@pytest.fixture
def server(tmp_path):
    # Below the range of ephemeral ports, which may be taken in the half minute until the server listens.
    port = next(filter(ports.is_free, random.sample(range(20000, 32000), 99)))
    server = Server(f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'store.db'}"]
    env, log = {**os.environ, "MLFLOW_TELEMETRY_ENABLED": "false", "DO_NOT_TRACK": "true"}, tmp_path / "server.log"
    with session(command, log, cwd=tmp_path, env=env) as process:
        until(lambda: process.poll() is not None or server.is_ready(), 250, what=log.read_text)
        assert process.poll() is None, log.read_text()
        yield server


def test_mlflow_has_each_step_of_a_killed_run_once(server, start):
    flags = ("-track", "mlflow", "-log_every", 1, "-save_every", "7steps")
    env = {"MLFLOW_TRACKING_URI": server.uri.replace("//", f"//somebody:{SECRET}@")}

    def sent(folder) -> bool:
        last = logged_points(folder)["train/loss"][-1][1]
        return server.tracked() and server.tracked()[-1].data.metrics.get("train/loss") == last

    run_killed_at(start, "run", flags, env, 33, sent)
    run = start("run", *flags, cpu=1, env=env)
    assert run.wait() == 0
    until(lambda: server.tracked()[0].info.status == "FINISHED", what=run.text)  # it may end in the background
    [tracked] = server.tracked()
    assert "-track: nothing" not in run.text()
    assert server.points(tracked) == logged_points(run.folder), "each step once, the same values"
    assert [step for step, _ in server.points(tracked)["train/loss"]] == [*range(1, 61)]
    assert (tracked.info.run_name, tracked.info.status) == ("run", "FINISHED")
    assert tracked.data.params["arch"] == "mlp" and float(tracked.data.params["lr_start"]) > 0
    assert has_no_key(run.folder)

    python("scripts/track.py", "mlflow", run.folder, env={**os.environ, **env})  # all is there: nothing is sent again
    assert len(server.tracked()) == 1 and server.points(server.tracked()[0]) == logged_points(run.folder)


def records(file: Path):
    """The records of W&B's file of a run, which has LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of the block is too small for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(whole)
            whole = b""


def rows(folder: Path) -> list[dict]:
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    found = [record.history for file in files for record in records(file) if record.HasField("history")]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in found]


def test_wandb_has_each_step_of_a_killed_run_once(start):
    pytest.importorskip("wandb", reason=NEEDS)
    flags = ("-track", "wandb", "-log_every", 1, "-save_every", "7steps")
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET}
    run = run_killed_at(start, "run", flags, env, 33, lambda folder: len(rows(folder)) >= 33)
    assert start("run", *flags, cpu=1, env=env).wait() == 0
    until(lambda: len(rows(run.folder)) >= len(runs.lines(run.folder)), what=lambda: f"{len(rows(run.folder))} rows")
    found = rows(run.folder)
    points = {}
    for row in found:
        for tag in [tag for tag in row if tag.startswith(("train/", "val/", "test/"))]:
            points.setdefault(tag, []).append((row["step"], float(row[tag])))
    assert points == logged_points(run.folder)
    assert [row["_step"] for row in found] == [*range(len(found))], "rows must be in order over all starts"
    ids = {file.stem for file in run.folder.glob("wandb/offline-run-*/*.wandb")}
    assert ids == {f"run-{json.loads((run.folder / 'wandb.json').read_text())['id']}"}
    assert has_no_key(run.folder)


def test_a_trainjob_shows_progress_time_left_and_the_last_figures(start, tmp_path):
    token, pem, requests = tmp_path / "token", tmp_path / "ca.crt", []
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=me -addext subjectAltName=IP:127.0.0.1".split()
    subprocess.run([*command, "-out", pem, "-keyout", pem], check=True, capture_output=True)
    token.write_text("old")

    class Trainer(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append(
                (self.headers["Authorization"], Request.from_json(body), json.loads(body)["trainerStatus"])
            )
            token.write_text(SECRET)  # Kubernetes gives another one from time to time
            self.send_response(503 if len(requests) == 1 else 200)
            self.end_headers()

    server, context = HTTPServer(("127.0.0.1", 0), Trainer), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    given = {"URL": f"https://127.0.0.1:{server.server_port}", "CA_CERT": str(pem), "TOKEN": str(token)}
    env = {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in given.items()}
    (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError")
    run = start("run", "-track", "mlflow", "-log_every", 1, cpu=1, env={**env, "PYTHONPATH": str(tmp_path)})
    assert run.wait() == 0
    server.shutdown()
    assert "nothing more is sent to mlflow" in run.text() and has_no_key(run.folder)
    assert "cannot be set (HTTPError: HTTP Error 503" in run.text()
    keys, known, sent = zip(*requests)
    assert keys == ("Bearer old", *[f"Bearer {SECRET}"] * (len(keys) - 1))
    assert all(one.trainer_status.to_dict().keys() == status.keys() for one, status in zip(known, sent))
    assert (sent[-1]["progressPercentage"], sent[-1]["estimatedRemainingSeconds"]) == (100, 0)
    last = {tag: str(points[-1][1]) for tag, points in logged_points(run.folder).items()}
    assert {one["name"]: one["value"] for one in sent[-1]["metrics"]} == last


def test_a_tracker_that_is_not_there_or_is_killed_gives_one_warning(tmp_path, caplog, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    output = python("scripts/track.py", "kubeflow", tmp_path, code=1)
    assert output.startswith("-track: nothing more is sent to kubeflow (there is no KUBEFLOW_TRAINER_SERVER_URL: ")
    for seconds, message in ((0, "goes on; if it ends"), (9, "signal 9 ended its process")):
        monkeypatch.setattr(track, "CLOSE_S", seconds)
        tracker = track.Tracker("kubeflow", tmp_path)
        os.kill(tracker.process.pid, signal.SIGKILL if seconds else 0)
        tracker.close(finished=True)
        assert message in caplog.text


def test_a_larger_batch_and_a_copied_folder_begin_another_tracked_run(tmp_path):
    class Kept(track.Tracked):
        def __init__(self, folder, after=None):
            super().__init__(folder, "kept.json", after)
            self.send, self.close = lambda lines: kept.append([step for step, _ in lines]), self.remember

    kept, lines = [], [{"step": 1 + n % 2, "samples": 8 * n, "train/loss": 1.0} for n in range(4)]
    track.hand_over(lines[:3], Kept(tmp_path)).remember()
    track.hand_over(lines, Kept(tmp_path))
    after = Kept(tmp_path).after, Kept(tmp_path.rename(tmp_path.with_name("copy"))).after
    assert (kept, after) == ([[1, 2], [1], [1, 2]], (8, -1))
