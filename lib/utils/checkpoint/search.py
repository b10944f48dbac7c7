"""Finds the newest checkpoint that is what was written, on whichever nodes' disks it lies, the same for all ranks."""

import logging
import os
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lib.utils import distributed
from lib.utils.checkpoint import manager, shards, shared_disk, stored
from lib.utils.checkpoint.shared_disk import Disk
from lib.utils.errors import UsageError

log = logging.getLogger(__name__)


@dataclass
class Found:
    """A checkpoint that was verified: where it lies and what its manifest says."""

    folder: Path
    manifest: dict
    source: int | None = None  # the rank that reads it for all others, where nodes do not share a disk


def newest(folder: Path, disk: Disk, elsewhere: str | None = None) -> Found | None:
    """The newest good one of a run's checkpoints folder, or else of `elsewhere`, another run's; None for a new run.

    `elsewhere`: see `other`. A damaged one of the run's own is moved aside, its reason in the log. Raises Damaged
    where all are damaged, UsageError for an `elsewhere` that is none, and for a checkpoint of another format, OSError
    where the disk does not answer: that is no damage, and nothing is moved.
    """
    if elsewhere is not None and _real(folder) in _real(elsewhere).parents:
        raise UsageError(f"-resume {elsewhere}: this run goes on from its newest checkpoint by itself; to branch off "
                         f"from an older one, give the new run another -model")  # fmt: skip
    aside = any(disk.do(lambda: any(folder.glob("step_*.corrupt*"))))
    found, faults = _first_good(folder, disk, own=True)
    if found is None and elsewhere is not None:
        return other(elsewhere, disk)
    if found is None and (faults or aside):
        why = faults[0] if faults else f"{folder}: all that is there was set aside as damaged"
        raise shards.Damaged(f"{why}; no good checkpoint is left: -reset starts anew, -resume takes another run's")
    return found


def other(path: str | Path, disk: Disk) -> Found:
    """The newest good one of those that a path means. Nothing there is touched. Raises UsageError where none is."""
    try:
        found, faults = _first_good(_real(path), disk, own=False)
    except OSError as error:
        raise UsageError(f"-resume {path}: {error}") from None
    if found is None:
        raise UsageError(f"-resume {path}: no good checkpoint is there: {faults[0]}") if faults else nothing(path)
    return found


def nothing(path: str | Path) -> UsageError:
    """What is said of a path that means no checkpoint."""
    return UsageError(f"-resume {path}: there is no checkpoint; a run's folder, its checkpoints folder or one "
                      f"checkpoint is wanted")  # fmt: skip


def _real(path):
    return Path(os.path.realpath(path))


def _names(folder, disk, own):
    """What any disk has, the newest first."""
    there = stored.listed if own else stored.meant
    answers = disk.do(lambda: [str(entry.relative_to(folder)) for entry in shared_disk.retry(lambda: there(folder))])
    return sorted({*chain(*answers)}, key=lambda name: stored.order(Path(name).name), reverse=True)


def _first_good(folder, disk, own):
    """The first that is whole on some disk, None if there is none, and what was wrong with those before it."""
    faults = []
    for name in _names(folder, disk, own):
        reports, manifest = _reports(folder / name, disk)
        if errors := [one["error"] for one in reports if "error" in one]:
            raise OSError(errors[0])
        if refused := [one["refused"] for one in reports if "refused" in one]:
            raise UsageError(refused[0])
        if wrong := [one["fault"] for one in reports if "fault" in one]:
            faults.append(wrong[0])
            _pass_over(folder / name, reports, disk, own)
        good = [ranks[0] for ranks in disk.groups if all("good" in reports[rank] for rank in ranks)]
        if good and len(disk.groups) == 1:
            return Found(folder / name, manifest), faults
        if good:
            answers = distributed.gather_json(manifest if disk.world.rank == good[0] else None, disk.world)
            return Found(folder / name, answers[good[0]], source=good[0]), faults
    return None, faults


def _reports(folder, disk):
    """What all ranks say of a checkpoint, and its manifest. A rank that does not see one which others on its disk see
    looks again: a network disk may show it a little later."""
    report, manifest = _verified(folder, disk.share)
    for wait in (*shared_disk.RETRY_S, None):
        reports = distributed.gather_json(report, disk.world)
        absent = [["absent" in reports[rank] for rank in ranks] for ranks in disk.groups]
        if all(all(group) or not any(group) for group in absent):
            break
        if wait is None:
            unseen = [rank for ranks, group in zip(disk.groups, absent) for rank, out in zip(ranks, group) if out]
            raise OSError(
                f"{folder}: rank {unseen[0]} does not see it, others on the same disk do; nothing was moved"
            )
        time.sleep(wait)
        if "absent" in report:
            report, manifest = _verified(folder, disk.share)
    return reports, manifest


def _verified(folder, share):
    """What this rank says of a checkpoint, and its manifest; each checks its share of the files."""
    try:
        if not shared_disk.retry(lambda: _is_listed(folder)):
            return {"absent": True}, None
        manifest = shared_disk.retry(lambda: manager.read_manifest(folder))
        for file, wanted in sorted(manifest["shards"].items())[share.rank :: share.size]:
            shared_disk.retry(lambda file=file, wanted=wanted: shards.verify(folder / file, wanted))
    except OSError as error:
        return {"error": f"{folder} cannot be read ({error}): this may pass, so nothing was moved; start again when "
                         f"the disk answers, or remove it to go on from an older checkpoint"}, None  # fmt: skip
    except shards.Damaged as error:
        return {"fault": str(error)}, None
    except UsageError as error:
        return {"refused": str(error)}, None
    return {"good": True}, manifest


def _is_listed(folder):
    """Whether it is there, whatever it is. A network file system remembers for a minute that a name was not there, so
    its folder is listed."""
    try:
        return folder in folder.parent.iterdir()
    except (FileNotFoundError, NotADirectoryError):
        return False


def _pass_over(folder, reports, disk, own):
    """Moves a damaged checkpoint aside on the disks where it is so."""
    fault = next((reports[rank]["fault"] for rank in disk.ranks if "fault" in reports[rank]), None)
    if fault is not None and not own:
        log.warning("%s: passed over", fault)
    disk.do(lambda: _set_aside(folder, fault) if fault is not None and own else None)


def _set_aside(folder, reason):
    number, target = 1, folder.with_name(f"{folder.name}.corrupt")
    while os.path.lexists(target):
        number += 1
        target = folder.with_name(f"{folder.name}.corrupt{number}")
    log.warning("%s: set aside as %s; an older checkpoint is looked for", reason, target.name)
    folder.rename(target)
