"""What the tests of the machinery share: runs as processes of their own, and disks that need no wait."""

import os
from pathlib import Path

import pytest
from processes import nursery, start, undisturbed  # noqa: F401

from scripts import check_resume

# Files whose tests take long, run many processes, or need Slurm, etcd, Chromium or zsh.
SLOW = """bench browser chaos check_resume cluster_scripts completion doctor elastic export failing_disks gpu
    kubernetes launch machines multinode mutants plot readme slurm status stops tensorboard transformers tunnel
    watchdog""".split()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def no_fsync(monkeypatch):
    """No waiting for the disk: what fsync is good for is tested on a model of one."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def only_kills(monkeypatch):
    """Of what -check_resume compares, only the kills on the same number of processes."""
    real = check_resume.Check.planned
    monkeypatch.setattr(check_resume.Check, "planned", lambda self, facts: real(self, facts)[:1])
