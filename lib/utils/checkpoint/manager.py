"""Saves checkpoints: whole or absent, written in the background, and without pickle.

A checkpoint is a folder 000042_step_1200: a running number and the optimizer step. It holds one safetensors file a
rank, and manifest.json with the state, the flags, and the size and checksum of every file. It is written as
NAME.partial, synced, and renamed. A file `keep` in it spares it from removal.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, shards, shared_disk, staging, weights
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
FORMAT = 3
SEAL = b',\n"crc32": %d\n}\n'  # the end of every manifest, whatever its format: the checksum of all before it
EVERY = re.compile(r"(\d+)(epoch|step|min)?")  # the value of -save_every, which was checked
FAILURES = 3  # saves in a row that may fail before the run ends
WAIT_S = 0.2  # between votes while all ranks wait for a save: a slow disk is no reason to take one for dead


class SaveError(RuntimeError):
    """Checkpoints cannot be written; the run ends rather than continue without."""


class Every:
    """When a save is due: every so many epochs, optimizer steps, or minutes."""

    def __init__(self, text: str):
        number, unit = EVERY.findall(text)[0]
        self.number, self.unit = int(number), unit or "epoch"
        self.since = time.monotonic()

    def epoch_due(self, epoch: int) -> bool:
        """Whether a save is due after this many epochs."""
        return self.unit == "epoch" and epoch % self.number == 0

    def step_due(self, step: int) -> bool:
        """Whether a save is due after this many steps."""
        return self.unit == "step" and step % self.number == 0

    def minutes_due(self) -> bool:
        """Whether a save is due by this process's clock; the ranks take rank 0's word, in the vote."""
        return self.unit == "min" and time.monotonic() - self.since >= self.number * 60

    def saved(self):
        """Count the minutes from now."""
        self.since = time.monotonic()


@dataclass
class Save:
    """A save in flight: first every rank writes its file, then the first rank of each disk publishes the folder."""

    name: str
    facts: dict  # what joins the manifest
    keep: bool
    job: concurrent.futures.Future | None = None  # this rank's part
    written: bool = False  # by all ranks


class Checkpoints:
    """The checkpoints of a run. All ranks call its methods at the same steps, but for `writing`."""

    def __init__(self, folder: Path, world: World, *, keep_last: int = 2):
        self.folder, self.world, self.disk, self.keep_last = folder, world, shared_disk.one(world), keep_last
        self.owned = run_folder.owner_check(folder.parent)
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint", _give_way, (world.device,))
        self.copies = staging.Copies()
        self.saving: Save | None = None
        self.failures = 0  # in a row
        self.best: dict | None = None  # the best weights, until the thread has written them
        self.best_job: concurrent.futures.Future | None = None  # the last one since the last save began

    def open(self):
        """Find out which ranks share the folder, and remove what crashes left there. Call it before all else."""
        self.disk = shared_disk.look(self.folder, self.world)
        self.disk.do(self._sweep)

    def make_room(self, tensors: dict, first: set):
        """Take the memory that saves of these tensors need; arguments as `save` has them.

        Raises:
            UsageError: a checkpoint of these tensors could never be written.
        """
        schema(tensors)
        out, size = self.folder.parent.parent, shards.total_bytes(tensors)
        if len(self.disk.groups) > 1 and any(map(shards.is_sharded, tensors.values())):
            raise UsageError(f"-out {out}: a sharded model needs a folder that all nodes share")
        free = min(self.disk.do(lambda: run_folder.free_bytes(self.folder)))
        if free < size:
            raise UsageError(f"-out {out}: a checkpoint takes {size:,} bytes, and {free:,} are free; make room")
        self.copies.make_room(shards.pieces(tensors, self.disk.share, first))

    def save(self, tensors: dict, facts: dict, *, step: int, first: set, keep: bool = False):
        """Begin a checkpoint: copy the tensors, and write the copies in the background.

        The tensors may change as soon as this returns. A save that is still in flight is waited for.

        Args:
            tensors: the live tensors by name.
            facts: entries of the manifest (JSON), which must not change later.
            step: the optimizer step, for the name.
            first: names of tensors that may differ between ranks: the first rank's are saved.
            keep: spare it from removal.

        Raises:
            SaveError: saving fails for good.
            OSError: the run's folder is gone.
        """
        self.finish()
        self.check_folder()
        save = Save(f"step_{step}", {**facts, "tensors": schema(tensors)}, keep)
        try:
            newest = self.disk.do(lambda: str(run_folder.newest(self.folder) or ""))
            last = max(run_folder.number(Path(path).name) for path in newest)
            save.name = f"{last + 1:06d}_step_{step}"
            self.disk.do(lambda: self._make_partial(save))
        except OSError as error:
            self._fail(save, f"{error}, {run_folder.free_there(self.folder)}")
            return
        mine = shards.pieces(tensors, self.disk.share, first)
        starts = {piece.name: list(piece.start) for piece in mine if any(piece.start)}
        save.job = self.thread.submit(self._write, save, self.copies.make(mine), starts)
        self.saving, self.best_job = save, None

    def write_best(self, tensors: dict):
        """Write best/weights.safetensors in the background, from whole tensors on rank 0's CPU that stay as they are.

        The checkpoints that follow name them: none is published before they are written. Weights that wait for a slow
        disk when better ones come are not written, so that they do not fill the memory.
        """
        self.check_folder()
        if self.world.is_main:
            if self.best_job:
                self.best_job.cancel()  # unless it has begun
            self.best_job = self.thread.submit(self._write_best, tensors)

    def writing(self) -> bool:
        """Whether this rank is at work on a save; any thread may ask."""
        save = self.saving
        return save is not None and save.job is not None and not save.job.done()

    def poll(self):
        """Move the save in flight on, once every rank is ready. Raises SaveError when saving fails for good."""
        save = self.saving
        if save is None or distributed.largest([float(self.writing())], self.world)[0]:
            return
        answers = distributed.gather_json(self._answer(save), self.world)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._fail(save, errors[0])
        elif save.written:
            self.saving, self.failures = None, 0
        else:
            save.written = True
            ours = [answers[rank] for rank in self.disk.ranks]
            save.job = self.thread.submit(self._publish, save, ours) if self.disk.leads else None

    def finish(self):
        """Wait until nothing is in flight. Raises SaveError when saving fails for good."""
        while self.saving:
            concurrent.futures.wait([self.saving.job] if self.saving.job else [], WAIT_S)
            self.poll()

    def check_folder(self):
        """Raise OSError on all ranks if the run's folder is gone."""

        def check():
            if not self.owned():
                fault = f"{self.folder.parent} was removed, moved or unmounted while the run wrote there"
                raise OSError(f"{fault}. Another run may have its place by now, so this one ends")

        distributed.together(check, self.world)

    def close(self):
        """Wait for what is in flight and end the writing thread. Raises SaveError if the last save failed."""
        self.finish()
        self.thread.shutdown()
        if self.failures:
            raise SaveError(f"{self.folder}: the last state could not be saved; the one before it is good")

    def _sweep(self):
        """Remove what kills left in the run's folder; sync the folder itself before anything is in it."""
        run = self.folder.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, run, run / "best", run / "final"):
            if folder.is_dir():
                atomic.sweep(folder)
        atomic.fsync_folder(run)
        atomic.fsync_folder(run.parent)

    def _partial(self, save):
        return self.folder / f"{save.name}.partial"

    def _make_partial(self, save):
        if not self.folder.is_dir():  # somebody removed it
            self._sweep()
        shutil.rmtree(self._partial(save), ignore_errors=True)
        self._partial(save).mkdir()
        if save.keep:
            (self._partial(save) / "keep").touch()

    def _write_best(self, tensors=None):
        self.best = tensors or self.best
        if self.best:
            weights.write(self.folder.parent / "best", self.best)  # if it fails, the next save tries again
            self.best = None

    def _write(self, save, blocks, starts):
        self.copies.wait()
        self._write_best()
        file = shards.file_of(self.world.rank)
        return {file: shards.write(self._partial(save) / file, blocks, starts)}

    def _answer(self, save):
        if save.job is None:
            return {}
        if error := save.job.exception():
            text = f"{type(error).__name__}: {error}, {run_folder.free_there(self.folder)}"
            return {"error": f"rank {self.world.rank}: {text}"}
        return save.job.result() or {}

    def _publish(self, save, answers):
        files = {file: written for answer in answers for file, written in answer.items()}
        manifest = {"format": FORMAT, **save.facts, "shards": files}
        atomic.write_file(self._partial(save) / "manifest.json", sealed(manifest))
        atomic.publish(self._partial(save), self.folder / save.name)
        try:
            atomic.swap_link(self.folder / "latest", save.name)
            passing = [folder for folder in run_folder.listed(self.folder) if not (folder / "keep").exists()]
            for folder in passing[self.keep_last :]:
                atomic.remove_folder(folder)
        except OSError as error:
            log.warning("%s is saved, but older ones could not be removed (%s)", self.folder / save.name, error)

    def _fail(self, save, reason):
        self.saving = None
        self.failures += 1
        if self.disk.leads:
            shutil.rmtree(self._partial(save), ignore_errors=True)
        text = f"{self.folder / save.name} could not be saved ({reason})"
        if self.failures >= FAILURES:
            raise SaveError(f"{text}, nor could the {FAILURES - 1} before it")
        log.warning("%s: the run goes on, the older checkpoint is good, the next save tries again", text)


