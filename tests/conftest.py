"""Shared by all tests: one thread, so that runs can be forked from this process, and a clean environment."""

import gc
import logging
import os
import shutil
import signal

import pytest
import runs
import saves
import torch.utils.tensorboard  # and torch; else rank 0 of each run that is forked would import it

from lib.utils.monitoring import console

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests started by nohup or in the background of a script ignore these signals, and so would the runs they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu on machines without one."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none here"))


@pytest.fixture(autouse=True)
def reset():
    """Undo what a run leaves, as its process ends: open log files, hidden GPUs, objects that are not collected."""
    yield
    gc.unfreeze()
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    console.setup_logging(None, rank=1)  # no file, no terminal
    logging.captureWarnings(False)
    logging.getLogger("lib").setLevel(logging.WARNING)


# Over the runs of saves.py
@pytest.fixture(scope="module")
def small_plugins():
    """Make the network and the dataset of saves.SMALL available to the tests of a file."""
    with runs.plugins(**saves.PLUGINS):
        yield


@pytest.fixture(scope="module")
def finished_run(small_plugins, tmp_path_factory):
    """A finished run on two processes, with a checkpoint of each step."""
    return runs.run(tmp_path_factory.mktemp("done"), f"{saves.SMALL} -cpu 2 -save_every 1steps -keep_last 99")


@pytest.fixture
def copy(finished_run, tmp_path):
    """A copy of finished_run, which a test may damage."""
    return shutil.copytree(finished_run, tmp_path / "copied" / finished_run.name, symlinks=True)


@pytest.fixture
def refused(tmp_path, capfd):
    """A function that returns the one-line error of train.py for these flags."""
    return lambda flags, out=tmp_path: saves.refused(out, flags, capfd)
