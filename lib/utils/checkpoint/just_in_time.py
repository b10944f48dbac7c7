"""Saves the last whole step when a process is lost (Gupta et al., Just-In-Time Checkpointing, EuroSys 2024).

An exchange with a lost process fails before any optimizer runs. So each process that is left has the weights and the
state of its last whole step, and may be one step behind another. So has a run's only process, if the data of the next
step cannot be read. A fork may delete this file and its calls.
"""

import contextlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.utils import watchdog
from lib.utils.checkpoint import run_folder
from lib.utils.checkpoint.manager import Checkpoints
from lib.utils.distributed import World

log = logging.getLogger(__name__)
LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Save the trainer's last whole step if another process is lost in the block, unless one of those left has."""
    try:
        yield
    except Exception as error:
        is_between = trainer.is_whole and trainer.checks.steps > 0
        if is_between and (run_folder.is_lost_peer(error) if trainer.world.size > 1 else trainer.micro_batch is None):
            watchdog.begin("saving the last whole step, as a process is lost")
            try:
                save(trainer)
            except Exception as fault:  # noqa: BLE001  # the first error is the cause
                log.error("rank %d does not save the last whole step: %s", trainer.world.rank, fault)
        raise


def has_whole_state(trainer: Any) -> bool:
    """Return whether this rank has the state of all, and an exchange with a lost one fails and does not wait."""
    is_alike = trainer.plan.engine == "exact" or not (trainer.world.rank and trainer.engine.buffers.statistics)
    return is_alike and trainer.args.parallel != "fsdp" and trainer.world.device.type == "cpu"


def save(trainer: Any) -> None:
    """Publish the last whole step, unless another rank has done so. Raises OSError or RuntimeError if it cannot."""
    if trainer.world.size > 1:
        if not has_whole_state(trainer):
            raise RuntimeError("it lacks a part: with FSDP, on a GPU, or rank 0's statistics with -deterministic no")
        disconnect()
        is_evaluated = trainer.marks not in (None, trainer.checks.marks())
        if is_evaluated or trainer.checks.changed or trainer.engine.buffers.others:
            raise RuntimeError("a pass or evaluate() changes more than statistics: a counter, a queue or a teacher")
    trainer.engine.buffers.restore(trainer.engine.buffers.starts)
    trainer.read_losses()
    if trainer.world.size == 1 and (trainer.state.bad_row or trainer.weights_fault()):
        return
    # What else each of several has counted since the last log line is lost in part: that line has null for it.
    more = {key: [math.nan] for key in trainer.metrics.terms} if trainer.world.size > 1 else trainer.metrics.pending()
    trainer.state.unlogged = {**trainer.loss_sums.pending(), **more}
    saves, step = trainer.checkpoints, trainer.state.step
    saves.thread.shutdown()  # it may be writing this rank's part of a save in flight
    best = saves.best
    if best is None and saves.saving and not saves.saving.folder.exists():
        best = saves.saving.best
    run_folder.take_over(trainer.folder, trainer.world.launch)
    alone = Checkpoints(saves.folder, World(), keep_last=saves.keep_last, keep_hours=saves.keep_hours)
    alone.open()
    newest = [one.name for one in run_folder.list_checkpoints(saves.folder)[:1]]
    if newest and alone.number > saves.opened and int(newest[0].rpartition("_")[2]) >= step:
        return
    if best == {}:
        raise RuntimeError("the new best weights are on other ranks, and not yet on disk")
    alone.number, alone.best = max(alone.number, saves.number), best
    keep = (every := trainer.args.keep_every) and trainer.state.evaluated and trainer.is_due(f"{every}epochs")
    alone.save(*trainer.contents(), step=step, keep=bool(keep))
    alone.close()
    sys.stderr.write(f"train.py: step {step} is saved; resume: python train.py -cfg {trainer.folder}/config.yaml\n")


def disconnect() -> None:
    """Close this process's connections: the others then fail, as if it were gone, and wait for it no longer."""
    for entry in [*Path("/dev/fd").iterdir()]:
        # OSError: not a socket, or not connected.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and not one.getsockopt(*LISTENS):
                one.shutdown(socket.SHUT_RDWR)
