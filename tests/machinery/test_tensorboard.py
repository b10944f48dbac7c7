"""TensorBoard's event files read back, and the server of -tb."""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import runs
import torch
from disks import full_disk
from processes import until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lib.utils.monitoring import images, tensorboard, tensorboard_server

pytest_plugins = ("processes",)
ROOT = Path(__file__).resolve().parents[2]


def test_a_full_disk_leaves_event_files_readable(tmp_path, caplog):
    board = tensorboard.Board(tmp_path, main=True)
    with full_disk(300):
        for step in range(20):
            board.scalars(step, {"train/loss": step})
    board.scalars(20, {"train/loss": 20})
    board.close()
    points = [point.step for point in loaded(tmp_path).Scalars("train/loss")]
    assert points == [*range(len(points) - 1), 20] and 2 < len(points) < 20
    assert len(caplog.records) == 1


def test_images_that_are_collated_one_by_one_are_shown(tmp_path):
    items = [(torch.rand(3, 8, 8), label % 4) for label in range(16)]
    with runs.plugins(dataset={"plain": lambda args: torch.utils.data.Subset(items, range(16))}):
        folder = runs.run(tmp_path, "-dataset plain -arch mlp -channels 3 -num_classes 4 -epochs 1 -cpu 1 -workers 0")
    assert loaded(folder / "tensorboard").Tags()["images"] == ["train/samples"]


def loaded(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def test_a_board_holds_scalars_text_configuration_hparams_and_images_in_one_file(tmp_path):
    board = tensorboard.Board(tmp_path, main=True)
    board.config({"lr_start": 0.1, "note": "a|b\nc"})
    board.hparams({"lr_start": 0.1, "fp16": False, "arch": "mlp", "sizes": [1, 2]}, ["val/accuracy"])
    board.picture("samples", images.grid(torch.rand(5, 3, 8, 6)))
    board.histogram("weights", torch.tensor([1.0, 2.0, 2.0, math.nan, math.inf]), 3)
    board.histogram("none", torch.tensor([math.nan]), 3)
    assert not list(tmp_path.iterdir()), "nothing is imported or written before the first scalars"
    board.scalars(10, {"train/loss": torch.tensor(0.5), "val/accuracy": 0.9, "left": None, "bad": math.nan})
    events = loaded(tmp_path)  # before close: as after kill -9
    board.text("summary", "done")
    board.close(finished=True)

    assert sorted(events.Tags()["scalars"]) == ["bad", "train/loss", "val/accuracy"]
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(10, 0.5)]
    assert math.isnan(events.Scalars("bad")[0].value)
    table = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| lr_start | 0.1 |" in table and "| note | a\\|b c |" in table
    (picture,) = events.Images("samples")
    assert (picture.width, picture.height) == (3 * 7 + 1, 2 * 9 + 1) and events.Tags()["images"] == ["samples"]
    (spread,) = events.Histograms("weights")
    assert events.Tags()["histograms"] == ["weights"]
    assert (spread.step, spread.histogram_value.num, spread.histogram_value.sum) == (3, 3, 5)

    events = loaded(tmp_path)
    assert "summary/text_summary" in events.Tags()["tensors"] and len(list(tmp_path.iterdir())) == 1
    content = events.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["lr_start"].number_value == 0.1 and start.hparams["sizes"].string_value == "[1, 2]"
    assert start.hparams["fp16"].string_value == "False"
    end = plugin_data_pb2.HParamsPluginData.FromString(content["_hparams_/session_end_info"]).session_end_info
    assert end.status == 1  # success


def test_a_resumed_run_draws_one_line(tmp_path):
    expected = []
    for start in (0, 40, 70):  # killed at 60 and at 100, resumed at 40 and at 70
        board = tensorboard.Board(tmp_path, main=True, purge_step=start + 1)
        board.config({"seed": 1})
        for step in range(start + 10, start + 65, 10):
            board.scalars(step, {"train/loss": step + start / 1000})
        expected = [point for point in expected if point[0] <= start]
        expected += [(step, step + start / 1000) for step in range(start + 10, start + 65, 10)]
    events = loaded(tmp_path)
    points = [(point.step, pytest.approx(point.value, rel=1e-6)) for point in events.Scalars("train/loss")]
    assert points == expected and len({step for step, _ in points}) == len(points)
    assert [entry.step for entry in events.Tensors("config/text_summary")] == [1, 41, 71]


def test_a_killed_run_has_its_last_log_line_in_the_event_file_and_draws_one_line_after_a_resume(start):
    words = ("killed", "-log_every", 1, "-save_every", "7steps")
    run = start(*words, cpu=1, deed={"do": "strike", "signal": "SIGKILL", "step": 33})
    assert run.ends() == -signal.SIGKILL
    logged = {line["step"]: line["train/loss"] for line in runs.lines(run.folder) if "train/loss" in line}
    drawn = {point.step: point.value for point in loaded(run.folder / "tensorboard").Scalars("train/loss")}
    assert list(logged) == [*range(1, 34)] and drawn == pytest.approx(logged, rel=1e-6)

    assert start(*words, cpu=1).ends() == 0
    logged = {line["step"]: line["train/loss"] for line in runs.lines(run.folder) if "train/loss" in line}
    points = loaded(run.folder / "tensorboard").Scalars("train/loss")
    assert [point.step for point in points] == [*range(1, 61)] == list(logged), "no tooth, no gap, no double"
    assert {point.step: point.value for point in points} == pytest.approx(logged, rel=1e-6)


