"""Copies a run to any URL that fsspec knows (s3://, gs://, hf://, file:///), and fetches it from there.

train.py -mirror URL starts it next to a run, so that no step waits. By hand: python scripts/mirror.py out/NAME URL
copies the run to URL/NAME once; python scripts/mirror.py URL out/NAME fetches all of it.

Objects there have new names and are never changed. A manifest, written last, says which object is which file, with
size and CRC-32: so a copy is whole, or it is not there. owner.json says which run the place belongs to, and which
start of it writes there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils import files
from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import ABORTED, STOP_SIGNALS, STOPPED, UsageError, printable
from lib.utils.monitoring import console
from scripts import reading

if TYPE_CHECKING:
    from lib.config import Args
    from lib.utils.distributed import World

log = logging.getLogger(__name__)
INTERVAL_S = 1.0  # seconds between looks for a new checkpoint
PAUSES_S = (0.2, 1, 2, 4, 8)  # between attempts to reach the place
RETRY_S = 60.0  # most seconds until a copy that failed is begun again
LAST = 4  # copies that may fail in a row once the run has ended
FAILED_S = 5.0  # that a run which failed waits for its copy
CHUNK = 1 << 20  # bytes
NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf"}  # stores that need none to be made
MANIFEST = re.compile(r"manifest\.(\d{9})\.[0-9a-f]{16}\.json")
OURS = re.compile(rf"{MANIFEST.pattern}|.+\.[0-9a-f]{{12}}")  # names of what a mirror writes
INSIDE = re.compile(r"(\w[\w.-]*/){0,2}\w[\w.-]*")  # paths that stay in a run's folder
SIDE_FILES = (  # copied with each checkpoint, and at the run's end
    *("config.yaml", "start.json", "outcome.json", "eval.json", "metrics.jsonl", "wandb.json", "mlflow.json"),
    *("best/weights.safetensors", "final/weights.safetensors", "logs/*.log", "events.out.tfevents.*"),
)
OF_A_START = ("logs/", "events.out.tfevents.")  # each start writes its own: those on disk stay


class Damaged(Exception):
    """What is at a place, or on disk, differs from what was written there."""


class TakenOver(Exception):
    """Another run or start copies to the place now."""


def check(url: str, out: str | None = None) -> str:
    """Return the protocol of a -mirror URL. Raises UsageError if it cannot be one, or is -out."""
    protocol, there, rest = url.partition("://")
    if re.search(r":[^@]*@|[?#]", rest):
        hint = "leave them to the store's own tools (~/.aws, AWS_PROFILE, gcloud auth, hf auth)"
        raise UsageError(f"-mirror: the URL has credentials or options in it, which files would keep: {hint}")
    if not there or not rest or "::" in url or (protocol in ("file", "local") and not rest.startswith("/")):
        raise UsageError(f"-mirror {url}: give a URL of a folder, as s3://BUCKET/runs or file:///mnt/runs")
    if out and protocol in ("file", "local") and os.path.realpath(rest) == os.path.realpath(out):
        raise UsageError(f"-mirror {url}: that is -out: take another place")
    return protocol


def is_lasting(error: Exception) -> bool:
    """Return whether it is of no use to try again."""
    paths = FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError
    return isinstance(error, paths) or "Credentials" in type(error).__name__


def clean(error: object) -> str:
    """Return an error as one short line without passwords and signatures of URLs."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return printable(re.sub(r"//[^/\s]*@|\?\S+", "//", text))[:300]


def copy(source: IO[bytes], target: IO[bytes] | None, moved: Callable[[], None]) -> dict[str, int]:
    """Copy a file, or only read it. Return its size and CRC-32."""
    size = crc = 0
    while data := source.read(CHUNK):
        if target:
            target.write(data)
        size, crc = size + len(data), zlib.crc32(data, crc)
        moved()
    return {"bytes": size, "crc32": crc}


