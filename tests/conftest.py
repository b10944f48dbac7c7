"""What all tests share: one thread, so that runs may be forked from this process, and a clean environment."""

import logging
import os
import shutil
import signal

import pytest
import runs
import saves
import torch

from lib.utils.monitoring import console

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests that were started by nohup, or by a script's `&`, ignore these signals, and so would the runs that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests marked gpu skip themselves where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none here"))


@pytest.fixture(autouse=True)
def _logging_as_before():
    """A run leaves its log files open, as its process ends with it: here they would hear the next tests too."""
    yield
    console.setup_logging(None, rank=1)  # no file, no terminal
    logging.captureWarnings(False)
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def small_plugins():
    """The network and the data that saves.SMALL names are there for the tests of a file."""
    with runs.plugins(**saves.PLUGINS):
        yield


@pytest.fixture(scope="module")
def done(small_plugins, tmp_path_factory):
    """A finished run on two processes with all its checkpoints, one a step."""
    return runs.run(tmp_path_factory.mktemp("done"), f"{saves.SMALL} -cpu 2 -save_every 1steps -keep_last 99")


@pytest.fixture
def copy(done, tmp_path):
    """A copy of it, which a test may spoil."""
    return shutil.copytree(done, tmp_path / "copied" / done.name, symlinks=True)


@pytest.fixture
def refused(tmp_path, capfd):
    """What train.py says to words that it refuses, in one line."""
    return lambda words, out=tmp_path: saves.refused(out, words, capfd)