def test_a_clock_that_is_behind_does_not_put_the_newer_file_first(tmp_path, monkeypatch):
    for clock, step in ((2_000_000_000, 1), (1_000_000_000, 2), (1_000_000_000, 3)):
        monkeypatch.setattr(tensorboard.time, "time", lambda clock=clock: float(clock))
        tensorboard.Board(tmp_path, main=True, purge_step=step).scalars(step, {"x": step})
    assert [point.step for point in loaded(tmp_path).Scalars("x")] == [1, 2, 3]


def test_a_board_off_rank_0_or_without_the_package_does_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", None)
    for main in (False, True):
        board = tensorboard.Board(tmp_path / "board", main=main)
        board.config({"a": 1})
        board.hparams({"a": 1}, ["loss"])
        board.picture("samples", torch.zeros(1, 2, 2))
        board.histogram("weights", torch.zeros(2), 1)
        board.scalars(1, {"loss": 1.0})
        board.scalars(2, {"loss": 1.0})
        board.close(finished=True)
    assert not (tmp_path / "board").exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def fetched(address, path=""):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return answer.read().decode()


def asked(address, path, request):
    return json.loads(fetched(address, f"{path}?request={urllib.parse.quote(json.dumps(request))}"))


def refused(address):
    place = urllib.parse.urlsplit(address)
    with socket.socket() as probe:
        return probe.connect_ex((place.hostname, place.port)) == errno.ECONNREFUSED


def held_by_children(pid):
    """What the children of a process have open."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children, "it has none"
    return {fd.readlink() for child in children for fd in Path(f"/proc/{child}/fd").iterdir() if fd.is_symlink()}


SERVE = """
import signal, sys
from lib.utils.monitoring import tensorboard_server as serving
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
serving.serve(sys.argv[1], lambda name, address: print(address, flush=True))
while True:
    signal.pause()
"""


def test_servers_answer_each_on_a_port_of_its_own_and_end_with_their_run(tmp_path, request):
    board = tensorboard.Board(tmp_path, main=True)
    board.hparams({"lr_start": 0.25}, ["train/loss"])
    board.scalars(7, {"train/loss": 0.5})
    board.close(finished=True)
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    request.addfinalizer(run.kill)
    told = []
    server = tensorboard_server.serve(tmp_path, lambda _, address: told.append(address))
    other = run.stdout.readline().strip()
    until(lambda: told)
    assert told == [server.address] and server.address.startswith("http://127.0.0.1:6")
    assert server.address.split("/")[2] != other.split("/")[2], "one port each"
    with pytest.raises(urllib.error.HTTPError):  # without the random word there is nothing to see
        fetched(server.address.rsplit("/", 2)[0] + "/")

    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C
    assert run.stdout.readline() == "interrupted\n"
    until(lambda: json.loads(fetched(server.address, "data/runs")) == ["."])
    assert json.loads(fetched(server.address, "data/plugin/scalars/scalars?run=.&tag=train/loss"))[0][1:] == [7, 0.5]
    experiment = asked(server.address, "data/plugin/hparams/experiment", {})
    assert [one["name"] for one in experiment["hparamInfos"]] == ["lr_start"]
    assert experiment["hparamInfos"][0]["type"] == "DATA_TYPE_FLOAT64"
    assert experiment["metricInfos"][0]["name"]["tag"] == "train/loss"
    columns = {"colParams": [{"hparam": "lr_start"}, {"metric": {"tag": "train/loss"}}], "sliceSize": 9}
    wish = {"allowedStatuses": ["STATUS_SUCCESS"], **columns}
    (group,) = asked(server.address, "data/plugin/hparams/session_groups", wish)["sessionGroups"]
    assert group["hparams"] == {"lr_start": 0.25} and group["metricValues"][0]["value"] == 0.5

    assert "TensorBoard" in fetched(other), "Ctrl-C is the run's matter"
    assert Path(f"/proc/{run.pid}/fd/1").readlink() not in held_by_children(run.pid), "the run's stdout is its own"
    run.kill()
    assert run.communicate(timeout=60)[0] == ""
    until(lambda: refused(other))
    server.close()
    assert refused(server.address)
    server.close()


def test_training_does_not_wait_for_a_server_that_keeps_silent(tmp_path, monkeypatch):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    before, told = time.monotonic(), []
    server = tensorboard_server.serve(tmp_path, lambda _, address: told.append(address))
    assert time.monotonic() - before < 30
    server.close()
    assert time.monotonic() - before < 30 and not told


def test_a_server_that_cannot_start_is_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "tensorboard.py").write_text("raise ImportError('there is no tensorboard')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = []
    server = tensorboard_server.serve(tmp_path, lambda _, address: told.append(address))
    until(lambda: caplog.records)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    tensorboard_server.serve(tmp_path, lambda _, address: told.append(address)).close()
    tensorboard_server.serve(tmp_path, lambda _, address: told.append(address), enabled=False).close()
    server.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "there is no tensorboard" in caplog.text and not told