class Place:
    """URL/NAME: the objects of one run. It calls `moved` while bytes move."""

    def __init__(self, url: str, name: str, moved: Callable[[], None] = lambda: None):
        protocol, self.url, self.moved = check(url), f"{url.rstrip('/')}/{name}", moved
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self.fs, root = fsspec.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UsageError(f"-mirror {url}: {error}") from None
        self.root = f"{str(root).rstrip('/')}/{name}"
        self.has_folders, self.is_disk = protocol not in NO_FOLDERS, protocol in ("file", "local")
        self.removable: set[str] = set()  # what this process wrote, or what is older than its claim
        self.damaged: set[str] = set()  # objects that could not be fetched

    def retry(self, action: Callable[[], Any]) -> Any:
        """Return what `action()` returns. After an error that may pass try again, with a limit; once if Damaged."""
        pauses, damaged = [*PAUSES_S], 0
        while True:
            self.moved()
            try:
                return action()
            except Exception as error:
                damaged += isinstance(error, Damaged)
                if is_lasting(error) or damaged > 1 or not pauses:
                    raise
            time.sleep(pauses.pop(0))

    def sizes(self) -> dict[str, int]:
        """Return the names of all objects, and their bytes."""
        try:
            found = self.retry(lambda: self.fs.ls(self.root, detail=True))
        except FileNotFoundError:
            return {}
        return {one["name"].rpartition("/")[2]: one["size"] for one in found}

    def read(self, name: str) -> dict:
        """Return what a JSON object holds, {} if it is missing or holds no dict."""
        try:
            found = json.loads(self.retry(lambda: self.fs.cat_file(f"{self.root}/{name}")))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def read_owner(self) -> dict:
        """Return whose place this is, {} if nobody's. If owner.json is lost, the newest manifest says so, too."""
        if owner := self.read("owner.json"):
            return owner
        manifests = sorted(filter(MANIFEST.fullmatch, self.sizes()), reverse=True)
        return next((found for name in manifests if (found := self.read(name)).get("run")), {})

    def write(self, name: str, value: dict) -> None:
        """Write a JSON object. On a disk that is full the one before stays."""
        if self.is_disk:
            self.retry(lambda: atomic.write_file(Path(self.root) / name, json.dumps(value)))
        else:
            self.retry(lambda: self.fs.pipe_file(f"{self.root}/{name}", json.dumps(value).encode()))

    def claim(self, run: str, **facts: str | None) -> None:
        """Write whose place this is."""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        if self.has_folders:
            self.retry(lambda: self.fs.makedirs(self.root, exist_ok=True))
        self.write("owner.json", {"run": run, **facts, **who})

    def entries(self, run: str) -> dict[str, dict]:
        """Return what the newest manifest of a run names: objects, sizes, checksums, by path; {} if there is none.

        Paths that lead out of a run's folder, or that no run copies, are left out.
        """
        for name in sorted(filter(MANIFEST.fullmatch, self.sizes()), reverse=True):
            found = self.read(name)
            entries = found.get("files", {}) if found.get("run") == run else {}
            names = [path for path in entries if INSIDE.fullmatch(path) and INSIDE.fullmatch(entries[path]["object"])]
            if names:
                return {path: entries[path] for path in names}
        return {}

    def check_manifests(self, run: str) -> None:
        """Raise UsageError if a manifest that has no `entries` is a run's, or does not say whose it is."""
        for name in filter(MANIFEST.fullmatch, self.sizes()):
            if self.read(name).get("run", run) == run:
                raise UsageError(f"-mirror: {self.url}/{name} is damaged: -reset starts from scratch")

    def without_lost(self, entries: dict[str, dict], sizes: dict[str, int]) -> dict[str, dict]:
        """Return the entries whose objects are there, and of checkpoints only whole ones."""
        good = {one["object"] for one in entries.values() if sizes.get(one["object"]) == one["bytes"]} - self.damaged
        lost = {path for path, entry in entries.items() if entry["object"] not in good}
        folders = {path.rpartition("/")[0] for path in lost if path.startswith("checkpoints/")}
        return {path: entries[path] for path in entries if not {path, path.rpartition("/")[0]} & (lost | folders)}

    def upload(self, path: str, source: IO[bytes]) -> dict:
        """Copy an open file to a new object, and read it back. Return its entry of the manifest."""

        def attempt() -> dict:
            source.seek(0)
            name = f"{path.replace('/', '.')}.{secrets.token_hex(6)}"
            self.removable.add(name)
            try:
                with self.fs.open(f"{self.root}/{name}", "wb") as target:
                    entry = copy(source, target, self.moved)
                with self.fs.open(f"{self.root}/{name}", "rb") as target:
                    if copy(target, None, self.moved) != entry:
                        raise Damaged(f"{path}: its size or checksum is wrong after the copy")
            except Exception:
                with contextlib.suppress(Exception):
                    self.fs.rm_file(f"{self.root}/{name}")  # it may fill a disk
                raise
            return {"object": name, **entry}

        return self.retry(attempt)

    def download(self, entry: dict, path: Path) -> None:
        """Copy an object to a new file, and sync it. Raises Damaged if it is missing, or not what was written."""

        def attempt() -> None:
            path.unlink(missing_ok=True)
            with self.fs.open(f"{self.root}/{entry['object']}", "rb") as source, path.open("xb") as target:
                found = copy(source, target, self.moved)
            if {**entry, **found} != entry:
                raise Damaged
            atomic.fsync(path)

        try:
            self.retry(attempt)
        except (Damaged, FileNotFoundError) as error:
            self.damaged.add(entry["object"])
            what = "is missing" if isinstance(error, FileNotFoundError) else "has another size or checksum"
            raise Damaged(f"{self.url}/{entry['object']} {what}") from error

    def remove(self, names: set[str]) -> None:
        """Remove objects, manifests first."""
        for name in sorted(names, key=lambda name: not MANIFEST.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):
                self.retry(lambda: self.fs.rm_file(f"{self.root}/{name}"))  # noqa: B023
            self.removable.discard(name)