def _give_way(device: torch.device):
    """Let this thread use only what others leave of the cores, and no memory of another GPU than its own."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises:
        Damaged: it is missing, not what was written, or makes no sense.
        UsageError: it is of another format.
        OSError: it cannot be read.
    """
    path = folder / "manifest.json"
    try:
        data = path.read_bytes()
        manifest = json.loads(data)
    except OSError as error:
        if error.errno not in run_folder.MISSING:
            raise
        raise shards.Damaged(f"{path}: is missing ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise shards.Damaged(f"{path}: cannot be read ({error})") from None
    body = data.rpartition(SEAL[:10])[0]
    if not isinstance(manifest, dict) or data != body + SEAL % zlib.crc32(body):
        raise shards.Damaged(f"{path}: its checksum does not hold")
    if manifest.get("format") != FORMAT:
        other = f"is of format {manifest.get('format')}, written by {manifest.get('about')}"
        raise UsageError(f"{path}: {other}; this code reads format {FORMAT}: take that version, or -reset")
    return manifest


def schema(tensors: dict) -> dict[str, list]:
    """Return the type and shape of every tensor, as JSON has it. Raises UsageError for a type safetensors lacks."""
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in shards.DTYPES]
    if odd:
        hint = "use another type, or a buffer with persistent=False"
        raise UsageError(f"{odd[0]} is of {tensors[odd[0]].dtype}, which a checkpoint cannot hold: {hint}")
    return {name: [shards.DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}


def sealed(manifest: dict) -> bytes:
    """Return a manifest as it is written: a line for each entry, the checksum in the last."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + SEAL % zlib.crc32(body)
