"""Saves checkpoints: whole or absent, written in the background, and without pickle.

A checkpoint is a folder 000042_step_1200: a running number and the optimizer step. It holds one safetensors file a
rank, and manifest.json with the state, the flags, and the size and checksum of every file. It is written as
NAME.partial, synced, and renamed. A file `keep` in it spares it from removal.
"""

import concurrent.futures
import json
import logging
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, shards, shared_disk, staging
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
FORMAT = 2
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
    """The checkpoints of a run. All ranks call its methods at the same steps, but for `staged` and `writing`.

    `owned()`: whether the run's folder is still its own.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep_last: int = 2,
        strict: bool = False,
        owned: Callable[[], bool] = lambda: True,
    ):
        self.folder, self.world, self.disk = folder, world, shared_disk.one(world)
        self.keep_last, self.strict, self.owned = keep_last, strict, owned
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self.copies = staging.Copies(world.device)
        self.saving: Save | None = None
        self.failures = 0  # in a row

    def open(self):
        """Find out which ranks share the folder, and remove what crashes left there. Call it before all else."""
        self.disk = shared_disk.look(self.folder, self.world)
        self.disk.do(self._sweep)

    def check_room(self, tensors: dict):
        """Raise UsageError where a checkpoint of these tensors could never be written."""
        schema(tensors)
        shards.layout(tensors, self.disk.ranks)
        out, size = self.folder.parent.parent, shards.total_bytes(tensors)
        if len(self.disk.groups) > 1 and any(isinstance(tensor, shards.DTensor) for tensor in tensors.values()):
            raise UsageError(f"-out {out}: a sharded model needs a folder that all nodes share")
        free = min(self.disk.do(lambda: run_folder.free_bytes(self.folder)))
        if free < size:
            raise UsageError(f"-out {out}: a checkpoint takes {size:,} bytes, and {free:,} are free; make room")

    def save(self, tensors: dict, facts: dict, *, step: int, early: set, keep: bool = False):
        """Begin a checkpoint of these live tensors, and return at once.

        A save that is still in flight is waited for. A tensor that is not the same on all ranks though it should be,
        is saved as the first rank has it.

        Args:
            tensors: the live tensors by name.
            facts: entries of the manifest (JSON), which must not change later.
            step: the optimizer step, for the name.
            early: names of tensors that may change as soon as this returns; the others may after `staged`.
            keep: spare it from removal.

        Raises:
            SaveError: saving fails for good.
            OSError: the run's folder is gone.
        """
        self.finish()
        self.check_folder()
        save = Save(f"step_{step}", {**facts, "tensors": schema(tensors)}, keep)
        try:
            last = max(self.disk.do(lambda: run_folder.last_number(self.folder)))
            save.name = f"{last + 1:06d}_step_{step}"
            self.disk.do(lambda: self._make_partial(save))
        except OSError as error:
            self._fail(save, f"{error}, {run_folder.free_there(self.folder)}")
            return
        whole = {name: tensors[name] for name in sorted(early) if not isinstance(tensors[name], shards.DTensor)}
        first = {*shards.differing(whole, self.world)}
        save.facts["pieces"] = shards.layout(tensors, self.disk.ranks, first)
        mine = shards.pieces(tensors, self.disk.share, first)
        mine = [piece._replace(values=piece.values.clone()) if piece.name in early else piece for piece in mine]
        self.copies.request()
        save.job = self.thread.submit(self._write, save, mine)
        self.saving = save

    def staged(self):
        """Return once the weights may change: their copy is made, or in the device's queue before what follows."""
        self.copies.wait()

    def writing(self) -> bool:
        """Whether this rank is at work on a save; any thread may ask."""
        save = self.saving
        return save is not None and save.job is not None and not save.job.done()

    def poll(self):
        """Move the save in flight on, once every rank is ready. Raises SaveError when saving fails for good."""
        save = self.saving
        if save is None or distributed.max_(torch.tensor([float(self.writing())]), self.world).item():
            return
        try:
            written = distributed.attempt(lambda: self._result(save), self.world)
        except OSError as error:
            self._fail(save, str(error))
            return
        if save.written or self.world.size == 1:  # which publishes what it wrote at once
            self.saving, self.failures = None, 0
        else:
            save.written = True
            facts = torch.zeros(self.world.size, 2, dtype=torch.int64)
            facts[self.world.rank] = torch.tensor([written["bytes"], written["crc32"]])
            facts = distributed.sum_small(facts, self.world).tolist()
            files = {
                shards.file_of(rank): {"bytes": facts[rank][0], "crc32": facts[rank][1]} for rank in self.disk.ranks
            }
            save.job = self.thread.submit(self._publish, save, files) if self.disk.leads else None

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

        distributed.attempt(check, self.world)

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
        partial = self._partial(save)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        if save.keep:
            (partial / "keep").touch()

    def _write(self, save, mine):
        blocks = self.copies.make(mine)
        mine.clear()  # clones need no memory while the disk is busy
        file = shards.file_of(self.world.rank)
        written = shards.write(self._partial(save) / file, blocks)
        if self.world.size == 1:
            self._publish(save, {file: written})
        return written

    def _result(self, save):
        """Return what this rank's job returned. Raises OSError if that failed."""
        if save.job is None:
            return None
        if error := save.job.exception():
            raise OSError(f"{type(error).__name__}: {error}, {run_folder.free_there(self.folder)}")
        return save.job.result()

    def _publish(self, save, files):
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
        if self.strict:
            raise SaveError(f"{text}, and -save_strict is on")
        if self.failures >= FAILURES:
            raise SaveError(f"{text}, nor could the {FAILURES - 1} before it")
        log.warning("%s: the run goes on, the older checkpoint is good, the next save tries again", text)


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
    shards.check(folder, manifest)
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
