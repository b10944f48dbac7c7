"""Copies a run to any URL that fsspec knows (s3://, gs://, hf://, file:///), and fetches it from there.

train.py -mirror URL starts it next to a run, so that no step waits. By hand: python scripts/mirror.py out/NAME URL
copies the run to URL/NAME once; python scripts/mirror.py URL out/NAME fetches all of it.

Objects there have new names and are never changed. A manifest, written last, says which object is which file, with
size and CRC-32: so a copy is whole, or it is not there. owner.json says which run the place belongs to, and which
start of it writes there.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import importlib.util
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
import yaml
from fsspec.registry import known_implementations

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils import files
from lib.utils.checkpoint import atomic, run_folder
from lib.utils.errors import ABORTED, STOP_SIGNALS, UsageError, printable
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
BLOCK = 50 << 20  # bytes of a part of an upload
CHUNK = 1 << 20  # bytes
NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf"}  # stores that need none to be made
MANIFEST = re.compile(r"manifest\.(\d+)\.\w+\.json")
SIDE_FILES = (  # copied with each checkpoint, and at the run's end
    *("config.yaml", "start.json", "outcome.json", "eval.json", "metrics.jsonl", "wandb.json", "mlflow.json"),
    *("best/weights.safetensors", "final/weights.safetensors", "logs/*.log", "events.out.tfevents.*"),
)
OURS = re.compile(r"\.[0-9a-f]{12}$|^manifest\.[0-9]{9}\.[0-9a-f]{16}\.json$")  # names of what a mirror writes
OF_A_START = ("logs/", "events.out.tfevents.")  # each start writes its own: those on disk stay


class Damaged(Exception):
    """What is at a place, or on disk, differs from what was written there."""


class TakenOver(Exception):
    """Another start writes to the place now."""


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


def check_package(protocol: str, url: str) -> None:
    """Raise UsageError if there is no package for a protocol."""
    about = known_implementations.get(protocol, {})
    package = about.get("class", "").partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f"-mirror {url}: {protocol}:// needs a package: uv pip install {package}")
    try:
        _ = package or fsspec.get_filesystem_class(protocol)  # of another package, which says so itself
    except (ImportError, ValueError):
        raise UsageError(f"-mirror {url}: fsspec knows no {protocol}://") from None


def clean(error: object) -> str:
    """Return an error as one short line without passwords and signatures of URLs."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return printable(re.sub(r"//[^/\s]*@|\?\S+", "//", text))[:300]


def copy(source: IO[bytes], target: IO[bytes] | None, moved: Callable[[], None]) -> tuple[dict, set[str]]:
    """Copy a file, or only read it. Return its size and CRC-32, and its MD5 in the forms in which stores give it."""
    size = crc = 0
    whole, parts = hashlib.md5(usedforsecurity=False), []
    while data := source.read(CHUNK):
        if target:
            target.write(data)
        if size % BLOCK == 0:
            parts.append(hashlib.md5(usedforsecurity=False))
        size, crc = size + len(data), zlib.crc32(data, crc)
        whole.update(data)
        parts[-1].update(data)
        moved()
    joined = hashlib.md5(b"".join(part.digest() for part in parts), usedforsecurity=False).hexdigest()
    forms = {whole.hexdigest(), base64.b64encode(whole.digest()).decode(), f"{joined}-{len(parts)}"}
    return {"bytes": size, "crc32": crc}, forms


