"""Checkpoints: whole or absent, written behind the run's back, and without pickle.

A checkpoint is a folder step_NNNNNNNN with one safetensors file a rank and manifest.json, which holds the state,
what was asked, and the size and checksum of every file. It is written as step_NNNNNNNN.partial, synced, and renamed.
"""

import concurrent.futures
import json
import logging
import shutil
import stat
import time
import zlib
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.checkpoint import atomic, shards, shared_disk, staging, stored
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
FORMAT = 2
SEAL = b',\n"crc32": %d\n}\n'  # the end of every manifest, whatever its format: the checksum of all before it
LONGEST = 1 << 30  # bytes of a manifest
FAILURES = 3  # saves in a row that may fail before the run ends
WAIT_S = 0.2  # between votes while all ranks wait for a save: a slow disk is no reason to take one for dead


class SaveError(RuntimeError):
    """Checkpoints cannot be written; the run ends rather than go on without."""


class Every:
    """When a save is due: every so many epochs, optimizer steps, or minutes."""

    def __init__(self, text: str):
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        self.number, self.unit = int(number), (text[len(number) :] or "epochs")[:4]
        self.since = time.monotonic()

    def epoch_due(self, epoch: int) -> bool:
        return self.unit == "epoc" and epoch % self.number == 0

    def step_due(self, step: int) -> bool:
        return self.unit == "step" and step % self.number == 0

    def minutes_due(self) -> bool:
        """This process's clock; the ranks take rank 0's word, in the vote."""
        return self.unit == "min" and time.monotonic() - self.since >= self.number * 60

    def saved(self):
        """Starts the minutes anew."""
        self.since = time.monotonic()


