"""TensorBoard's event files are read back, and the server of -tb is tested."""

import errno
import json
import math
import os
import re
import signal
import socket
import urllib.parse
import urllib.request

import pytest
import runs
import torch
from disks import full_disk
from processes import address_in, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lib.utils.monitoring import images, tensorboard


def new_board(folder, first_step=1, hparams=None):
    return tensorboard.EventWriter(folder, first_step, hparams or {})


def test_a_full_disk_keeps_event_files_readable_and_gives_one_warning(tmp_path, caplog):
    board = new_board(tmp_path)
    with full_disk(1000):
        for step in range(20):
            board.write(step, {"train/loss": step})
    board.write(20, {"train/loss": 20})
    board.close()
    new_board(tmp_path, first_step=21).write(21, {"train/loss": 21})  # the next start
    points = [point.step for point in read_events(tmp_path).Scalars("train/loss")]
    assert points == [*range(len(points) - 1), 21] and 2 < len(points) < 20
    assert len(caplog.records) == 1


def test_images_of_a_dataset_without_batches_are_shown(tmp_path):
    items = [(torch.rand(3, 8, 8), label % 4) for label in range(16)]
    with runs.plugins(dataset={"plain": lambda args: torch.utils.data.Subset(items, range(16))}):
        folder = runs.run(tmp_path, "-dataset plain -arch mlp -channels 3 -num_classes 4 -epochs 1 -cpu 1 -workers 0")
    assert read_events(folder).Tags()["images"] == ["train/samples"]


def read_events(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def test_an_event_file_has_scalars_hparams_and_images(tmp_path):
    board = new_board(tmp_path, hparams={"lr_start": 0.1, "fp16": False, "data": 300 * "x", "sizes": [1, 2]})
    board.write(1, {}, {"samples": images.image_grid(torch.rand(5, 3, 8, 6))})
    board.write(10, {"train/loss": torch.tensor(0.5), "val/accuracy": 0.9, "bad": math.nan})
    events = read_events(tmp_path)  # before close, as after kill -9
    board.close()

    assert sorted(events.Tags()["scalars"]) == ["bad", "train/loss", "val/accuracy"]
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(10, 0.5)]
    assert math.isnan(events.Scalars("bad")[0].value)
    (picture,) = events.Images("samples")
    assert (picture.width, picture.height) == (348, 2 * 110) and events.Tags()["images"] == ["samples"]

    events = read_events(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    content = events.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["lr_start"].number_value == 0.1 and start.hparams["sizes"].string_value == "[1, 2]"
    assert start.hparams["fp16"].string_value == "False" and start.hparams["data"].string_value == 300 * "x"


def test_a_killed_run_has_its_last_log_line_in_the_event_file_and_each_step_once_after_a_resume(start):
    arguments = ("killed", "-log_every", 1, "-save_every", "7steps")
    run = start(*arguments, cpu=1, fault={"do": "send_signal", "signal": "SIGKILL", "step": 33})
    assert run.wait() == -signal.SIGKILL
    logged = {line["step"]: line["train/loss"] for line in runs.lines(run.folder) if "train/loss" in line}
    drawn = {point.step: point.value for point in read_events(run.folder).Scalars("train/loss")}
    assert list(logged) == [*range(1, 34)] and drawn == pytest.approx(logged, rel=1e-6)

    assert start(*arguments, cpu=1).wait() == 0
    logged = {line["step"]: line["train/loss"] for line in runs.lines(run.folder) if "train/loss" in line}
    points = read_events(run.folder).Scalars("train/loss")
    assert [point.step for point in points] == [*range(1, 61)] == list(logged), "a step is missing or there twice"
    assert {point.step: point.value for point in points} == pytest.approx(logged, rel=1e-6)
    content = read_events(run.folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    flags = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert flags["arch"].string_value == "mlp" and flags["epochs"].number_value == 3 and "workers" not in flags


def fetch(address, path=""):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return answer.read().decode()


def fetch_json(address, path, request):
    return json.loads(fetch(address, f"{path}?request={urllib.parse.quote(json.dumps(request))}"))


def is_refused(address):
    place = urllib.parse.urlsplit(address)
    with socket.socket() as probe:
        return probe.connect_ex((place.hostname, place.port)) == errno.ECONNREFUSED


def test_each_server_has_its_own_port_and_ends_with_its_run(tmp_path, serve):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    board = new_board(tmp_path / "first", hparams={"arch": "mlp", "lr_start": 0.25})
    board.write(7, {"train/loss": 0.5})
    board.close()
    board = new_board(tmp_path / "second", hparams={"arch": "mlp", "lr_start": 0.5, "vit_depth": 3})
    board.write(7, {"train/loss": 0.4})
    first, second = serve(tmp_path), serve(tmp_path)
    address, other = (address_in(run.stdout.readline()) for run in (first, second))
    assert all(re.fullmatch(r"http://127\.0\.0\.1:6\d{3}/", one) for one in (address, other)) and address != other

    os.killpg(second.pid, signal.SIGINT)  # like Ctrl-C
    assert second.stdout.readline() == "interrupted\n"
    until(lambda: json.loads(fetch(address, "data/runs")) == ["first", "second"])
    assert json.loads(fetch(address, "data/plugin/scalars/scalars?run=first&tag=train/loss"))[0][1:] == [7, 0.5]
    experiment = fetch_json(address, "data/plugin/hparams/experiment", {})
    names = [one["name"] for one in experiment["hparamInfos"]]
    assert names == ["lr_start", "arch", "vit_depth"], "the flags of all runs, those that differ first"
    assert experiment["hparamInfos"][0]["type"] == "DATA_TYPE_FLOAT64"
    assert "train/loss" in [one["name"]["tag"] for one in experiment["metricInfos"]]
    columns = {"colParams": [{"hparam": "lr_start"}, {"metric": {"tag": "train/loss"}}], "sliceSize": 9}
    query = {"allowedStatuses": ["STATUS_UNKNOWN"], **columns}
    groups = fetch_json(address, "data/plugin/hparams/session_groups", query)["sessionGroups"]
    first_hparams = {"arch": "mlp", "lr_start": 0.25}
    (group,) = [group for group in groups if group["hparams"] == first_hparams]
    assert len(groups) == 2 and 0.5 in [one["value"] for one in group["metricValues"]]

    assert "TensorBoard" in fetch(other), "Ctrl-C stops only the run"
    second.kill()
    until(lambda: is_refused(other))
    assert first.communicate() == ("", None), "no request is logged"
    assert is_refused(address)