class Place:
    """URL/NAME: the objects of one run."""

    def __init__(self, url: str, name: str, moved: Callable[[], None] = lambda: None):
        protocol, self.url, self.moved = check(url), f"{url.rstrip('/')}/{name}", moved
        check_package(protocol, url)
        of_s3 = {"fixed_upload_size": True, "default_block_size": BLOCK} if protocol in ("s3", "s3a") else {}
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True, **of_s3}
        self.fs, root = fsspec.url_to_fs(url, **options)
        self.root = f"{str(root).rstrip('/')}/{name}"
        self.has_folders = protocol not in NO_FOLDERS

    def retry(self, action: Callable[[], Any]) -> Any:
        """Return what `action()` returns. Try again, with a limit, unless the error is one that stays."""
        damaged = False
        for pause in (*PAUSES_S, None):
            try:
                self.moved()
                return action()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:
                again = damaged and isinstance(error, Damaged)
                if pause is None or again or "Credentials" in type(error).__name__:
                    raise
                damaged |= isinstance(error, Damaged)  # on the way, perhaps: once more
                time.sleep(pause)
        return None

    def sizes(self) -> dict[str, int]:
        """Return the names of all objects, and their bytes."""

        def look() -> dict[str, int]:
            try:
                return {one["name"].rpartition("/")[2]: one["size"] for one in self.fs.ls(self.root, detail=True)}
            except FileNotFoundError:
                return {}

        return self.retry(look)

    def read(self, name: str) -> dict:
        """Return what a JSON object holds, {} if it is missing or holds no dict."""
        try:
            found = json.loads(self.retry(lambda: self.fs.cat_file(f"{self.root}/{name}")))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, value: dict) -> None:
        """Write a JSON object."""
        if self.has_folders:
            self.retry(lambda: self.fs.makedirs(self.root, exist_ok=True))
        self.retry(lambda: self.fs.pipe_file(f"{self.root}/{name}", json.dumps(value).encode()))

    def claim(self, run: str, **facts: str | None) -> None:
        """Write whose place this is."""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.write("owner.json", {"run": run, **facts, **who})

    def manifest(self, run: str) -> dict:
        """Return the newest manifest of a run, {} if there is none."""
        names = sorted((name for name in self.sizes() if MANIFEST.fullmatch(name)), reverse=True)
        good = (found for found in map(self.read, names) if found.get("run") == run and is_manifest(found))
        return next(good, {})

    def upload(self, path: str, source: IO[bytes]) -> dict:
        """Copy an open file to a new object, and verify it. Return its entry of the manifest."""

        def attempt() -> dict:
            source.seek(0)
            name = f"{path.replace('/', '.')}.{secrets.token_hex(6)}"
            with self.fs.open(f"{self.root}/{name}", "wb", block_size=BLOCK) as target:
                entry, forms = copy(source, target, self.moved)
            about = self.fs.info(f"{self.root}/{name}")
            if about["size"] != entry["bytes"]:
                raise Damaged(f"{path}: {about['size']} of {entry['bytes']} bytes arrived")
            if not forms & {str(about.get(key, "")).strip('"') for key in ("ETag", "etag", "md5Hash", "content_md5")}:
                with self.fs.open(f"{self.root}/{name}", "rb") as back:  # the store has no checksum that we know
                    if copy(back, None, self.moved)[0] != entry:
                        raise Damaged(f"{path}: its checksum is wrong after the copy")
            return {"object": name, **entry}

        return self.retry(attempt)

    def download(self, entry: dict, path: Path) -> None:
        """Copy an object to a new file, and sync it. Raises Damaged if it is missing, or not what was written."""

        def attempt() -> None:
            path.unlink(missing_ok=True)
            with self.fs.open(f"{self.root}/{entry['object']}", "rb") as source, path.open("xb") as target:
                found = copy(source, target, self.moved)[0]
            if found != {key: entry[key] for key in ("bytes", "crc32")}:
                raise Damaged(f"{self.url}/{entry['object']}: its size or checksum is wrong")
            atomic.fsync(path)

        try:
            self.retry(attempt)
        except FileNotFoundError as error:
            raise Damaged(f"{self.url}/{entry['object']} is missing") from error

    def remove(self, names: set[str]) -> None:
        """Remove objects that no manifest names."""
        for name in sorted(names, key=lambda name: not MANIFEST.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):
                self.retry(lambda: self.fs.rm_file(f"{self.root}/{name}"))  # noqa: B023


