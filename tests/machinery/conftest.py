"""Shared by the tests of the machinery: runs as processes of their own, and disks without waiting."""

import os
import sys
import urllib.request
from functools import partial
from pathlib import Path

import command_line
import ports
import pytest
from processes import serve, session, start, uninterrupted, until  # noqa: F401

# Only in ./scripts/test.sh --all: files whose tests take long or need Slurm or etcd; tests that start
# runs as processes of their own, or make a fork; and single tests of other files, which take long or need a compiler
# or an optional package. .ci/run runs all others before it installs these.
SLOW_FILES = """chaos check_resume cluster_scripts doctor elastic export gpu
    kubernetes multinode plot slurm status stops sweep tensorboard trackers transformers tunnel""".split()
# Begun first, as each file is run by one process: those that take longest.
LONGEST = """page_files new slurm edits elastic train just_in_time gpu launch export chaos sweep page_commands
    trackers check_resume stops parallel machines config exact intervals doctor multinode remote""".split()
SLOW_FIXTURES = {"start", "uninterrupted", "fork"}
SLOW_TESTS = """
    test_a_model_that_get_model_compiles test_a_run_from_imagenet_weights test_caches_are_set_before_torch
    test_a_tokenizer_is_trained test_whatever_has_a_state_resumes test_a_slow_disk_is_no_hang
    test_a_compiled_run_keeps test_shards_of_other_programs_train test_a_stock_fsdp_run_ends
    test_half_precision_has_the_same_bits_under test_a_run_of_the_stock_engine_resumes
    test_all_ranks_begin_with_the_values test_averaged_weights_resume test_a_sampler_gives_the_same_run
    test_a_disk_that_stays_full
""".split()  # by their first words


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(name) if (name := file_of(item)) in LONGEST else len(LONGEST))
    for item in items:
        if Path(__file__).parent in item.path.parents and is_slow(item):
            item.add_marker(pytest.mark.slow)


def file_of(item) -> str:
    return item.path.stem.removeprefix("test_")


def is_slow(item) -> bool:
    file, test = file_of(item), item.name.partition("[")[0]
    return file in SLOW_FILES or test.startswith(tuple(SLOW_TESTS)) or bool(SLOW_FIXTURES & set(item.fixturenames))


@pytest.fixture
def no_fsync(monkeypatch):
    """Do not wait for the disk: the effect of fsync is tested on a model of a disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def script_error(capsys):
    """A function that returns the one line in which a script refuses its arguments."""

    def error_of(script, *args) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            script.main([str(arg) for arg in args])
        said, name = capsys.readouterr().err, script.__name__.rpartition(".")[2]
        assert end.value.code == 2 and said.startswith(f"{name}.py: ") and said.count("\n") == 1
        return said

    return error_of


@pytest.fixture
def error_of(tmp_path, capsys):
    return partial(command_line.error_of, out=tmp_path / "out", capsys=capsys)


@pytest.fixture
def s3_server(tmp_path):
    """A real S3 server with a bucket: the variables of a process that reaches it."""
    port = ports.free()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "3f" * 20, "AWS_DEFAULT_REGION": "us-east-1"}
    with session(command, tmp_path / "moto.log"):
        until(lambda: not ports.is_free(port))
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield {**keys, "AWS_ENDPOINT_URL": url}
