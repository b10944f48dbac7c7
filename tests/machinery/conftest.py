"""Shared by the tests of the machinery: runs as processes of their own, and disks without waiting."""

import os
from pathlib import Path

import pytest
from processes import fork_server, serve, start, uninterrupted  # noqa: F401

from scripts import check_resume

# Only in ./scripts/test.sh --all: files whose tests take long or need Slurm, etcd, Chromium or zsh; tests that start
# runs as processes of their own, or make a fork; and single tests of other files.
SLOW_FILES = """bench browser chaos check_resume cluster_scripts completion doctor elastic export failing_disks gpu
    kubernetes machines multinode mutants plot slurm status stops sweep tensorboard trackers transformers
    tunnel""".split()
SLOW_FIXTURES = {"start", "uninterrupted", "fork"}
SLOW_TESTS = """
    test_a_terminal_that_was_closed_does_not_stop_the_run
    test_any_call_of_a_save_may_fail_once_or_from_then_on
    test_variables_for_debugging_and_caches_are_set_before_torch_is_imported
    test_each_torchvision_classification_model_has_one_output_for_each_class
    test_every_permutation_of_a_few_is_drawn_equally_often
    test_the_benchmark_of_the_samplers_runs_in_new_processes
    test_samples_that_loader_processes_prefetch_do_not_count_as_progress
""".split()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and is_slow(item):
            item.add_marker(pytest.mark.slow)


def is_slow(item) -> bool:
    file, test = item.path.stem.removeprefix("test_"), item.name.partition("[")[0]
    return file in SLOW_FILES or test in SLOW_TESTS or bool(SLOW_FIXTURES & set(item.fixturenames))


@pytest.fixture
def no_fsync(monkeypatch):
    """Do not wait for the disk: the effect of fsync is tested on a model of a disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def compare_kills_only(monkeypatch):
    """Limit -check_resume to the kills on the same number of processes."""
    real = check_resume.Check.planned
    monkeypatch.setattr(check_resume.Check, "planned", lambda self, facts: real(self, facts)[:1])