def is_manifest(found: dict) -> bool:
    """Return whether a manifest names files inside a run's folder, their objects, sizes and checksums."""
    entries = found.get("files")
    return isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and (path.startswith("checkpoints/") or any(Path(path).match(pattern) for pattern in SIDE_FILES))
        and re.fullmatch(r"(checkpoints/\w+/)?(\w+/)?[\w.-]*\w", path)
        and re.fullmatch(r"[\w.-]*\w", str(entry.get("object")))
        and type(entry.get("bytes")) is type(entry.get("crc32")) is int
        for path, entry in entries.items()
    )


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
        self.entries: dict[str, dict] | None = None  # of the newest manifest there; None: not yet known
        self.generation = 0
        self.stats: dict[str, tuple] = {}  # of each side file when it was copied
        self.sums: dict[tuple, int] = {}  # of each checkpoint's manifest on disk
        self.damaged: set[str] = set()  # checkpoints on disk
        self.keep_last = yaml.safe_load(files.read_bytes(folder / "config.yaml")).get("keep_last") or 2
        self.is_behind = False  # and has said so

    def claim(self) -> None:
        """Say at the place that this start writes there from now on, and read what is there."""
        self.place.claim(self.run, start=self.start, launch=self.launch)
        sizes, facts = self.place.sizes(), run_folder.read_json(self.folder / "mirror.json")
        numbers = [int(match[1]) for name in sizes if (match := MANIFEST.fullmatch(name))]
        self.generation = max(numbers, default=0)
        entries = self.place.manifest(self.run).get("files", {})
        damaged = facts.get("damaged") or ()
        lost = [
            path
            for path, one in entries.items()
            if one["object"] in damaged or sizes.get(one["object"]) != one["bytes"]
        ]
        folders = tuple(f"{path.rpartition('/')[0]}/" for path in lost if path.startswith("checkpoints/"))
        self.entries = {
            path: entry for path, entry in entries.items() if path not in lost and not path.startswith(folders or " ")
        }

    def sync(self, last: bool = False) -> bool:
        """Copy the newest checkpoint that is not there, if there is one. Return whether there was something to do.

        Files next to the checkpoints are copied with it, and at the `last`.
        """
        if self.entries is None:
            self.claim()
        name, began = self.next_checkpoint(), time.monotonic()
        if not name and not last:
            self.report()
            return False
        with contextlib.ExitStack() as stack:
            # All files of a checkpoint are open at once: it may be removed meanwhile, and is copied all the same.
            try:
                opened = self.open_files(name, stack) if name else {}
            except FileNotFoundError:
                return True
            sums = self.checksums(opened, name)
            entries = self.entries or {}
            lacking = [path for path in opened if path not in entries or entries[path]["crc32"] != sums[path]]
            new = {path: self.place.upload(path, opened[path]) for path in lacking}
            if bad := [path for path in new if new[path]["crc32"] != sums[path]]:
                self.damaged.add(name)
                log.warning("-mirror: %s is damaged on disk, and is not copied", self.folder / bad[0])
                return True
            # These after the checkpoint's: what a resume from it needs of them was written before it.
            stats, changed = self.open_changed(stack)
            new |= {path: self.place.upload(path, file) for path, file in changed.items()}
        if not new and not name:
            return False
        self.publish({**entries, **new})
        self.stats = stats
        if name:
            seconds, size = max(time.monotonic() - began, 1e-3), sum(entry["bytes"] for entry in new.values()) / 1e6
            figures = f"{size:.1f} MB in {seconds:.1f} s, {size / seconds:.1f} MB/s"
            log.info("-mirror:     %s is at %s (%s)", name, self.place.url, figures)
        self.report()
        return True

    def next_checkpoint(self) -> str:
        """Return the newest checkpoint that is not there as it is on disk, and is to be kept there; "" for none."""
        local = [one.name for one in run_folder.list_checkpoints(self.folder / "checkpoints")]
        kept = self.kept({*local, *checkpoints(self.entries or {})})
        lacking = (name for name in local if name in kept - self.damaged and not self.is_there(name))
        return next(lacking, "")

    def is_there(self, name: str) -> bool:
        """Return whether a checkpoint of the disk is there, with the same content."""
        path, entries = f"checkpoints/{name}", self.entries or {}
        file = self.folder / path / "manifest.json"
        try:
            about = file.stat()
            key = name, about.st_ino, about.st_size, about.st_mtime_ns
            if key not in self.sums:
                self.sums[key] = zlib.crc32(files.read_bytes(file))
        except OSError:
            return True  # it was just removed
        lacks_keep = (self.folder / path / "keep").exists() and f"{path}/keep" not in entries
        return entries.get(f"{path}/manifest.json", {}).get("crc32") == self.sums[key] and not lacks_keep

    def kept(self, names: set[str]) -> set[str]:
        """Return the checkpoints that stay there: -keep_last of them, and those with a file `keep`, here or there."""
        spared = {name for name in names if f"checkpoints/{name}/keep" in (self.entries or {})}
        spared |= {name for name in names if (self.folder / "checkpoints" / name / "keep").exists()}
        others = sorted(names - spared, key=run_folder.checkpoint_number, reverse=True)
        return spared | {*others[: self.keep_last]}

    def open_files(self, name: str, stack: contextlib.ExitStack) -> dict[str, IO[bytes]]:
        """Open all files of a checkpoint, by their path in the run's folder."""
        paths = [f"checkpoints/{name}/{one.name}" for one in sorted((self.folder / "checkpoints" / name).iterdir())]
        return {path: stack.enter_context(files.open_regular(self.folder / path, "rb")) for path in paths}

    def checksums(self, opened: dict[str, IO[bytes]], name: str) -> dict[str, int]:
        """Return the checksums of a checkpoint's files, as its own manifest has them."""
        if not name:
            return {}
        path = f"checkpoints/{name}/"
        data = opened[f"{path}manifest.json"].read()
        sums = {f"{path}{file}": about["crc32"] for file, about in json.loads(data)["shards"].items()}
        return {**sums, f"{path}manifest.json": zlib.crc32(data), f"{path}keep": 0}

    def open_changed(self, stack: contextlib.ExitStack) -> tuple[dict[str, tuple], dict[str, IO[bytes]]]:
        """Open the files next to the checkpoints that are not there as they are here.

        Also returns, for all of them, by what a change is noticed.
        """
        stats, changed = {}, {}
        for found in sorted(one for pattern in SIDE_FILES for one in self.folder.glob(pattern)):
            path = str(found.relative_to(self.folder))
            try:
                file = stack.enter_context(files.open_regular(found, "rb"))
            except OSError:  # replaced at this moment, or a link
                continue
            about, entry = os.fstat(file.fileno()), (self.entries or {}).get(path)
            stats[path] = about.st_ino, about.st_size, about.st_mtime_ns
            same = stats[path] == self.stats.get(path)
            if entry and not same and entry["bytes"] == about.st_size:  # of an earlier start
                same = copy(file, None, lambda: None)[0]["crc32"] == entry["crc32"]
            if not (entry and same):
                changed[path] = file
        return stats, changed

    def publish(self, entries: dict[str, dict]) -> None:
        """Write the manifest, and remove what it no longer names. Raises TakenOver if another start writes there."""
        kept = self.kept({*checkpoints(entries)})
        entries = {
            path: entry
            for path, entry in entries.items()
            if not path.startswith("checkpoints/") or path.split("/")[1] in kept
        }
        if (owner := self.place.read("owner.json")).get("start") != self.start:
            raise TakenOver(
                f"host {owner.get('host')}, since {owner.get('since')}" if owner else "owner.json is gone"
            )
        name = f"manifest.{self.generation + 1:09d}.{self.start}.json"
        manifest = {"run": self.run, "launch": self.launch, "files": entries}
        self.place.write(name, manifest)
        if self.place.read(name) != manifest:
            raise Damaged(f"{self.place.url}/{name} is not what was written")
        self.generation, self.entries = self.generation + 1, entries
        ours = {one for one in self.place.sizes() if OURS.search(one)}  # others may keep files of theirs there
        self.place.remove(ours - {name} - {one["object"] for one in entries.values()})

    def report(self) -> None:
        """Write mirror.json, from which scripts/status.py knows how far the copy is; say if it falls behind."""
        there = checkpoints(self.entries or {})[:1]
        local = [one.name for one in run_folder.list_checkpoints(self.folder / "checkpoints")]
        newer = [
            one for one in local if run_folder.checkpoint_number(one) > run_folder.checkpoint_number("".join(there))
        ]
        here, copied = (int("".join(one[:1]).rpartition("_")[2] or 0) for one in (local, there))
        facts = {"run": self.run, "url": self.place.url, "step": copied, "behind": max(0, here - copied)}
        write_facts(self.folder, facts)
        if len(newer) > 1 and not self.is_behind:
            log.warning("-mirror: %d checkpoints behind: saves come faster than they can be copied", len(newer))
        self.is_behind = len(newer) > 1

    def follow(self, parent: int) -> int:
        """Copy until the run has ended and all is there. Returns the exit code."""
        failures, told, pause = 0, False, INTERVAL_S
        while True:
            if not told and select.select([0], [], [], pause)[0]:
                told = True
            elif told and failures:
                time.sleep(pause)
            is_gone = os.getppid() != parent
            ended = told or is_gone
            try:
                more = self.sync(last=ended)
                failures, pause = 0, INTERVAL_S
            except TakenOver as error:
                text = (
                    "-mirror: another run or start (%s) copies to %s now: nothing more is copied from here; stop one"
                )
                log.error(text, error, self.place.url)
                return 1
            except Exception as error:
                failures, pause, more = failures + 1, min(RETRY_S, 2.0**failures), True
                if ended and failures > LAST:
                    more = "the next start, or scripts/mirror.py, tries again"
                    log.error("-mirror: the last state is not at %s (%s): %s", self.place.url, clean(error), more)
                    return 1
                if failures == 1:
                    text = "-mirror: not copied to %s (%s): tried again at most every %.0f s; training continues"
                    log.warning(text, self.place.url, clean(error), RETRY_S)
            if ended and not more:
                break
        with contextlib.suppress(OSError):
            os.write(0, b"done")
        until = time.monotonic() + RETRY_S
        while os.getppid() == parent and time.monotonic() < until:  # it writes outcome.json if it fails
            time.sleep(INTERVAL_S / 10)
        self.sync(last=True)
        return 0


