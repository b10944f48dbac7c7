"""-dataset tar from URLs: a web server that fails in three ways, and a real S3 (moto's)."""

import concurrent.futures
import functools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import needs
import pytest
import tars
from command_line import usage_error
from processes import ROOT, until
from runs import run, same_tensors, weights

from lib import config
from lib.dataset import tar
from scripts import shard_cache, tar_index

FLAGS = "-dataset tar -arch convnet -image_size 16 -batch_size 8 -micro_batch 4 -epochs 2 -threads 1".split()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards in a folder of a folder, which the server serves, too."""
    folder = tmp_path_factory.mktemp("web") / "shards"
    folder.mkdir()
    for shard, count in (("train-0", 20), ("train-1", 13), ("val-0", 8)):
        tars.write(folder / f"{shard}.tar", tars.pairs(count))
    (folder / "classes.txt").write_text("ant\nbee\n")
    return folder


@pytest.fixture
def server(shards):
    command = [sys.executable, Path(__file__).with_name("web.py"), shards.parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        process.kill()


@pytest.fixture
def web(server):
    return server[0]


def samples(data, *flags, between=dict) -> dict:
    """What a dataset has, read as loader processes read it: in a child, whose threads no test has then."""
    args = config.parse_args([*FLAGS, "-augment", "no", "-data", str(data), *map(str, flags)])
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        return child.submit(read, args, between).result()


def read(args, between) -> dict:
    """Read all samples of a dataset; `between` is called before."""
    found, parts = {}, tar.get_dataset(args)
    between()
    for split, part in parts.items():
        part.prefetch_samples([*range(0, len(part), 2), 0])
        pixels = [(image.numpy().tobytes(), label) for image, label in part]
        found[split] = part.fingerprint, part.classes, pixels, part.sample_name(len(part) - 1)
    return found


AROUND_A_FORK = """
import gc, os, sys
from scripts import remote
ranges = [(shard, 512, 600) for shard in sys.argv[1:]]
found = remote.read(ranges)
if not (child := os.fork()):
    gc.collect()
    os._exit(remote.read(ranges) != found)
assert os.waitpid(child, 0)[1] == 0
gc.collect()
sys.stdout.buffer.write(b"".join(remote.read(ranges)))
"""


def test_a_process_reads_on_after_one_that_it_forked_has_read(shards, web):
    names = ["train-0.tar", "train-1.tar"]
    command = [sys.executable, "-c", AROUND_A_FORK, *(f"{web}/good/shards/{name}" for name in names)]
    found = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, cwd=ROOT).stdout
    assert found == b"".join((shards / name).read_bytes()[512:1112] for name in names)


BUSY, CUT = (pytest.param(f"{mode}/shards", marks=pytest.mark.slow) for mode in ("busy", "cut"))


@pytest.mark.parametrize("place", ["good/shards", "good/shards/{train-{0..1},val-0}.tar", BUSY, CUT])
def test_shards_of_a_url_have_the_samples_of_those_on_a_disk(shards, web, tmp_path, place):
    assert samples(f"{web}/{place}", "-cache_dir", tmp_path) == samples(shards, "-cache_dir", tmp_path)
    assert len(list((tmp_path / "index").glob("*.npy"))) == 4


def wait_for_copies(cache: Path, count: int, server: int) -> None:
    """Wait until so many shards are on the disk; end the server where these are all of them."""
    until(lambda: len([*cache.glob("*/*.tar")]) == count)
    if count == 3:
        os.kill(server, signal.SIGKILL)


@pytest.mark.parametrize("copies", [["train", "train", "val"], ["train"]])
def test_copies_of_shards_up_to_cache_gb_are_read_once_they_are_there(shards, server, tmp_path, copies):
    limit = 1 if len(copies) == 3 else ((shards / "train-0.tar").stat().st_size + 100) / 1e9
    flags = ["-cache_dir", tmp_path, "-cache_gb", f"{limit:.9f}"]
    between = functools.partial(wait_for_copies, tmp_path / "shards", len(copies), server[1].pid)
    assert samples(f"{server[0]}/good/shards", *flags, between=between) == samples(shards)
    assert sorted(file.parent.name.partition("_")[0] for file in tmp_path.glob("shards/*/*.tar")) == copies


def test_copying_ends_with_the_last_process_of_a_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        copies = {f"http://127.0.0.1:{silent.getsockname()[1]}/train-0.tar": f"{tmp_path}/index/000000.tar"}
        task = json.dumps({"root": str(tmp_path), "limit_gb": 1, "copies": copies})
        with subprocess.Popen([sys.executable, shard_cache.__file__], stdin=subprocess.PIPE, text=True) as copying:
            print(task, file=copying.stdin, flush=True)
            silent.accept()  # it asks, and gets no answer
    assert copying.returncode == 0


FAULTS = {  # -data: the message
    "WEB/none": "no train.*tar",
    "WEB/good/shards/train-{0..2}.tar": "train-2.tar: cannot be read",
    "WEB/whole/shards/train-{0..1}.tar": "train-0.tar: .* cannot read a part of a file",
    "http://me:secret@host/train-0.tar": "-data has a password",
    "odd://host/shards": "odd",
    "http://127.0.0.1:1/shards/train-0.tar": "classes.txt: .*Connect",  # waits some seconds for a better answer
}


@pytest.mark.parametrize(
    "data", [pytest.param(one, marks=pytest.mark.slow if "127.0.0.1:1" in one else []) for one in FAULTS]
)
def test_what_cannot_be_read_is_one_line(web, tmp_path, monkeypatch, data):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    said = usage_error(samples, data.replace("WEB", web), "-cache_dir", tmp_path)
    assert re.search(FAULTS[data], said) and "secret" not in said
    assert "give a -cache_dir" in usage_error(tar_index.find, "http://host/shards", None)


@pytest.fixture
def bucket(shards, s3_server, monkeypatch):
    """A bucket of a real S3 server, with the shards in it; the environment says where it is and who asks."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    fill = "import s3fs, sys; s3fs.S3FileSystem().put(*sys.argv[1:], recursive=True)"
    subprocess.run([sys.executable, "-c", fill, f"{shards}/", "bucket/data"], check=True, timeout=60)
    return "s3://bucket/data"


@pytest.mark.slow
@needs.require_package("s3fs", "remote")
@needs.require_package("moto", "s3")
def test_a_run_trains_the_same_bits_from_s3_from_a_bad_web_server_and_from_a_disk(shards, bucket, web, tmp_path):
    flags = f"{' '.join(FLAGS)} -cache_dir {tmp_path}"
    assert samples(bucket, "-cache_dir", tmp_path) == samples(shards)
    disk = run(tmp_path / "out", f"{flags} -data {shards} -cpu 1 -model disk")
    run(tmp_path / "out", f"{flags} -data {bucket} -cpu 2 -workers 1 -limit_steps 3 -model mixed", wanted=75)
    run(tmp_path / "out", f"{flags} -data {web}/busy/shards -cpu 3 -limit_steps 4 -model mixed", wanted=75)
    mixed = run(tmp_path / "out", f"{flags} -data {bucket} -cpu 2 -workers 2 -cache_gb 1 -model mixed")
    assert same_tensors(weights(disk), weights(mixed))
