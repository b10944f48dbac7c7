"""Saves checkpoints: whole or absent, written in the background, and without pickle.

A checkpoint is a folder 000042_step_1200: a running number and the optimizer step. It is written as NAME.partial,
synced, and renamed; shards.py says what is in it. A file `keep` in it spares it from removal.
"""

import concurrent.futures
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lib.utils import distributed, watchdog
from lib.utils.checkpoint import atomic, run_folder, shards, state, weights
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)
ADAM = 3  # numbers in a checkpoint for each weight, if the optimizer keeps two of them
FAILURES = 3  # saves in a row that may fail before the run ends
SHARE, LEAST_S, MOST_S = 0.01, 10.0, 600.0  # of -save_every auto: the time of saves, and the bounds of its interval
WAIT_S = 0.2  # between votes while all ranks wait for a save: votes keep collectives from timing out


@dataclass
class Save:
    """A save in flight: first every rank writes its file, then the writers publish the folder."""

    folder: Path
    partial: Path  # the folder's name until it is published
    facts: dict  # more entries of the manifest
    keep: bool
    best: dict[str, Tensor] | None  # the best weights, if they are written with it
    job: concurrent.futures.Future  # this rank's part
    written: bool = False  # by all ranks


class Checkpoints:
    """The checkpoints of a run. All ranks call its methods at the same steps."""

    def __init__(self, folder: Path, world: distributed.World, keep_last: int = 2, keep_hours: int = 0):
        self.folder, self.world, self.keep_last, self.keep_hours = folder, world, keep_last, keep_hours
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self.number = self.opened = 0  # of the last save, and of the newest one when this start began
        self.saving: Save | None = None
        self.failures = 0  # in a row
        self.saved_at, self.took_s = time.monotonic(), 0.0  # when the last save began, and how long one took here
        # The best weights, for the next save, {} on ranks without them: no checkpoint that names them comes before.
        self.best: dict[str, Tensor] | None = None

    def open(self) -> None:
        """Remove what crashes left in the run's folder. Call it before all else."""
        self.number = self.opened = max(self.world.on_writers(self._sweep))

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raise UsageError if saves with these tensors, those of all modules, could never be written."""
        out, size = self.folder.parent.parent, ADAM * sum(tensor.nbytes for tensor in tensors.values())
        if not self.world.shares_disk and any(map(shards.is_sharded, tensors.values())):
            raise UsageError(f"-out {out}: a sharded model needs a folder that all nodes share")
        free = min(self.world.on_writers(lambda: shutil.disk_usage(self.folder).free))
        if free < size:
            raise UsageError(f"-out {out}: a checkpoint takes about {size:,} bytes, and {free:,} are free; make room")

    def save(self, tensors: dict[str, Tensor], facts: dict, *, step: int, keep: bool = False) -> None:
        """Begin a checkpoint: copy the tensors, and write the copies in the background.

        The tensors may change as soon as this returns, but not the `facts`, entries of the manifest. A save that is
        still in flight is waited for. `keep` spares this one from removal. Raises RuntimeError if saving fails for
        good, as no run continues without; OSError if another process has the run's folder.
        """
        run_folder.check_lock(self.folder.parent)
        self.finish()
        self.saved_at = time.monotonic()
        self.number += 1
        name = f"{self.number:06d}_step_{step}"
        if not run_folder.NAME.fullmatch(name):
            raise UsageError(f"checkpoints/{name}: no start would find it by NAME of {run_folder.__file__}")
        partial = self.folder / f"{name}.partial"
        facts = {**facts, "tensors": shards.schema(tensors)}
        blocks, metadata = shards.blocks_of_rank(tensors, self.world)
        best, self.best = self.best, None
        job = self.thread.submit(self._write, partial, shards.copy_to_cpu(blocks.items()), metadata, best, facts)
        self.saving = Save(self.folder / name, partial, facts, keep, best, job)

    def is_late(self, minutes: int | None = None) -> bool:
        """Return whether the last save is so long ago on all ranks; without a number, by what saves cost."""
        interval_s = 60 * minutes if minutes else min(MOST_S, max(LEAST_S * 6**self.failures, self.took_s / SHARE))
        early = time.monotonic() - self.saved_at < interval_s or (minutes is None and self.saving is not None)
        return not distributed.all_reduce_max([early], self.world)[0]

    def poll(self) -> None:
        """Move the save in flight on, once every rank is ready. Raises RuntimeError when saving fails for good."""
        save = self.saving
        watchdog.moved()
        if save is None or distributed.all_reduce_max([not save.job.done()], self.world)[0]:
            return
        error = save.job.exception()
        if isinstance(error, TypeError):  # no fault of the disk: JSON cannot hold an entry of contents()
            raise error
        fault = f"rank {self.world.rank}: {type(error).__name__}: {error}"
        answers = distributed.gather({"error": fault} if error else save.job.result() or {}, self.world)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._fail(save, errors[0])
        elif save.written:
            self.saving, self.failures = None, 0
        else:
            save.written = True
            mine = answers if self.world.shares_disk else [answers[self.world.rank]]
            save.job = self.thread.submit(self._publish, save, mine)

    def finish(self) -> None:
        """Wait until nothing is in flight. Raises RuntimeError when saving fails for good."""
        while self.saving:
            concurrent.futures.wait([self.saving.job], WAIT_S)
            self.poll()

    def close(self) -> None:
        """Wait for what is in flight and end the writing thread. Raises RuntimeError if the last save failed."""
        self.finish()
        self.thread.shutdown()
        if self.failures:
            raise RuntimeError(f"{self.folder}: the last state could not be saved; the one before it is good")

    def _sweep(self) -> int:
        """Remove what kills left in the run's folder, and sync it. Return the number of the newest checkpoint."""
        run = self.folder.parent
        self.folder.mkdir(exist_ok=True)  # no parents: a plugin may have changed the working directory
        for folder in (self.folder, run, run / "best", run / "final"):
            atomic.sweep(folder)
        atomic.fsync(run)
        atomic.fsync(run.parent)
        checkpoints = run_folder.list_checkpoints(self.folder)
        return run_folder.checkpoint_number(checkpoints[0].name) if checkpoints else 0

    def _write(self, partial: Path, blocks: dict, metadata: dict, best: dict | None, facts: dict) -> dict:
        weights.write(self.folder.parent / "best", best if self.world.is_writer else None, facts["state"]["best"])
        for folder in (self.folder, partial) if blocks else ():  # no parents: a run's folder that is gone stays gone
            folder.mkdir(exist_ok=True)
        file = shards.FILE_NAME.format(self.world.rank)
        return {file: shards.write(partial / file, blocks, metadata)} if blocks else {}

    def _publish(self, save: Save, answers: list[dict]) -> None:
        if not self.world.is_writer:
            return
        run_folder.check_lock(self.folder.parent)
        if save.keep:
            (save.partial / "keep").touch()
        files = {file: written for answer in answers for file, written in answer.items()}
        manifest = {"format": state.FORMAT, **save.facts, "shards": files}
        atomic.write_file(save.partial / "manifest.json", state.encode_manifest(manifest))
        atomic.publish(save.partial, save.folder)
        self.took_s = time.monotonic() - self.saved_at
        removable = [folder for folder in run_folder.list_checkpoints(self.folder) if not (folder / "keep").exists()]
        first_of_hour = {folder.stat().st_mtime // 3600: folder for folder in removable}  # the oldest come last
        hourly = [folder for hour, folder in first_of_hour.items() if hour > time.time() // 3600 - self.keep_hours]
        for folder in removable[self.keep_last :]:
            if folder not in hourly:
                atomic.remove_folder(folder)

    def _fail(self, save: Save, reason: str) -> None:
        self.saving, self.best = None, save.best if self.best is None else self.best
        self.failures += 1
        if self.world.is_writer:
            shutil.rmtree(save.partial, ignore_errors=True)
        text = f"{save.folder} could not be saved ({reason})"
        if self.failures >= FAILURES:
            self.thread.shutdown()
            raise RuntimeError(f"{text}, nor could the {FAILURES - 1} before it")
        log.warning("%s: training continues; the checkpoint before it is good, and the next save tries again", text)