def write_facts(folder: Path, facts: dict) -> None:
    """Write mirror.json: which run this is, and how far its copy is."""
    path = folder / "mirror.json"
    if run_folder.read_json(path) == facts:
        return
    partial = path.with_suffix(".new")  # the run removes files that end in .partial
    partial.unlink(missing_ok=True)
    with partial.open("x") as file:
        file.write(json.dumps(facts))
    partial.replace(path)


@contextlib.contextmanager
def only_one(folder: Path, wait: bool) -> Iterator[None]:
    """Keep other processes on this machine from copying the folder in the block. Raises UsageError, or waits."""
    with files.open_regular(folder / "logs" / "rank_0.log", "r+b") as file:  # which no start replaces
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UsageError(f"{folder} is being copied already, by its run") from None
        except OSError:  # a file system without locks
            pass
        yield


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


def fetch(place: Place, folder: Path, run: str, *, above: int, most: int | None = None) -> dict[str, list[str]]:
    """Fetch the newest good checkpoints whose numbers are `above`, and what a resume needs besides.

    Returns "lines" for the log, and which objects are "damaged". Raises UsageError if there are some checkpoints,
    none is good, and there is none on disk.
    """
    entries, lines, fetched, began = place.manifest(run).get("files", {}), [], [], time.monotonic()
    damaged: list[str] = []
    place_of = folder / "checkpoints"
    for name in [one for one in checkpoints(entries) if run_folder.checkpoint_number(one) > above]:
        if len(fetched) == most:
            break
        partial = place_of / f"{name}.partial"
        atomic.sweep(place_of, name)
        partial.mkdir(parents=True)
        mine = {path: entry for path, entry in entries.items() if path.startswith(f"checkpoints/{name}/")}
        try:
            for path, entry in mine.items():
                place.download(entry, partial / Path(path).name)
        except Damaged as error:
            damaged.append(entry["object"])
            lines.append(f"{error}; an older checkpoint is taken")
            atomic.sweep(place_of, name)
            continue
        fetched.append(name)
    if lines and not fetched and not above:
        with contextlib.suppress(OSError):
            place_of.rmdir()
        raise UsageError(
            f"-mirror: {lines[0].partition(';')[0]}; no good checkpoint is left: -reset starts from scratch"
        )
    for path, entry in entries.items() if fetched else ():
        target = folder / path
        if path.startswith("checkpoints/") or (path.startswith(OF_A_START) and target.exists()):
            continue
        target.parent.mkdir(exist_ok=True)
        try:
            with atomic.new_version(target) as partial:
                place.download(entry, partial)
        except Damaged as error:
            damaged.append(entry["object"])
            lines.append(f"{error}; it is left out")
    for name in reversed(fetched):  # last: a resume finds all that belongs to it
        if (place_of / name).exists():
            atomic.remove_folder(place_of / name)
        place.moved()
        atomic.publish(place_of / f"{name}.partial", place_of / name)
        size = sum(entry["bytes"] for path, entry in entries.items() if path.startswith(f"checkpoints/{name}/"))
        lines.append(f"fetched {name} from {place.url} ({size / 1e6:.1f} MB)")
    if fetched:
        lines.append(f"fetched in {time.monotonic() - began:.1f} s")
    return {"lines": lines, "damaged": damaged}


