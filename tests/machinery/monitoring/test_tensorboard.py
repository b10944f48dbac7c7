"""The server of -tb, which shows the figures and the flags of all runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request

import needs
import numpy as np
import ports
from PIL import Image
from processes import until
from runs import lines, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lib import config
from lib.utils.checkpoint.state import State
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.monitoring.logger import Logger, tensorboard_tag


def fetch(address, path=""):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        return answer.read().decode()


def test_each_server_has_its_own_port_and_ends_with_its_run(tmp_path, serve):
    for name, lr in (("first", 0.25), ("second", 0.5)):
        (tmp_path / name).mkdir()
        args, plan = config.parse_args(["-arch", "mlp", "-lr_start", str(lr)]), Plan(100, 1, 1, total_steps=100)
        logger = Logger(tmp_path / name, World(), args, plan, State())
        logger.log_evaluation(State(step=7, epoch=1), "val", {"loss": lr})
        logger.close()
    first, second = serve(tmp_path), serve(tmp_path)
    address, other = (run.stdout.readline().removeprefix("TensorBoard: ").strip() for run in (first, second))
    assert all(re.fullmatch(r"http://127\.0\.0\.1:6\d{3}/", one) for one in (address, other)) and address != other

    os.killpg(second.pid, signal.SIGINT)  # like Ctrl-C
    assert second.stdout.readline() == "interrupted\n"
    until(lambda: json.loads(fetch(address, "data/runs")) == ["first", "second"])
    experiment = json.loads(fetch(address, "data/plugin/hparams/experiment?request=%7B%7D"))
    names = [one["name"] for one in experiment["hparamInfos"]]
    assert names[0] == "lr_start" and "arch" in names, "the flags of all runs, those that differ first"
    assert "workers" not in names, "it does not change the result"
    assert experiment["hparamInfos"][0]["type"] == "DATA_TYPE_FLOAT64"
    assert "learning/loss_val" in [one["name"]["tag"] for one in experiment["metricInfos"]]

    assert "TensorBoard" in fetch(other), "Ctrl-C stops only the run"
    second.kill()
    until(lambda: ports.is_free(urllib.parse.urlsplit(other).port))
    assert first.communicate() == ("", None), "no request is logged"
    assert ports.is_free(urllib.parse.urlsplit(address).port)


def test_each_figure_is_there_once_at_its_step_after_a_resume_from_an_earlier_one(tmp_path):
    args, plan = config.parse_args([]), Plan(100, 1, 1, total_steps=100)
    for start, end in ((0, 33), (28, 60)):  # the newest checkpoint is that of step 28
        logger = Logger(tmp_path, World(), args, plan, State(step=start, samples=start))  # never closed, as if killed
        for step in range(start + 1, end + 1):
            logger.log_evaluation(State(step=step, samples=step, epoch=1), "val", {"loss": 100.0 * end + step})
        time.sleep(1)  # files of events sort by the second in which they began, and no two starts share one
    board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    shown = [(point.step, point.value) for point in board.Scalars(tensorboard_tag("val/loss"))]
    assert shown == [(line["step"], line["val/loss"]) for line in lines(tmp_path)]
    assert [step for step, _ in shown] == [*range(1, 61)]


@needs.require("" if shutil.which("chromium") else "needs chromium: apt-get install chromium")
def test_the_first_screen_shows_the_losses_then_the_metrics_and_the_learning_rate(tmp_path, serve):
    run(tmp_path / "out", "-cpu 1 -arch mlp -epochs 3 -log_every 5 -model first")
    address = serve(tmp_path / "out").stdout.readline().removeprefix("TensorBoard: ").strip()
    experiment = json.loads(fetch(address, "data/plugin/hparams/experiment?request=%7B%7D"))
    assert experiment["metricInfos"][0]["name"]["tag"] == "learning-metrics/accuracy_val", "first in hparams"
    browser = ["chromium", *"--headless --no-sandbox --disable-gpu --virtual-time-budget=20000".split()]
    browser += [f"--user-data-dir={tmp_path / 'profile'}", address]
    quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 120, "cwd": tmp_path}

    def charts():
        page = subprocess.check_output([*browser, "--dump-dom", "--window-size=1440,1600"], **quiet)
        return re.findall(r'class="tag"[^>]* title="learning(\S+)"', page)

    def curves():  # the first two charts: below the bar, right of the list of runs; drawn by threads, maybe too late
        subprocess.check_output([*browser, "--screenshot", "--window-size=1440,900"], **quiet)
        screen = np.asarray(Image.open(tmp_path / "screenshot.png").convert("RGB")).astype(int)
        coloured = [np.ptp(screen[310:530, left : left + 340], axis=2) > 20 for left in (370, 810)]
        return min(one.any(0).mean() for one in coloured)

    first = ["/loss_train", "/loss_val", "-metrics/accuracy_val", "-metrics/f1_val", "-metrics/lr_train"]
    until(lambda: charts() == first, what=lambda: charts())
    until(lambda: curves() > 0.5, what="curves over most of both charts' width")