class Checkpoints:
    """The checkpoints of a run. All ranks call its methods at the same steps, but for `staged` and `writing`."""

    def __init__(self, folder: Path, world: World, *, keep_last: int = 2, strict: bool = False):
        self.folder, self.world, self.disk = folder, world, shared_disk.one(world)
        self.keep_last, self.strict, self.failures = keep_last, strict, 0
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self.copies = staging.Copies(world.device)
        self.job = None  # this rank's part of the save in flight
        self.phase = None  # of the save in flight: None, "writing", "publishing"
        self.lock = stored.lock_id(folder.parent)  # of the run whose checkpoints they are

    def open(self):
        """Finds out which ranks share the folder, and removes what crashes left there. For the run's owner, first of
        all."""
        self.disk = shared_disk.look(self.folder, self.world)
        self.disk.do(self._sweep)

    def check_room(self, tensors: dict):
        """Raises UsageError where a checkpoint of these tensors could never be written."""
        schema(tensors)
        out, size = self.folder.parent.parent, shards.total_bytes(tensors)
        if len(self.disk.groups) > 1 and any(isinstance(tensor, shards.DTensor) for tensor in tensors.values()):
            raise UsageError(f"-out {out}: a sharded model needs a folder that all nodes share")
        free, there = min(
            self.disk.do(lambda: [shared_disk.free_bytes(self.folder), len(stored.listed(self.folder))])
        )
        if free < size:
            raise UsageError(f"-out {out}: a checkpoint takes {size:,} bytes, and {free:,} are free; make room, or "
                             f"take another disk")  # fmt: skip
        more = size * (self.keep_last + 1 - min(there, self.keep_last))
        if free < more and self.world.is_main:
            log.warning("%s: -keep_last %d and one being written may take %s bytes more, and %s are free",
                        self.folder, self.keep_last, f"{more:,}", f"{free:,}")  # fmt: skip

    def save(self, tensors: dict, facts: dict, *, step: int, early: set, keep: bool = False):
        """Begins a checkpoint of these live tensors; `facts` (JSON) joins its manifest, `keep` spares it from
        removal.

        Returns at once. The tensors named in `early` may change as soon as this returns, the others after `staged`;
        of an early one that is not the same on all ranks, the first rank's is saved. A save that is still
        in flight is waited for. Raises SaveError when saving fails for good.
        """
        self.finish()
        self.facts = {**json.loads(json.dumps(facts)), "tensors": schema(tensors)}  # as they are now
        self.name = stored.named(step, [0, 0], keep)
        try:
            self.name = stored.named(step, max(self.disk.do(lambda: stored.following(self.folder, step))), keep)
            self.disk.do(self._make_room)
        except OSError as error:
            self._failed(f"{error}, {shared_disk.free_there(self.folder)}")
            return
        whole = {name: tensors[name] for name in sorted(early) if not isinstance(tensors[name], shards.DTensor)}
        mine = shards.pieces(tensors, self.disk.share, {*distributed.differing(whole, self.world)})
        mine = [piece._replace(values=piece.values.clone()) if piece.name in early else piece for piece in mine]
        self.copies.ask()
        self.phase = "writing" if self.world.size > 1 else "publishing"
        self.job = self.thread.submit(self._write, mine)

    def staged(self):
        """Returns once the weights may change: their copy is made, or in the device's queue before what comes
        next."""
        self.copies.wait()

    def writing(self) -> bool:
        """Whether this rank is at work on a save; any thread may ask."""
        job = self.job
        return job is not None and not job.done()

    def poll(self):
        """Moves the save in flight on, once every rank is ready for it. Raises SaveError when saving fails for
        good."""
        if self.phase is None:
            return
        pending = torch.tensor([float(self.writing())])
        if distributed.max_(pending, self.world).item():
            return
        answers = distributed.gather_json(self._answer(), self.world)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._failed(errors[0])
        elif self.phase == "writing":
            ours = [answers[rank] for rank in self.disk.ranks]
            self.job = self.thread.submit(self._publish, ours) if self.disk.leads else None
            self.phase = "publishing"
        else:
            self.phase, self.job, self.failures = None, None, 0

    def finish(self):
        """Waits until nothing is in flight. Raises SaveError when saving fails for good."""
        while self.phase:
            concurrent.futures.wait([self.job] if self.job else [], WAIT_S)
            self.poll()

    def newest(self) -> Path | None:
        """The checkpoint that was published last."""
        return stored.newest(self.folder)

    def close(self):
        """Waits for what is in flight and ends the writing thread. Raises SaveError if the last save failed."""
        self.finish()
        self.thread.shutdown()
        if self.failures:
            raise SaveError(f"{self.folder}: the last state could not be saved; the one before it is good")

    def _sweep(self):
        """What kills left in the run's folder, and the folder itself, on disk before anything in it."""
        run = self.folder.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, run, run / "best", run / "final"):
            if folder.is_dir():
                atomic.sweep(folder)
        atomic.fsync_folder(run)
        atomic.fsync_folder(run.parent)

    def _make_room(self):
        if not stored.has_lock(self.folder.parent, self.lock):
            raise FileNotFoundError(f"{self.folder.parent} is no longer the folder of this run")
        if not self.folder.is_dir():  # somebody removed it
            self._sweep()
        partial = self.folder / f"{self.name}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()

    def _write(self, mine):
        pieces = [[piece.name, list(piece.start), list(piece.values.shape)] for piece in mine]
        blocks, file = self.copies.make(mine), f"shard_{self.world.rank:04d}.safetensors"
        mine.clear()  # clones need no memory while the disk is busy
        facts = shards.write(self.folder / f"{self.name}.partial" / file, blocks)
        answer = {"file": file, **facts, "pieces": pieces}
        if self.world.size == 1:
            self._publish([answer])
        return answer

    def _answer(self):
        error = self.job and self.job.exception()
        if error:
            told = f"{type(error).__name__}: {error}, {shared_disk.free_there(self.folder)}"
            return {"error": f"rank {self.world.rank}: {told}"}
        return (self.job.result() if self.job else None) or {}

    def _publish(self, answers):
        partial, final = self.folder / f"{self.name}.partial", self.folder / self.name
        table = {}
        for answer in answers:
            for name, start, shape in answer["pieces"]:
                table.setdefault(name, []).append([answer["file"], start, shape])
        files = {answer["file"]: {"bytes": answer["bytes"], "crc32": answer["crc32"]} for answer in answers}
        manifest = {"format": FORMAT, **self.facts, "shards": files, "pieces": table}
        atomic.write_file(partial / "manifest.json", sealed(manifest))
        atomic.publish(partial, final)
        try:
            atomic.swap_link(self.folder / "latest", final.name)
            passing = [folder for folder in stored.listed(self.folder) if not folder.name.endswith("_keep")]
            for folder in passing[self.keep_last :]:
                atomic.remove_folder(folder)
        except OSError as error:
            log.warning("%s is saved, but older ones could not be tidied up (%s)", final, error)

    def _failed(self, reason):
        self.phase, self.job = None, None
        self.failures += 1
        if self.disk.leads:
            shutil.rmtree(self.folder / f"{self.name}.partial", ignore_errors=True)
        text = f"{self.folder / self.name} could not be saved ({reason})"
        if self.strict:
            raise SaveError(f"{text}, and -save_strict is on")
        if self.failures >= FAILURES:
            raise SaveError(f"{text}, nor could the {FAILURES - 1} before it")
        log.warning("%s: the run goes on, the older checkpoint is good, the next save tries again", text)


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint.

    Raises Damaged where it is missing, not what was written or makes no sense, UsageError for one of another format,
    OSError where it cannot be read.
    """
    path = folder / "manifest.json"
    try:
        file = path.stat()
        if not stat.S_ISREG(file.st_mode) or file.st_size > LONGEST:
            raise shards.Damaged(f"{path}: is no file of a sensible size")
        data = path.read_bytes()
        manifest = json.loads(data)
    except OSError as error:
        if error.errno not in stored.MISSING:
            raise
        raise shards.Damaged(f"{path}: is missing ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise shards.Damaged(f"{path}: cannot be read ({error})") from None
    body = data.rpartition(SEAL[:10])[0]
    if not isinstance(manifest, dict) or data != body + SEAL % zlib.crc32(body):
        raise shards.Damaged(f"{path}: its checksum does not hold")
    if manifest.get("format") != FORMAT:
        about = manifest.get("about")
        writer = about.get("git") if isinstance(about, dict) else None
        raise UsageError(f"{path}: is of format {manifest.get('format')}, written by version {writer}; this code "
                         f"reads format {FORMAT}: take that version, or -reset")  # fmt: skip
    shards.check(folder, manifest)
    return manifest


def schema(tensors: dict) -> dict[str, list]:
    """The type and shape of every tensor, as JSON has it. Raises UsageError for a type that safetensors lacks."""
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in shards.DTYPES]
    if odd:
        raise UsageError(f"{odd[0]} is of {tensors[odd[0]].dtype}, which a checkpoint cannot hold: use another type, "
                         f"or a buffer with persistent=False")  # fmt: skip
    return {name: [shards.DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}


def sealed(manifest: dict) -> bytes:
    """A manifest as it is written: a line for each entry, the checksum in the last."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + SEAL % zlib.crc32(body)