class Mirror:
    """The mirror of a run, as its processes see it. It is reached by processes of its own alone."""

    def __init__(self, args: Args, world: World):
        """Find out whether the place is this run's, and fetch a newer checkpoint from there. All ranks call this.

        Raises UsageError if the place belongs to another run, or may not be read.
        """
        from lib.utils import distributed, watchdog

        self.args, self.world, self.folder = args, world, run_folder.path_of(args)
        reset = run_folder.is_reset_due(args, world)
        watchdog.begin(f"looking for a copy of the run at -mirror {args.mirror}")
        known = world.on_writers(lambda: {"run": None, "number": 0} if reset else local_facts(self.folder))
        order, process, text = {"known": known, "launch": world.launch, "reset": reset}, None, b""
        if world.is_main:
            command = [sys.executable, __file__, args.mirror, str(self.folder), "-order", json.dumps(order)]
            command += ["-parent", str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        moves, busy = 0.0, 1.0
        while busy:  # votes keep the other ranks' collectives from timing out
            mine, before = 0.0, moves
            if process and process.stdout:
                ready = select.select([process.stdout], [], [], 0.2)[0]
                data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
                text, mine = text + data, float(bool(data) or not ready)
            busy, moves = distributed.all_reduce_max([mine, float(len(text))], world)
            if moves > before:
                watchdog.moved()
        answer = {}
        if process:
            process.wait()
            answer = last_line(text)
        answer = distributed.broadcast(answer, world)
        if "usage" in answer:
            raise UsageError(answer["usage"])
        if "run" not in answer:
            raise OSError(answer.get("error", f"-mirror {args.mirror}: scripts/mirror.py ended without an answer"))
        self.lines = answer["lines"]
        self.facts = {"run": answer["run"], "damaged": answer["damaged"]}
        self.process: subprocess.Popen | None = None

    def start(self) -> Mirror:
        """Start copying, on rank 0, once the run's folder is its own."""
        if self.world.is_writer:
            write_facts(self.folder, {**run_folder.read_json(self.folder / "mirror.json"), **self.facts})
        if self.world.is_main:
            for line in self.lines:
                log.log(logging.INFO if line.startswith("fetched") else logging.WARNING, "-mirror:     %s", line)
            self.pipe, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(self.folder), self.args.mirror, "-parent", str(os.getpid())]
            self.process = subprocess.Popen(command, stdin=theirs, start_new_session=True)  # Ctrl-C is the run's
            theirs.close()
        return self

    def close(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait until all is copied, for -grace_s at most: the end of a job or a container may end the copy, too."""
        from lib.utils import watchdog

        if not self.process:
            return
        seconds = FAILED_S if error else min(self.args.grace_s, 30 * self.args.hang_minutes)
        watchdog.begin("copying the last state to -mirror")
        with contextlib.suppress(OSError):
            self.pipe.shutdown(socket.SHUT_WR)
        until = time.monotonic() + seconds
        while not (answered := select.select([self.pipe], [], [], INTERVAL_S)[0]) and time.monotonic() < until:
            watchdog.moved()
        if not answered:
            text = f"not all is copied after {seconds:g} s: it goes on, unless a job or container ends now"
            log.warning("-mirror: %s; the next start, or scripts/mirror.py, copies the rest", text)
        self.pipe.close()


def last_line(text: bytes) -> dict:
    """Return the JSON in the last line of what a process has written, {} if there is none."""
    with contextlib.suppress(ValueError):
        return json.loads(text.split(b"\n")[-1])
    return {}


def answer_order(url: str, folder: Path, order: dict, parent: int) -> dict:
    """Do what a run's start needs: return the run's id and what was fetched, or why there is none."""
    said = 0.0

    def moved() -> None:
        nonlocal said
        if os.getppid() != parent:
            os._exit(1)  # the start was killed: the folder may be another one's now
        if time.monotonic() - said > 1:
            said = time.monotonic()
            print(flush=True)  # a sign of life

    try:
        place = Place(url, folder.name, moved)
        owner, above = place.read("owner.json"), max(one["number"] for one in order["known"])
        if order["reset"] and owner and owner.get("launch") != order["launch"]:  # this launch has not reset it yet
            return {"run": secrets.token_hex(16), "lines": [], "damaged": []}
        run = choose_run(place, owner, order["known"])
        if not owner:  # a place that may not be written is known now
            place.claim(run, launch=order["launch"])
        found = fetch(place, folder, run, above=above, most=1)
        if owner and not above and not found["lines"]:
            since = printable(f"a start of this run on {owner.get('host')}, since {owner.get('since')}")
            found["lines"] = [f"{place.url} has no checkpoint yet of {since}: if it still runs, stop one of the two"]
        return {"run": run, **found}
    except UsageError as error:
        return {"usage": str(error)}
    except Exception as error:
        text = f"-mirror {url}: cannot be used ({clean(error)})"
        lasts = isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__
        runs = [one["run"] for one in order["known"] if one["run"] and one["number"]]
        if runs and not lasts:
            return {"run": min(runs), "lines": [f"{text[8:]}: the run continues from its own disk"], "damaged": []}
        return {"usage" if lasts else "error": text}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a run's folder, as out/NAME, or URL")
    parser.add_argument("target", help="URL, or the folder")
    parser.add_argument("-parent", type=int, help="process of the run that goes on: follow it")
    parser.add_argument("-order", type=json.loads, help="what a run that starts wants to know")
    args = parser.parse_args(argv)
    fetches = "://" in args.source
    url, folder = (args.source, args.target) if fetches else (args.target, args.source)
    folder = Path(folder)
    if args.order:
        print(json.dumps(answer_order(url, folder, args.order, args.parent)), end="", flush=True)
        return 0
    console.setup_logging(folder if args.parent else None, rank=0)
    try:
        if args.parent:
            os.nice(10)
            for number in STOP_SIGNALS:  # Slurm sends them to all processes of a job
                signal.signal(number, signal.SIG_IGN)
            with only_one(folder, wait=True):
                run = run_folder.read_json(folder / "mirror.json")["run"]
                return Follower(folder, Place(url, folder.name), run).follow(args.parent)
        return (fetch_by_hand if fetches else copy_by_hand)(url, folder)
    except UsageError as error:
        parser.exit(2, f"mirror.py: {error}\n")
    except KeyboardInterrupt:
        return ABORTED
    except Exception as error:
        log.error("mirror.py: %s", clean(error))
        return 1


def copy_by_hand(url: str, folder: Path) -> int:
    """Copy a run once. Returns the exit code."""
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{folder} is no run's folder")
    with only_one(folder, wait=False):
        place = Place(url, folder.name)
        follower = Follower(folder, place, choose_run(place, place.read("owner.json"), [local_facts(folder)]))
        write_facts(folder, {**run_folder.read_json(folder / "mirror.json"), "run": follower.run})
        while follower.sync(last=True):
            pass
    print(f"{folder} is at {place.url}")
    return 0


def fetch_by_hand(url: str, folder: Path) -> int:
    """Fetch all of a run that is newer than what the folder has. Returns the exit code."""
    place, here = Place(url, folder.name), local_facts(folder)
    if reading.is_locked(folder):
        raise UsageError(f"{folder} is in use by a run")
    if not (owner := place.read("owner.json")):
        raise UsageError(f"{place.url} has no run: URL is what -mirror was, without the run's name")
    run = choose_run(place, owner, [here])
    lines = fetch(place, folder, run, above=here["number"])["lines"]
    write_facts(folder, {**run_folder.read_json(folder / "mirror.json"), "run": run})
    print("\n".join(lines) or f"{place.url} has nothing that {folder} lacks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
