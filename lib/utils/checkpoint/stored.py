"""What a run has stored, told without torch: its checkpoints by their names and order, and outcome.json."""

import errno
import json
import re
from pathlib import Path

MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)  # no such file, for good
NAMED = re.compile(r"step_(\d{1,18})(?:_(\d{1,9}))?(?:_after(\d{1,9}))?(_keep)?")


def run_of(args) -> Path:
    """The run's folder, out/NAME."""
    return Path(args.out) / args.model


def listed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last one saved first; none where the folder is missing. Raises OSError where
    it cannot be read."""
    try:
        there = [entry for entry in folder.iterdir() if NAMED.fullmatch(entry.name)]
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return []
    return sorted(there, key=lambda entry: order(entry.name), reverse=True)


def newest(folder: Path) -> Path | None:
    """The checkpoint in a folder that was saved last."""
    return next(iter(listed(folder)), None)


def meant(path: Path) -> list[Path]:
    """The checkpoints that a path means, the last one saved first: those of a run's folder or of a checkpoints
    folder, or the one that it is itself."""
    if (path / "manifest.json").is_file():
        return [path]
    return listed(path) or listed(path / "checkpoints")


def order(name: str) -> tuple[int, int, int]:
    """The place of a checkpoint among those of its run, by its name: turns back before it, step, saves of that."""
    match = NAMED.fullmatch(name)
    return (int(match[3] or 0), int(match[1]), int(match[2] or 0)) if match else (0, 0, 0)


def named(step: int, place: list[int], keep: bool) -> str:
    """The name of a checkpoint. `place`: turns back before it, saves of the step."""
    back, again = place
    return f"step_{step:08d}{f'_{again}' if again else ''}{f'_after{back}' if back else ''}{'_keep' if keep else ''}"


def following(folder: Path, step: int) -> list[int]:
    """The place that makes the next checkpoint the newest, also one of the same step, as after an evaluation that was
    interrupted, or of an earlier one, as after a change of -batch_size."""
    back, last, again = max((order(entry.name) for entry in listed(folder)), default=(0, -1, 0))
    if step > last:
        return [back, 0]
    return [back, again + 1] if step == last else [back + 1, 0]


def lock_id(run: Path) -> tuple[int, int] | None:
    """Which file the lock of a run's folder is, None where there is none. While its owner has it open no other file
    can be the same one, wherever the folder is moved to. Raises OSError."""
    try:
        file = (run / ".lock").stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return file.st_dev, file.st_ino


def has_lock(run: Path, lock: tuple[int, int] | None) -> bool:
    """Whether the lock of a run's folder is still this one of `lock_id`; also where the disk does not answer."""
    try:
        return lock is None or lock_id(run) == lock
    except OSError:
        return True


def outcome(run: Path) -> dict:
    """What outcome.json in the run's folder says, and `written`, which tells this one from another; {} where there is
    none."""
    path = run / "outcome.json"
    try:
        said, file = json.loads(path.read_text()), path.stat()
    except (OSError, ValueError):
        return {}
    return {**said, "written": f"{file.st_ino}-{file.st_mtime_ns}"} if isinstance(said, dict) else {}


def outcome_of(run: Path, job: str) -> dict:
    """The outcome if a start of this Slurm job wrote it, else {}: the job's launches are called JOB or JOB.STEP."""
    said = outcome(run)
    return said if str(said.get("launch")).partition(".")[0] == job else {}
