"""What the tests of the machinery share: runs as processes of their own, and disks that need no wait."""

import os

import pytest
from processes import nursery, start, undisturbed  # noqa: F401

from scripts import check_resume


@pytest.fixture
def no_fsync(monkeypatch):
    """No waiting for the disk: what fsync is good for is tested on a model of one."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def only_kills(monkeypatch):
    """Of what -check_resume compares, only the kills on the same number of processes."""
    real = check_resume.Check.planned
    monkeypatch.setattr(check_resume.Check, "planned", lambda self, facts: real(self, facts)[:1])
