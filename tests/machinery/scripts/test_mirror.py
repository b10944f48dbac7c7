"""-mirror: a run goes on from its copy with the same bits; copies are whole or absent; stores that fail."""

import itertools
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import threading
import time
from pathlib import Path

import fsspec
import needs
import pytest
import saves
from command_line import refusal, usage_error
from fsspec import asyn
from fsspec.implementations.memory import MemoryFileSystem
from processes import until
from runs import lines, run

from scripts import mirror, status

SECRET = "3f" * 20
NAME = "few_norm_net"


def there(place: Path) -> list[str]:
    """The checkpoints of a copy, newest first. Nothing else is there but what its manifest names."""
    [manifest] = place.glob("manifest.*.json")
    entries = json.loads(manifest.read_text())["files"]
    objects = {entry["object"] for entry in entries.values()}
    assert {one.name for one in place.iterdir()} == objects | {manifest.name, "owner.json"}
    return mirror.checkpoints(entries)


@pytest.mark.parametrize("how", ["-cpu 2", pytest.param("-cpu 2 -parallel fsdp", marks=pytest.mark.slow)])
def test_an_emptied_folder_resumes_from_the_copy_with_the_same_bits(tmp_path, small_plugins, how):
    flags = f"{saves.SMALL} {how} -save_every 1steps -keep_every 1"
    wanted = saves.bits(run(tmp_path / "truth", flags))
    flags += f" -mirror file://{tmp_path}/there"
    for limit in (6, 9):
        folder = run(tmp_path / "out", f"{flags} -limit_steps {limit}", wanted=75)
        assert there(tmp_path / "there" / NAME)[0] == saves.names(folder)[0]
        shutil.rmtree(folder)
    folder = run(tmp_path / "out", flags)
    assert saves.bits(folder) == wanted and "_step_9 from file:" in saves.log_of(folder)
    assert [int(name.rpartition("_")[2]) for name in there(tmp_path / "there" / NAME)] == [12, 11, 10, 8, 4]
    assert status.read_row(folder)["mirror"] == "whole"


@pytest.fixture
def copied(copy, tmp_path):
    assert mirror.main([str(copy), f"file://{tmp_path}/there"]) == 0
    return tmp_path / "there" / copy.name


def test_a_damaged_copy_is_passed_over(copied, tmp_path, refused):
    flags = f"{saves.SMALL} -cpu 2 -save_every 1steps -keep_last 99 -mirror file://{tmp_path}/there"
    damaged, lost = (next(copied.glob(f"*step_{step}.shard_0000.*")) for step in (12, 11))
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    lost.unlink()
    log = saves.log_of(run(tmp_path, flags))
    assert f"{damaged.name}: its size or checksum is wrong; an older checkpoint is taken" in log
    assert f"{lost.name} is missing; an older" in log and "fetched 000010_step_10" in log
    assert len(there(copied)) == 12, "what was damaged there is copied again"

    shutil.rmtree(tmp_path / NAME)
    for shard in copied.glob("*.shard_0000.*"):
        os.truncate(shard, 99)
    assert "no good checkpoint is left" in refused(flags) and not (tmp_path / NAME / "checkpoints").exists()


def test_two_runs_at_one_place_are_noticed(copied, tmp_path, refused):
    flags = f"{saves.SMALL} -save_every 1steps -seed 1"
    folder = run(tmp_path, f"{flags} -limit_steps 2", wanted=75)
    (copied / "thesis.tex").write_text("of somebody")
    flags += f" -mirror file://{tmp_path}/there"
    assert "has another run (of " in refused(flags)
    run(tmp_path, f"{flags} -reset -limit_steps 2", wanted=75)
    assert (copied / "thesis.tex").read_text() == "of somebody"
    (copied / "thesis.tex").unlink()
    assert [name[-6:] for name in there(copied)] == ["step_2", "step_1"]

    one, other = (mirror.Follower(folder, mirror.Place(f"file://{copied.parent}", NAME), "run") for _ in range(2))
    [each.claim() for each in (one, other)]
    with pytest.raises(mirror.TakenOver, match="host "):
        one.sync(last=True)


