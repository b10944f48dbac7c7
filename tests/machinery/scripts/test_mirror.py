"""-mirror: a run goes on from its copy with the same bits; copies are whole or absent; stores that fail."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import needs
import pytest
import saves
from command_line import refusal, usage_error
from fsspec.implementations.memory import MemoryFileSystem
from processes import until
from runs import lines, run

from lib.utils.distributed import World
from scripts import mirror, status

NAME, SECRET = "few_norm_net", "3f" * 20  # the latter is that of s3_server, too
COPIER = "import os, sys, time; run = os.getppid(); sys.stdin.read()\n"
BEATS = "[(os.write(0, b'.'), time.sleep(0.1)) for _ in range(20)]"
WAITS = {  # what the process that copies does at the run's end: what the run says, with -grace_s 0.5
    BEATS: "",
    "time.sleep(60)": "RuntimeError.*nothing moved for 0.6 s",
    f"os.kill(run, 15)\nfor _ in range(30): {BEATS}": "-grace_s 0.5 is over",
    "os.kill(os.getpid(), 9)": "RuntimeError.*ended with -9",
}


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
        (tmp_path / "there" / NAME / "owner.json").write_bytes(b"")  # as a full disk leaves it
    folder = run(tmp_path / "out", flags)
    assert saves.bits(folder) == wanted and "_step_9 from file:" in saves.log_of(folder)
    steps = [int(name.rpartition("_")[2]) for name in there(tmp_path / "there" / NAME)]
    assert steps == [12, 11, 10, 8, 4] and status.read_row(folder)["mirror"] == "whole"


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
    assert f"{damaged.name} has another size or checksum; an older checkpoint is taken" in log
    assert f"{lost.name} is missing; an older" in log and "fetched 000010_step_10" in log
    assert len(there(copied)) == 12, "what was damaged there is copied again"
    shutil.rmtree(tmp_path / NAME)
    for shard in copied.glob("*.shard_0000.*"):
        os.truncate(shard, 99)
    assert "no good checkpoint is left" in refused(flags) and not (tmp_path / NAME / "checkpoints").exists()


def test_an_odd_name_stays_here_and_a_damaged_manifest_is_refused(copy, tmp_path, capsys, script_error):
    url, back = f"file://{tmp_path}/there", tmp_path / "back" / copy.name
    (copy / "logs" / "a b.log").touch()
    assert mirror.main([str(copy), url]) == 0 and "a b.log is not copied" in "".join(capsys.readouterr())
    assert [mirror.main([url, str(back)]) for _ in range(2)] == [0, 0] and saves.names(back) == saves.names(copy)
    assert f"newer checkpoint than {back}" in capsys.readouterr().out and mirror.name_of(Path()) == Path.cwd().name
    next((tmp_path / "there" / copy.name).glob("manifest.*")).write_text("{")
    assert ".json is damaged: -reset" in script_error(mirror, url, tmp_path / "new" / copy.name)
    mirror.Place(url, "early").claim("a run")
    assert "has no whole checkpoint yet" in script_error(mirror, url, tmp_path / "early")


def test_two_runs_at_one_place_are_noticed(copied, tmp_path, refused):
    flags = f"{saves.SMALL} -save_every 1steps -seed 1"
    run(tmp_path, f"{flags} -limit_steps 2", wanted=75)
    (copied / "thesis.tex").touch()  # somebody's
    flags += f" -mirror file://{tmp_path}/there"
    assert "has another run (of " in refused(flags)
    run(tmp_path, f"{flags} -reset -limit_steps 2", wanted=75)
    (copied / "thesis.tex").unlink()  # is still there
    assert [name[-6:] for name in there(copied)] == ["step_2", "step_1"]


@pytest.mark.parametrize("later", (False, True))
def test_a_newer_start_loses_nothing_at_whatever_instant_it_claims_the_place(copy, later):
    calls, instant = itertools.count(), -1
    while next(calls) > instant:  # the older start had more calls
        MemoryFileSystem.store.clear()
        older, newer = (mirror.Follower(copy, mirror.Place("memory://runs", copy.name), "run") for _ in range(2))
        older.keep_last = newer.keep_last = 2
        older.sync()
        calls, instant, newest = itertools.count(), instant + 1, saves.names(copy)[:2]
        act = newer.claim if later else newer.sync_all
        older.place.moved = lambda: next(calls) == instant and act()  # noqa: B023
        with contextlib.suppress(mirror.TakenOver, mirror.Damaged, FileNotFoundError):
            older.sync_all()
        newer.sync_all()
        there = newer.place.without_lost(newer.entries, newer.place.sizes())
        assert there == newer.entries == newer.place.entries("run") and mirror.checkpoints(there) == newest
    assert instant > 20


def test_what_the_disk_keeps_by_the_hour_is_kept_there_too(copy):
    follower = mirror.Follower(copy, mirror.Place("memory://hours", copy.name), "run")
    follower.keep_last, follower.keep_hours = 1, 2
    follower.sync_all()
    names = saves.names(copy)
    assert mirror.checkpoints(follower.entries) == names != names[:1]
    shutil.rmtree(copy / "checkpoints" / names[-1])  # as on a new node
    follower.publish(follower.entries)
    assert names[-1] in mirror.checkpoints(follower.entries), "the first of its hour"


def test_a_url_is_refused_before_anything_is_written():
    for url in (f"s3://me:{SECRET}@bucket", f"s3://me:a/{SECRET}@bucket/x", f"https://host/x?sig={SECRET}"):
        assert "credentials" in refusal(f"-mirror {url}") and SECRET not in refusal(f"-mirror {url}")
    assert "a URL of a folder" in refusal("-mirror file://x")
    assert "that is -out" in refusal("-out /a -mirror file:///a/")
    assert "Install adlfs" in usage_error(mirror.Place, "abfs://container/runs", NAME)
    assert "Protocol not known: s4" in usage_error(mirror.Place, "s4://bucket", NAME)


def close_while(does: str, grace_s: float) -> int:
    """Close a mirror whose process does this at the end. Return how that ended: with -9 if it went on."""
    given = {"out": "", "model": "", "grace_s": grace_s, "hang_minutes": 0.02 if "sleep(60)" in does else 10}
    one = mirror.Mirror(SimpleNamespace(**given), World(), contextlib.ExitStack())
    one.begun, (one.socket, theirs) = True, socket.socketpair()
    with theirs:
        one.process = subprocess.Popen([sys.executable, "-c", COPIER + does], stdin=theirs.fileno())
    try:
        one.close(None, None, None)
    except RuntimeError as error:
        mirror.log.error(repr(error))
    one.process.kill()
    return one.process.wait()


@pytest.mark.parametrize("does", WAITS)
def test_a_run_waits_for_its_last_copy_as_long_as_bytes_move(caplog, does):
    assert close_while(does, 0.5) == (-9 if WAITS[does] else 0) and re.search(WAITS[does], caplog.text)


def test_a_second_signal_ends_a_run_that_waits_for_its_last_copy():
    if not (child := os.fork()):
        with contextlib.suppress(Exception):
            close_while(f"while True: os.kill(run, 15); {BEATS}", 60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75


def test_status_shows_what_did_not_arrive(copied, copy, monkeypatch):
    shown = lambda: status.read_row(copy)["mirror"]  # noqa: E731
    (copy / "outcome.json").write_text("{}")  # the run's end did not arrive
    assert shown() == "lacks the end"
    shutil.rmtree(copied)
    copied.touch()
    monkeypatch.setattr(mirror, "PAUSES_S", ())
    monkeypatch.setattr(mirror, "RETRY_S", 0)
    place, run_id = mirror.Place(f"file://{copied.parent}", copy.name), mirror.local_facts(copy)["run"]
    assert mirror.Follower(copy, place, run_id).follow(SimpleNamespace(has_ended=lambda seconds: True)) == 1
    assert shown() == "12 steps behind" and "FileExistsError" in (copy / "mirror.json").read_text()


class Faulty(MemoryFileSystem):
    """A store that fails, and loses or changes what it gets, each time another way."""

    protocol, cachable, store, pseudo_dirs = "faulty", False, {}, [""]
    faults = itertools.cycle((bytes, lambda data: data[:99], bytes, lambda data: b"?" + data[1:], None))

    def open(self, path, mode="rb", **options):
        change = next(self.faults)
        if change is None:
            raise ConnectionResetError("the store is away")
        file = super().open(path, mode, **options)
        file.write = lambda data, write=file.write: write(change(data))
        return file


def test_what_a_store_loses_or_changes_is_copied_again(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "PAUSES_S", [0.0] * 5)
    fsspec.register_implementation("faulty", Faulty)
    follower = mirror.Follower(copy, mirror.Place("faulty://runs", copy.name), "run")
    next((copy / "checkpoints").glob("*step_12/shard_*")).write_bytes(b"damaged on disk")
    follower.sync_all()
    assert mirror.main(["faulty://runs", str(tmp_path / copy.name)]) == 0
    assert saves.names(tmp_path / copy.name) == saves.names(copy)[1:] and lines(tmp_path / copy.name) == lines(copy)


@needs.require_package("moto", "s3")
def test_killed_runs_and_copies_end_with_the_same_weights(start, s3_server, uninterrupted):
    flags = "-mirror s3://bucket/all -save_every 7steps".split()
    for step in (20, 33, 50):
        one = start("run", *flags, env=s3_server, fault={"do": "pause", "step": step})
        notes = one.wait_for_notes(2)
        copies = [pid for pid in one.processes() if b"mirror.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if step == 33:  # the copy is killed, too, wherever it is
            [os.kill(pid, signal.SIGKILL) for pid in copies]
        else:
            until(lambda: status.read_row(one.folder)["mirror"] == "whole", what=one.text)  # noqa: B023
            copied = saves.names(one.folder)[0]
        [os.kill(note["pid"], signal.SIGKILL) for note in notes]
        one.wait_until_gone()
        assert not [file for file in one.folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
        shutil.rmtree(one.folder)
    last = start("run", *flags, env=s3_server)
    assert last.wait() == 0 and f"fetched {copied} from" in last.text() and SECRET not in last.text(), last.text()
    assert last.weights() == uninterrupted.weights() and status.read_row(last.folder)["mirror"] == "whole"