def checkpoints(entries: dict[str, dict]) -> list[str]:
    """Return the names of the checkpoints that a manifest has, newest first."""
    names = {path.split("/")[1] for path in entries if path.endswith("/manifest.json")}
    return sorted(names, key=run_folder.checkpoint_number, reverse=True)


# Next to a run


class Follower:
    """Copies a run's folder to its place, again and again."""

    def __init__(self, folder: Path, place: Place, run: str):
        self.folder, self.place, self.run = folder, place, run
        self.start = secrets.token_hex(8)
        self.launch = run_folder.read_json(folder / "outcome.json").get("launch")
        self.entries: dict[str, dict] = {}  # of the newest manifest there
        self.generation: int | None = None  # of that manifest; None before the first claim
        self.is_current = False  # whether these are what is there
        self.done: set[tuple] = set()  # checkpoints on disk that are there, or cannot be copied
        self.odd: set[str] = set()  # files that are not copied, because of their names
        flags = yaml.safe_load(files.read_bytes(folder / "config.yaml"))
        self.keep_last, self.keep_hours = flags.get("keep_last") or 2, flags.get("keep_hours") or 0

    def claim(self) -> None:
        """Say at the place that this start writes there from now on, and read what is there."""
        if self.generation is not None:  # after a failure
            self.check_owner()
        self.place.claim(self.run, start=self.start, launch=self.launch)
        sizes = self.place.sizes()
        self.place.removable |= set(filter(OURS.fullmatch, sizes))  # others may keep files of theirs there
        self.generation = max((int(match[1]) for match in map(MANIFEST.fullmatch, sizes) if match), default=0)
        self.entries = self.place.without_lost(self.place.entries(self.run), sizes)
        self.done.clear()
        if self.entries:  # an older start may take back what it has just published
            self.publish(self.entries)
        self.is_current = True

    def check_owner(self) -> None:
        """Raise TakenOver if another start has claimed the place."""
        owner = self.place.read("owner.json")
        if owner and owner.get("start") != self.start:
            raise TakenOver(f"host {owner.get('host')}, since {owner.get('since')}")

    def sync(self, last: bool = False) -> bool:
        """Copy the newest checkpoint that is not there, if there is one. Return whether there was something to do.

        Files next to the checkpoints are copied with it, and at the `last`.
        """
        if run_folder.read_json(self.folder / "mirror.json").get("run", self.run) != self.run:
            raise TakenOver("-reset")
        if not self.is_current:
            self.claim()
        name, began = self.next_checkpoint(), time.monotonic()
        if not name and not last:
            self.report()
            return False
        with contextlib.ExitStack() as stack:
            try:
                opened, sums = self.open_checkpoint(name, stack) if name else ({}, {})
            except (FileNotFoundError, LookupError, TypeError, ValueError) as error:
                return self.pass_over(name, error)
            lacking = [path for path in opened if self.entries.get(path, {}).get("crc32") != sums[path]]
            new = {path: self.place.upload(path, opened[path]) for path in lacking}
            if (entry := new.get(f"checkpoints/{name}/manifest.json")) is not None:
                entry["saved"] = os.fstat(opened[f"checkpoints/{name}/manifest.json"].fileno()).st_mtime
            if bad := [path for path in new if new[path]["crc32"] != sums[path]]:
                return self.pass_over(name, f"{bad[0]} has another checksum")
            # These after the checkpoint's: what a resume from it needs of them was written before it.
            changed = self.open_changed(stack) if new or not name else {}
            new |= {path: self.place.upload(path, file) for path, file in changed.items()}
        if new:
            self.publish({**self.entries, **new})
        self.report()
        if name:
            self.done.add(self.key(name))
        if name and new:
            figures = sum(entry["bytes"] for entry in new.values()) / 1e6, time.monotonic() - began
            log.info("-mirror:     %s is at %s (%.1f MB in %.1f s)", name, self.place.url, *figures)
        return bool(new or name)

    def sync_all(self) -> None:
        """Copy all that is not there."""
        while self.sync(last=True):
            pass

    def key(self, name: str) -> tuple[str, bool]:
        """Return by what a checkpoint on disk is known to be there: its name, and whether it is to be kept."""
        return name, (self.folder / "checkpoints" / name / "keep").exists()

    def next_checkpoint(self) -> str:
        """Return the newest checkpoint that is not there as it is on disk, and is to be kept there; "" for none."""
        local = [one.name for one in run_folder.list_checkpoints(self.folder / "checkpoints")]
        kept = self.kept({*local, *checkpoints(self.entries)})
        return next((name for name in local if name in kept and self.key(name) not in self.done), "")

    def kept(self, names: set[str]) -> set[str]:
        """Return the checkpoints that stay there: -keep_last of them, and those with a file `keep`, here or there.

        Under -keep_hours also all that are on disk, and by the same rule those that an earlier node had on its own.
        """
        spared = {name for name in names if f"checkpoints/{name}/keep" in self.entries or self.key(name)[1]}
        others = sorted(names, key=run_folder.checkpoint_number, reverse=True)
        if self.keep_hours:
            spared |= {name for name in names if (self.folder / "checkpoints" / name).exists()}
            first_of_hour = {self.saved_at(name) // 3600: name for name in others}  # the oldest come last
            least = time.time() // 3600 - self.keep_hours
            spared |= {name for hour, name in first_of_hour.items() if hour > least}
        others = [name for name in others if name not in spared]
        return spared | {*others[: self.keep_last]}

    def saved_at(self, name: str) -> float:
        """Return when a checkpoint that is there was saved, in seconds of the clock; 0 if that is not known."""
        return self.entries.get(f"checkpoints/{name}/manifest.json", {}).get("saved", 0.0)

    def open_checkpoint(self, name: str, stack: contextlib.ExitStack) -> tuple[dict[str, IO[bytes]], dict[str, int]]:
        """Open all files of a checkpoint at once, as it may be removed. Return them and their CRC-32, by path."""
        path = f"checkpoints/{name}"
        data = files.read_bytes(self.folder / path / "manifest.json")
        sums = {file: about["crc32"] for file, about in json.loads(data)["shards"].items()}
        sums |= {"manifest.json": zlib.crc32(data), **({"keep": 0} if self.key(name)[1] else {})}
        opened = {file: stack.enter_context(files.open_regular(self.folder / path / file, "rb")) for file in sums}
        return {f"{path}/{file}": opened[file] for file in sums}, {f"{path}/{file}": sums[file] for file in sums}

    def pass_over(self, name: str, fault: object) -> bool:
        """Copy no checkpoint that is damaged on disk, or was just removed; there may be others."""
        self.done.add(self.key(name))
        if (self.folder / "checkpoints" / name).exists():
            log.warning("-mirror: %s/%s is damaged on disk, and is not copied (%s)", self.folder, name, fault)
        return True

    def open_changed(self, stack: contextlib.ExitStack) -> dict[str, IO[bytes]]:
        """Open the files next to the checkpoints that are not there as they are here."""
        changed = {}
        for found in sorted(one for pattern in SIDE_FILES for one in self.folder.glob(pattern)):
            path = str(found.relative_to(self.folder))
            if not INSIDE.fullmatch(path):
                if path not in self.odd:
                    log.warning("-mirror: %s is not copied: name it with letters, digits and _ . - only", found)
                self.odd.add(path)
                continue
            try:
                file = stack.enter_context(files.open_regular(found, "rb"))
            except OSError:  # replaced at this moment, or a link
                continue
            entry = self.entries.get(path, {})
            same_size = entry.get("bytes") == os.fstat(file.fileno()).st_size
            if not same_size or copy(file, None, self.place.moved)["crc32"] != entry["crc32"]:
                changed[path] = file
        return changed

    def publish(self, entries: dict[str, dict]) -> None:
        """Write the manifest, and remove what it no longer names. Raises TakenOver if another start writes there.

        A newer start claims the place, and then looks what is there. Either it finds this manifest, or this start
        finds its claim and removes nothing. What came after this start's claim, it never removes.
        """
        sizes = self.place.sizes()
        if "owner.json" not in sizes or len(self.place.without_lost(entries, sizes)) < len(entries):
            raise Damaged(f"somebody removed objects from {self.place.url}")  # the next attempt copies them again
        kept = self.kept({*checkpoints(entries)})
        entries = {
            path: entry
            for path, entry in entries.items()
            if not path.startswith("checkpoints/") or path.split("/")[1] in kept
        }
        generation = (self.generation or 0) + 1
        name = f"manifest.{generation:09d}.{self.start}.json"
        manifest = {"run": self.run, "launch": self.launch, "files": entries}
        self.place.removable.add(name)
        self.place.write(name, manifest)
        if self.place.read(name) != manifest:
            raise Damaged(f"{self.place.url}/{name} is not what was written")
        try:
            self.check_owner()
        except TakenOver:
            self.place.remove({name})
            raise
        self.generation, self.entries = generation, entries
        self.place.remove(self.place.removable - {name} - {one["object"] for one in entries.values()})

    def report(self, error: str | None = None) -> None:
        """Write mirror.json, from which scripts/status.py knows what is there."""
        newest, outcome = "".join(checkpoints(self.entries)[:1]), self.entries.get("outcome.json", {})
        facts = {"step": int(newest.rpartition("_")[2] or 0), "outcome": outcome.get("crc32"), "error": error}
        with contextlib.suppress(OSError):  # the folder is gone, or its disk is full
            write_facts(self.folder, {"run": self.run, "url": self.place.url, **facts})

    def follow(self, parent: Parent) -> int:
        """Copy until the run has ended and all is there. Returns the exit code."""
        ended, failures, pause, more = False, 0, INTERVAL_S, True
        while more or not ended:
            if ended and failures:
                time.sleep(pause)
            elif not ended and parent.has_ended(pause):
                ended, failures = True, 0
            try:
                more, failures, pause = self.sync(last=ended), 0, INTERVAL_S
            except TakenOver as error:
                text = "another run or start (%s) copies to %s now: nothing more is copied from here; stop one"
                log.error(f"-mirror: {text}", error, self.place.url)
                return 1
            except Exception as error:
                self.is_current, more, failures = False, True, failures + 1
                pause = min(RETRY_S, 2.0**failures)
                self.report(clean(error))
                if ended and failures > LAST:
                    text = "the last state is not at %s (%s): the next start, or scripts/mirror.py, copies it"
                    log.error(f"-mirror: {text}", self.place.url, clean(error))
                    return 1
                if failures == 1:
                    text = "not copied to %s (%s): tried again, at most every %.0f s"
                    log.warning(f"-mirror: {text}", self.place.url, clean(error), RETRY_S)
        return 0


def write_facts(folder: Path, facts: dict) -> None:
    """Write mirror.json: which run this is, and what is there."""
    if run_folder.read_json(folder / "mirror.json") != facts:
        atomic.write_file(folder / "mirror.json", json.dumps(facts))


def lock(folder: Path, wait: bool) -> IO[bytes]:
    """Keep other processes from copying the folder while the result is open. Raises UsageError, or waits."""
    file = files.open_regular(folder / "logs" / "rank_0.log", "r+b")  # which no start replaces
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise UsageError(f"{folder} is being copied already, by its run") from None
    except OSError:  # a file system without locks
        pass
    return file


# At a run's start


def local_facts(folder: Path) -> dict:
    """Return which run a folder has, as far as a mirror knows it, and the number of its newest checkpoint."""
    newest = run_folder.list_checkpoints(folder / "checkpoints")[:1]
    number = run_folder.checkpoint_number(newest[0].name) if newest else 0
    return {"run": run_folder.read_json(folder / "mirror.json").get("run"), "number": number}


def choose_run(place: Place, owner: dict, known: list[dict]) -> str:
    """Return the id of the run that is to write to a place: a new one if neither the owner nor a writer has one.

    `known` has `local_facts` of each writer. Raises UsageError if the place belongs to another run.
    """
    runs = {one["run"] for one in known if one["run"]}
    if not owner:
        return min(runs, default=secrets.token_hex(16))
    if owner.get("run") in runs or not (runs or any(one["number"] for one in known)):
        return str(owner.get("run"))
    who = printable(f"{owner.get('host')}, since {owner.get('since')}")
    raise UsageError(
        f"-mirror: {place.url} has another run (of {who}): take another URL or -model; -reset replaces it"
    )


def fetch(place: Place, folder: Path, run: str, *, above: int, most: int | None = None) -> list[str]:
    """Fetch the newest good checkpoints whose numbers are `above`, and what a resume needs besides.

    Returns lines for the log. Raises UsageError if there are some checkpoints, none is good, and none is on disk.
    """
    entries, lines, fetched, place_of = place.entries(run), [], [], folder / "checkpoints"
    if not entries and not above:
        place.check_manifests(run)
    for name in [one for one in checkpoints(entries) if run_folder.checkpoint_number(one) > above]:
        if len(fetched) == most:
            break
        partial, began = place_of / f"{name}.partial", time.monotonic()
        atomic.sweep(place_of, name)
        partial.mkdir(parents=True)
        mine = {path: entry for path, entry in entries.items() if path.startswith(f"checkpoints/{name}/")}
        try:
            for path, entry in mine.items():
                place.download(entry, partial / Path(path).name)
        except Damaged as error:
            lines.append(f"{error}; an older checkpoint is taken")
            atomic.sweep(place_of, name)
            continue
        fetched.append(name)
        size, seconds = sum(entry["bytes"] for entry in mine.values()) / 1e6, time.monotonic() - began
        lines.append(f"fetched {name} from {place.url} ({size:.1f} MB in {seconds:.1f} s)")
    if lines and not fetched and not above:
        with contextlib.suppress(OSError):
            place_of.rmdir()
        fault = lines[0].partition(";")[0]
        raise UsageError(f"-mirror: {fault}; no good checkpoint is left: -reset starts from scratch")
    for path, entry in entries.items() if fetched else ():
        target = folder / path
        if path.startswith("checkpoints/") or (path.startswith(OF_A_START) and target.exists()):
            continue
        target.parent.mkdir(exist_ok=True)
        try:
            with atomic.new_version(target) as partial:
                place.download(entry, partial)
        except Damaged as error:
            lines.append(f"{error}; it is left out")
    for name in reversed(fetched):  # last: a resume finds all that belongs to it
        if (place_of / name).exists():
            atomic.remove_folder(place_of / name)
        place.moved()
        atomic.publish(place_of / f"{name}.partial", place_of / name)
        if saved := entries[f"checkpoints/{name}/manifest.json"].get("saved"):  # by which -keep_hours goes
            os.utime(place_of / name, (saved, saved))
    return lines


class Parent:
    """The run that started this process. A socket to it is stdin."""

    def __init__(self, pid: int):
        self.pid, self.socket, self.said = pid, socket.socket(fileno=0), 0.0
        self.goes_on = False  # whether the start was not refused

    def has_ended(self, seconds: float) -> bool:
        """Wait so long for the run's end, and return whether it has come."""
        return bool(select.select([self.socket], [], [], seconds)[0]) or os.getppid() != self.pid

    def moved(self) -> None:
        """Tell the run that bytes move, once a second. It does not read while it trains."""
        if os.getppid() != self.pid and not self.goes_on:
            os._exit(1)  # its folder may be another start's now
        if time.monotonic() - self.said > INTERVAL_S:
            self.said = time.monotonic()
            with contextlib.suppress(OSError):
                self.socket.send(b"\n", socket.MSG_DONTWAIT)


def prepare(place: Place, folder: Path, order: dict) -> dict:
    """Do what a run's start needs: return the run's id and lines for the log, or why it cannot go on."""
    try:
        owner, above = place.read_owner(), max(one["number"] for one in order["known"])
        if order["reset"] and owner and owner.get("launch") != order["launch"]:  # this launch has not reset it yet
            return {"run": secrets.token_hex(16), "lines": []}
        run = choose_run(place, owner, order["known"])
        if not owner:  # a place that may not be written is known now
            place.claim(run, launch=order["launch"])
        return {"run": run, "lines": fetch(place, folder, run, above=above, most=1)}
    except UsageError as error:
        return {"usage": str(error)}
    except Exception as error:
        text = f"{place.url}: cannot be used ({clean(error)})"
        runs = [one["run"] for one in order["known"] if one["run"] and one["number"]]
        if runs and not is_lasting(error):
            return {"run": min(runs), "lines": [f"{text}: the run continues from its own disk"]}
        return {"usage" if is_lasting(error) else "error": f"-mirror {text}"}


def serve(url: str, folder: Path, order: dict, parent: Parent) -> int:
    """Fetch what a run's start needs, and copy the run once it goes on, until its end. Returns the exit code."""
    for number in STOP_SIGNALS:  # Slurm sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    try:
        place = Place(url, folder.name, parent.moved)
        answer = prepare(place, folder, order)
    except UsageError as error:
        place, answer = None, {"usage": str(error)}
    parent.socket.sendall(json.dumps(answer).encode())
    parent.goes_on = bool(parent.socket.recv(1))
    if not parent.goes_on or not place:  # the start was refused
        return 0
    os.nice(10)
    console.setup_logging(folder, rank=0)
    with lock(folder, wait=True):
        return Follower(folder, place, answer["run"]).follow(parent)


class Mirror:
    """The mirror of a run, as its processes see it. All ranks call its methods.

    A process next to rank 0 reaches the place: fsspec's threads must not be where loaders are forked.
    """

    def __init__(self, args: Args, world: World, stack: contextlib.ExitStack):
        """`stack` closes it: make it before the run's folder is locked, as the outcome is copied, too."""
        self.args, self.world, self.folder = args, world, run_folder.path_of(args)
        stack.push(self.close)
        self.process: subprocess.Popen | None = None  # on rank 0
        self.text, self.moved_at = b"", 0.0  # what it sent, and when
        self.answer: dict = {}  # what it found at the start
        self.begun = False
        self.signalled_at: float | None = None  # when a signal came that stops the run

    def fetch(self, world: World) -> None:
        """Find out whether the place is this run's, and fetch a newer checkpoint from there.

        Raises UsageError if the place belongs to another run, or may not be read.
        """
        from lib.utils import distributed, watchdog

        self.world, url = world, self.args.mirror
        watchdog.begin(f"looking for a copy of the run at -mirror {url}")
        reset = run_folder.is_reset_due(self.args, world)
        known = world.on_writers(lambda: {"run": None, "number": 0} if reset else local_facts(self.folder))
        if world.is_main:
            order = json.dumps({"known": known, "launch": world.launch, "reset": reset})
            command = [sys.executable, __file__, str(url), str(self.folder), "-order", order]
            self.socket, theirs = socket.socketpair()
            with theirs:
                command += ["-parent", str(os.getpid())]
                self.process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)  # no Ctrl-C
        while self.poll(not self.text.endswith(b"}")):
            pass
        self.answer = distributed.broadcast(json.loads(self.text.split(b"\n")[-1] or "{}"), world)
        if "usage" in self.answer:
            raise UsageError(self.answer["usage"])
        if "run" not in self.answer:
            raise OSError(self.answer.get("error", f"-mirror {url}: scripts/mirror.py ended without an answer"))
        watchdog.begin("opening the run's checkpoints")

    def poll(self, goes_on: bool = True) -> bool:
        """Read what the process sends, for a moment. Return whether it lives, and rank 0 goes on.

        All ranks vote, which keeps collectives from timing out. The watchdog counts what moves.
        """
        from lib.utils import distributed, watchdog

        alive, moved_at = self.process is not None and goes_on, self.moved_at if self.process else 0.0
        if alive and select.select([self.socket], [], [], INTERVAL_S / 5)[0]:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it was killed
                data = b""
            alive, self.text, moved_at = bool(data), self.text + data, time.monotonic()
        alive, moved_at = distributed.all_reduce_max([alive, moved_at], self.world)
        if moved_at != self.moved_at:
            watchdog.moved()
        self.moved_at = moved_at
        return bool(alive)

    def start(self) -> None:
        """Start copying, once the run's folder is its own."""
        self.begun = True
        if self.world.is_writer:
            write_facts(self.folder, {"run": self.answer["run"], "url": self.args.mirror})
        if self.world.is_main:
            for line in self.answer["lines"]:
                log.log(logging.INFO if line.startswith("fetched") else logging.WARNING, "-mirror:     %s", line)
            with contextlib.suppress(OSError):  # it was killed: `close` says so
                self.socket.send(b"!")

    def close(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait for the copy of the last state as long as bytes move: the end of a container would end it, too.

        After a failure wait FAILED_S at most, after a signal that stops the run -grace_s. Raises RuntimeError if it
        does not arrive, and neither is the reason.
        """
        from lib.utils import distributed, signals, watchdog

        if self.process:
            with contextlib.suppress(OSError):  # it was killed
                self.socket.shutdown(socket.SHUT_WR)
        if not self.begun:
            return
        if error:
            self.world = distributed.World(rank=self.world.rank)  # the other ranks may be gone
        watchdog.begin("copying the last state to -mirror")
        began = self.moved_at = time.monotonic()
        if run_folder.read_json(self.folder / "outcome.json").get("signal"):
            self.signalled_at = began
        reason, still_s = "", 30 * self.args.hang_minutes  # half of what the watchdog allows
        with signals.use_handler(self.note_signal):
            while self.poll(not reason):
                now = time.monotonic()
                if error and now > began + FAILED_S:
                    reason = "the run failed"
                elif self.signalled_at is not None and now > self.signalled_at + self.args.grace_s:
                    reason = f"-grace_s {self.args.grace_s:g} is over"
                elif now > self.moved_at + still_s:
                    reason = f"nothing moved for {still_s:g} s"
        if not self.process or not (reason or self.process.wait()):
            return
        reason = reason or f"its process ended with {self.process.returncode}"
        text = f"-mirror: not all is copied ({reason}): the next start, or scripts/mirror.py, copies the rest"
        if not error and self.signalled_at is None:
            raise RuntimeError(text)  # an exit code of 0 would mean that nothing is lost with this disk
        log.warning("%s", text)

    def note_signal(self, number: int, frame: object) -> None:
        """Note the first signal that stops the run; end this process at a second one."""
        from lib.utils import preemption

        if self.signalled_at is None:
            self.signalled_at = time.monotonic()
        elif time.monotonic() - self.signalled_at > preemption.TWICE_S:
            os._exit(STOPPED)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a run's folder, as out/NAME, or URL")
    parser.add_argument("target", help="URL, or the folder")
    parser.add_argument("-parent", type=int, help="the process of a run that starts this")
    parser.add_argument("-order", type=json.loads, help="what it wants")
    args = parser.parse_args(argv)
    fetches = "://" in args.source
    url, folder = (args.source, args.target) if fetches else (args.target, args.source)
    if args.parent:
        return serve(url, Path(folder), args.order, Parent(args.parent))
    console.setup_logging(None, rank=0)
    try:
        print(fetch_once(url, Path(folder)) if fetches else copy_once(url, Path(folder)))
    except UsageError as error:
        parser.exit(2, f"mirror.py: {error}\n")
    except KeyboardInterrupt:
        return ABORTED
    except Exception as error:
        log.error("mirror.py: %s", clean(error))
        return 1
    return 0


def name_of(folder: Path) -> str:
    """Return a run's name, which "." and ".." do not show."""
    return folder.name if folder.name.strip(".") else folder.resolve().name


def copy_once(url: str, folder: Path) -> str:
    """Copy a run, and return a message."""
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{folder} is no run's folder")
    with lock(folder, wait=False):
        place = Place(url, name_of(folder))
        follower = Follower(folder, place, choose_run(place, place.read_owner(), [local_facts(folder)]))
        follower.report()
        follower.sync_all()
    return f"{folder} is at {place.url}"


def fetch_once(url: str, folder: Path) -> str:
    """Fetch all of a run that is newer than what the folder has, and return a message."""
    place, here = Place(url, name_of(folder)), local_facts(folder)
    if reading.is_locked(folder):
        raise UsageError(f"{folder} is in use by a run")
    if not (owner := place.read_owner()):
        raise UsageError(f"{place.url} has no run: URL is what -mirror was, without the run's name")
    run = choose_run(place, owner, [here])
    lines = fetch(place, folder, run, above=here["number"])
    if not lines and not here["number"]:
        raise UsageError(f"{place.url} has no whole checkpoint yet")
    write_facts(folder, {**run_folder.read_json(folder / "mirror.json"), "run": run})
    hint = "an empty folder gets all files there are"
    return "\n".join(lines) or f"{place.url} has no newer checkpoint than {folder}: nothing is fetched; {hint}"


if __name__ == "__main__":
    sys.exit(main())