def test_a_url_is_refused_before_anything_is_written():
    for url in (f"s3://me:{SECRET}@bucket", f"s3://me:a/{SECRET}@bucket/x", f"https://host/x?sig={SECRET}"):
        assert "credentials" in refusal(f"-mirror {url}") and SECRET not in refusal(f"-mirror {url}")
    assert "give a URL of a folder" in refusal("-mirror file://x")
    assert "that is -out" in refusal("-out /tmp/out -mirror file:///tmp/out/")
    assert "uv pip install adlfs" in usage_error(mirror.Place, "abfs://container/runs", NAME)
    assert "fsspec knows no s4://" in usage_error(mirror.Place, "s4://bucket", NAME)


class Faulty(MemoryFileSystem):
    """A store that fails, and loses or changes what it gets, each time another way."""

    protocol, cachable, store, pseudo_dirs = "faulty", False, {}, [""]
    faults = itertools.cycle((bytes, lambda data: data[:99], bytes, lambda data: b"?" + data[1:], None))

    def open(self, path, mode="rb", **options):
        change = next(self.faults) if mode == "wb" else bytes
        if change is None:
            raise ConnectionResetError("the store is away")
        file = super().open(path, mode, **options)
        file.write = lambda data, write=file.write: write(change(data))
        return file


def test_what_a_store_loses_or_changes_is_copied_again(copy, tmp_path):
    fsspec.register_implementation("faulty", Faulty)
    follower = mirror.Follower(copy, mirror.Place("faulty://runs", copy.name), "run")
    next((copy / "checkpoints").glob("*step_12/shard_*")).write_bytes(b"damaged on disk")
    while follower.sync(last=True):
        pass
    assert mirror.main(["faulty://runs", str(tmp_path / copy.name)]) == 0
    assert saves.names(tmp_path / copy.name) == saves.names(copy)[1:] and lines(tmp_path / copy.name) == lines(copy)


class Proxy(socketserver.BaseRequestHandler):
    """Passes a connection on to a server; some are answered with 503, cut off after some bytes, or slow."""

    faults = itertools.cycle(("", "503", "slow", "", "cut"))

    def handle(self):
        fault, left = next(self.faults), 400_000
        if fault == "503":
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", self.server.to)) as server:
            pipes = {self.request: server, server: self.request}
            while left > 0:
                for one in select.select([*pipes], [], [])[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    time.sleep(0.02 * (fault == "slow"))
                    pipes[one].sendall(data)
                    left -= len(data) * (fault == "cut")


@pytest.fixture
def s3(monkeypatch):
    """A bucket in a real S3 server, behind the proxy: the variables of a run that reaches it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads, proxy.to = True, server.get_host_and_port()[1]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    env = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in (env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.to}"}).items():
        monkeypatch.setenv(name, value)  # this process sees all, without faults
    until(lambda: socket.socket().connect_ex(("127.0.0.1", proxy.to)) == 0)
    fsspec.filesystem("s3").mkdir("runs")
    yield env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}"}
    server.stop()
    proxy.shutdown()
    loop = asyn.loop[0]
    loop.call_soon_threadsafe(loop.stop)  # with a thread left, later tests could fork no processes
    asyn.iothread[0].join()
    loop.run_until_complete(loop.shutdown_default_executor())
    asyn.reset_after_fork()


def newest(place: mirror.Place) -> list[str]:
    return mirror.checkpoints(place.manifest(place.read("owner.json").get("run", "")).get("files", {}))[:1]


@needs.require_package("moto", "s3")
def test_killed_runs_and_copies_end_with_the_same_weights_on_a_store_that_fails(start, s3, uninterrupted):
    flags = ("-mirror", "s3://runs/all", "-save_every", "7steps")
    place = mirror.Place("s3://runs/all", "run")
    for step in (20, 33, 50):
        one = start("run", *flags, env=s3, fault={"do": "pause", "step": step})
        notes = one.wait_for_notes(2)
        copying = [pid for pid in one.processes() if b"mirror.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if step == 33:  # the copy is killed, too, wherever it is
            os.kill(copying[0], signal.SIGKILL)
        else:
            until(lambda: newest(place) == saves.names(one.folder)[:1], what=one.text)  # noqa: B023
        [os.kill(note["pid"], signal.SIGKILL) for note in notes]
        one.wait_until_gone()
        copied = newest(place)[0]
        assert not [file for file in one.folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
        shutil.rmtree(one.folder)
    last = start("run", *flags, env=s3)
    assert last.wait() == 0 and f"fetched {copied} from" in last.text() and SECRET not in last.text(), last.text()
    assert last.weights() == uninterrupted.weights() and newest(place) == saves.names(last.folder)[:1]
