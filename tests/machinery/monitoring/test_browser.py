"""TensorBoard in a real Chromium: the page of a run that was killed and resumed."""

import json
import re
import signal
import urllib.parse
import urllib.request

import browser
import pytest
from needs import require
from PIL import Image
from processes import address_in, until

STEPS = 60  # of a run of the fork server
# The paths with as many points as there are steps: TensorBoard draws SVG paths if there is no WebGL.
PATHS = "[...document.querySelectorAll('path')].map(path => path.getAttribute('d'))"
LINES = f"{PATHS}.filter(line => line.split('L').length == {STEPS})"


@pytest.fixture
def board(start, serve, tmp_path):
    """The address of a TensorBoard with a run that was killed at step 33 and resumed at 28, and one that was not."""
    killed = start(
        "killed",
        "-log_every",
        1,
        "-save_every",
        "7steps",
        cpu=1,
        fault={"do": "send_signal", "signal": "SIGKILL", "step": 33},
    )
    assert killed.wait() == -signal.SIGKILL
    assert start("killed", "-log_every", 1, "-save_every", "7steps", cpu=1).wait() == 0
    assert start("whole", "-log_every", 1, cpu=1).wait() == 0
    address = address_in(serve(tmp_path / "out").stdout.readline())
    until(lambda: len(data(address, "runs")) == 2, what="both runs")
    return address


def data(address, path, **parameters):
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(f"{address}data/{path}{query}", timeout=60) as answer:
        return json.load(answer)


@require("there is no chromium here: apt-get install chromium" if browser.CHROMIUM is None else "")
def test_the_curve_of_a_killed_and_resumed_run_has_no_gap_and_no_step_twice(board, tmp_path, request):
    points = {
        run: [(step, value) for _, step, value in data(board, "plugin/scalars/scalars", run=run, tag="train/loss")]
        for run in ("killed", "whole")
    }
    assert [step for step, _ in points["killed"]] == [*range(1, STEPS + 1)], "a step is missing or there twice"
    assert points["killed"] == points["whole"]

    groups = {tag.split("/")[0] for tag in data(board, "plugin/scalars/tags")["killed"]}
    assert groups == {"train", "val", "test", "perf"}

    with browser.open_page(f"{board}?tagFilter=loss%24#timeseries", tmp_path / "browser") as page:
        lines = page.until(f"({LINES}).length == 4 && {LINES}")  # of two runs, each smoothed and unsmoothed
        text = re.sub(r"\s", "", page.value("document.body.innerText"))
        picture = page.screenshot()
    for label in ("train/loss", "val/loss", "test/loss", "killed", "whole"):
        assert label in text, f"{label} is not on the page"
    for line in lines:
        across = [float(point.split(",")[0]) for point in line[1:].split("L")]
        assert len(across) == STEPS and across == sorted(set(across)), "the line goes back or has a gap"
    file = request.config.cache.mkdir("screenshots") / "tensorboard.png"  # in .pytest_cache, to look at
    file.write_bytes(picture)
    with Image.open(file) as picture:
        assert picture.width == 1280 and len(picture.convert("RGB").getcolors(1 << 24)) > 100
