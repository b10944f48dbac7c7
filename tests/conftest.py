"""What all tests share: one thread, so that runs may be forked from this process, and a clean environment."""

import logging
import os

import pytest
import torch

from lib import check
from lib.utils import console

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items):
    """Tests marked gpu skip themselves where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none here"))


@pytest.fixture(autouse=True)
def _logging_as_before():
    """A run leaves its log files open, as its process ends with it: here they would hear the next tests too."""
    yield
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in [one for one in root.handlers if isinstance(one, (console.LogFile, console.Terminal))]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture
def no_fsync(monkeypatch):
    """No waiting for the disk: what fsync is good for is tested on a model of one."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def only_kills(monkeypatch):
    """Of what -check_resume compares, only the kills on the same number of processes."""
    real = check.Check.planned
    monkeypatch.setattr(check.Check, "planned", lambda self, facts: real(self, facts)[:1])
