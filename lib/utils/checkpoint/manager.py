"""Saves checkpoints: whole or absent, written in the background, and without pickle.

A checkpoint is a folder 000042_step_1200: a running number and the optimizer step. It is written as NAME.partial,
synced, and renamed; shards.py says what is in it. A file `keep` in it spares it from removal.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lib.utils import distributed, watchdog
from lib.utils.checkpoint import atomic, run_folder, shards, shared_disk, staging, weights
from lib.utils.distributed import World
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
EVERY = re.compile(r"(\d+)(epoch|step)?")  # the value of -save_every, which was checked
FAILURES = 3  # saves in a row that may fail before the run ends
WAIT_S = 0.2  # between votes while all ranks wait for a save: votes keep collectives from timing out


class SaveError(RuntimeError):
    """Checkpoints cannot be written; the run ends rather than continue without."""


@dataclass
class Save:
    """A save in flight: first every rank writes its file, then the first rank of each disk publishes the folder."""

    folder: Path
    partial: Path  # the folder's name until it is published
    facts: dict  # more entries of the manifest
    keep: bool
    best: dict[str, Tensor]  # the best weights, if they are written with it
    job: concurrent.futures.Future  # this rank's part
    written: bool = False  # by all ranks


class Checkpoints:
    """The checkpoints of a run. All ranks call its methods at the same steps."""

    def __init__(self, folder: Path, world: World, *, keep_last: int = 2):
        self.folder, self.world, self.disk, self.keep_last = folder, world, shared_disk.single_disk(world), keep_last
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint", _lower_priority, (world.device,))
        self.number = 0  # of the last save
        self.damaged = range(0)  # numbers of checkpoints that were passed over: they are the first to be removed
        self.saving: Save | None = None
        self.failures = 0  # in a row
        self.best: dict[str, Tensor] = {}  # the best weights, for the next save

    def open(self) -> None:
        """Find out which ranks share the folder, and remove what crashes left there. Call it before all else."""
        self.disk = shared_disk.find_disks(self.folder, self.world)
        self.number = max(self.disk.do(self._sweep))

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raise UsageError if saves with these tensors, those of all modules, could never be written."""
        shards.schema(tensors)
        out, size = self.folder.parent.parent, about_bytes(tensors)
        if len(self.disk.groups) > 1 and any(map(shards.is_sharded, tensors.values())):
            raise UsageError(f"-out {out}: a sharded model needs a folder that all nodes share")
        free = min(self.disk.do(lambda: shutil.disk_usage(self.folder).free))
        if free < size:
            raise UsageError(f"-out {out}: a checkpoint takes about {size:,} bytes, and {free:,} are free; make room")

    def save(
        self, tensors: dict[str, Tensor], facts: dict, *, step: int, rank_dependent: set, keep: bool = False
    ) -> None:
        """Begin a checkpoint: copy the tensors, and write the copies in the background.

        The tensors may change as soon as this returns. A save that is still in flight is waited for.

        Args:
            tensors: the live tensors by name.
            facts: entries of the manifest (JSON), which must not change later.
            step: the optimizer step, for the name.
            rank_dependent: names of tensors that may differ between ranks: the first rank's are saved.
            keep: spare it from removal.

        Raises:
            SaveError: saving fails for good.
            OSError: another process has the run's folder.
        """
        run_folder.check_lock(self.folder.parent)
        self.finish()
        self.number += 1
        name = f"{self.number:06d}_step_{step}"
        partial = self.folder / f"{name}.partial"
        facts = {**facts, "tensors": shards.schema(tensors)}
        mine = shards.pieces(tensors, self.disk.share, rank_dependent)
        starts = {piece.name: list(piece.start) for piece in mine if any(piece.start)}
        best, self.best = self.best, {}
        job = self.thread.submit(self._write, partial, staging.copy(mine), starts, best)
        self.saving = Save(self.folder / name, partial, facts, keep, best, job)

    def set_best(self, tensors: dict[str, Tensor]) -> None:
        """Write best/weights.safetensors with the next save, on each disk, from tensors that `weights.gather` gave.

        No checkpoint that names them is published before they are written.
        """
        self.best = tensors if self.disk.is_first else {}

    def poll(self) -> None:
        """Move the save in flight on, once every rank is ready. Raises SaveError when saving fails for good."""
        save = self.saving
        watchdog.moved()
        if save is None or distributed.all_reduce_max([not save.job.done()], self.world)[0]:
            return
        error = save.job.exception()
        fault = f"rank {self.world.rank}: {type(error).__name__}: {error}"
        answers = distributed.gather_json({"error": fault} if error else save.job.result() or {}, self.world)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._fail(save, errors[0])
        elif save.written:
            self.saving, self.failures = None, 0
        else:
            save.written = True
            save.job = self.thread.submit(self._publish, save, [answers[rank] for rank in self.disk.ranks])

    def finish(self) -> None:
        """Wait until nothing is in flight. Raises SaveError when saving fails for good."""
        while self.saving:
            concurrent.futures.wait([self.saving.job], WAIT_S)
            self.poll()

    def write_final(self, tensors: dict[str, Tensor]) -> None:
        """Write final/weights.safetensors on each disk, from tensors that `weights.gather` gave, and wait for it."""

        def write() -> None:
            if self.disk.is_first:
                weights.write(self.folder.parent / "final", tensors)

        job = self.thread.submit(write)
        while distributed.all_reduce_max([not job.done()], self.world)[0]:
            concurrent.futures.wait([job], WAIT_S)
            watchdog.moved()
        self.disk.do(job.result)

    def close(self) -> None:
        """Wait for what is in flight and end the writing thread. Raises SaveError if the last save failed."""
        self.finish()
        self.thread.shutdown()
        if self.failures:
            raise SaveError(f"{self.folder}: the last state could not be saved; the one before it is good")

    def _sweep(self) -> int:
        """Remove what kills left in the run's folder, and sync it. Return the number of the newest checkpoint."""
        run = self.folder.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, run, run / "best", run / "final"):
            atomic.sweep(folder)
        atomic.fsync_folder(run)
        atomic.fsync_folder(run.parent)
        newest = next((one.name for one in run_folder.list_checkpoints(self.folder)), "")
        return run_folder.checkpoint_number(newest)

    def _write(self, partial: Path, copies: staging.Copies, starts: dict[str, list], best: dict[str, Tensor]) -> dict:
        if copies.copied:
            copies.copied.synchronize()
        if best:
            weights.write(self.folder.parent / "best", best)
        for folder in (self.folder, partial):  # without parents: a run's folder that is gone is not made again
            folder.mkdir(exist_ok=True)
        file = shards.file_name(self.world.rank)
        return {file: shards.write(partial / file, copies.blocks, {"starts": json.dumps(starts)})}

    def _publish(self, save: Save, answers: list[dict]) -> None:
        if not self.disk.is_first:
            return
        run_folder.check_lock(self.folder.parent)
        if save.keep:
            (save.partial / "keep").touch()
        files = {file: written for answer in answers for file, written in answer.items()}
        manifest = {"format": shards.FORMAT, **save.facts, "shards": files}
        atomic.write_file(save.partial / "manifest.json", shards.encode_manifest(manifest))
        atomic.publish(save.partial, save.folder)
        with contextlib.suppress(OSError):  # it is for people; some file systems have no links
            atomic.swap_link(self.folder / "latest", save.folder.name)
        removable = [folder for folder in run_folder.list_checkpoints(self.folder) if not (folder / "keep").exists()]
        removable.sort(key=lambda folder: run_folder.checkpoint_number(folder.name) in self.damaged)
        for folder in removable[self.keep_last :]:
            atomic.remove_folder(folder)

    def _fail(self, save: Save, reason: str) -> None:
        self.saving, self.best = None, self.best or save.best
        self.failures += 1
        if self.disk.is_first:
            shutil.rmtree(save.partial, ignore_errors=True)
        text = f"{save.folder} could not be saved ({reason})"
        if self.failures >= FAILURES:
            raise SaveError(f"{text}, nor could the {FAILURES - 1} before it")
        log.warning("%s: training continues; the checkpoint before it is good, and the next save tries again", text)


def about_bytes(weights: dict[str, Tensor]) -> int:
    """Return how many bytes a checkpoint with these weights takes, if the optimizer keeps two numbers for each."""
    return 3 * sum(tensor.nbytes for tensor in weights.values())


def is_due(save_every: str, unit: str, done: int) -> bool:
    """Return whether -save_every wants a save after so many epochs or optimizer steps (unit "epoch" or "step")."""
    number, counted = EVERY.findall(save_every)[0]
    return unit == (counted or "epoch") and done % int(number) == 0


def _lower_priority(device: torch.device) -> None:
    """Give this thread the lowest priority, and this process's GPU."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    if device.type == "cuda":
        torch.cuda.set_device(device)
