"""The server of -tb, which shows the figures and the flags of all runs."""

import errno
import json
import os
import re
import signal
import socket
import urllib.parse
import urllib.request

from processes import address_in, until

from lib import config
from lib.utils.checkpoint.state import State
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.monitoring.logger import Logger


def new_logger(folder, start_step=0, flags=""):
    return Logger(folder, World(), config.parse_args(flags.split()), Plan(100, 1, 1, total_steps=100), start_step)


def log_loss(logger, step, loss=0.5):
    logger.log_evaluation(State(step=step, epoch=1), "val", {"loss": loss})


def fetch(address, path=""):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return answer.read().decode()


def is_refused(address):
    place = urllib.parse.urlsplit(address)
    with socket.socket() as probe:
        return probe.connect_ex((place.hostname, place.port)) == errno.ECONNREFUSED


def test_each_server_has_its_own_port_and_ends_with_its_run(tmp_path, serve):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    logger = new_logger(tmp_path / "first", flags="-arch mlp -lr_start 0.25")
    log_loss(logger, 7)
    logger.close()
    log_loss(new_logger(tmp_path / "second", flags="-arch mlp -lr_start 0.5"), 7, 0.4)
    first, second = serve(tmp_path), serve(tmp_path)
    address, other = (address_in(run.stdout.readline()) for run in (first, second))
    assert all(re.fullmatch(r"http://127\.0\.0\.1:6\d{3}/", one) for one in (address, other)) and address != other

    os.killpg(second.pid, signal.SIGINT)  # like Ctrl-C
    assert second.stdout.readline() == "interrupted\n"
    until(lambda: json.loads(fetch(address, "data/runs")) == ["first", "second"])
    experiment = json.loads(fetch(address, "data/plugin/hparams/experiment?request=%7B%7D"))
    names = [one["name"] for one in experiment["hparamInfos"]]
    assert names[0] == "lr_start" and "arch" in names, "the flags of all runs, those that differ first"
    assert "workers" not in names, "it does not change the result"
    assert experiment["hparamInfos"][0]["type"] == "DATA_TYPE_FLOAT64"
    assert "val/loss" in [one["name"]["tag"] for one in experiment["metricInfos"]]

    assert "TensorBoard" in fetch(other), "Ctrl-C stops only the run"
    second.kill()
    until(lambda: is_refused(other))
    assert first.communicate() == ("", None), "no request is logged"
    assert is_refused(address)
