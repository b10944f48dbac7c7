"""Shared by the tests of checkpoints: small runs, small saves, their contents, and a payload that must never run."""

import dataclasses
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import few, lines, norm_net, run, same_tensors, weights

from lib.trainer import trainer
from lib.utils import preemption
from lib.utils.checkpoint import manager, resume, run_folder, shards
from lib.utils.checkpoint.state import State, encode_manifest, read_manifest
from lib.utils.distributed import World

SMALL = "-dataset few -arch norm_net -num_classes 4 -batch_size 16 -micro_batch 4 -epochs 3 -lr_start 1e-3"
PLUGINS = {"arch": {"norm_net": norm_net}, "dataset": {"few": few}}


def state(step: int) -> dict[str, torch.Tensor]:
    """A small state in which every number depends on the step."""
    return {
        "model.weight": torch.full((3, 5), float(step)),
        "model.bias": torch.full((5,), float(step), dtype=torch.bfloat16),
        "model.count": torch.tensor(step),
        "model.none": torch.empty(0, 4),
        "optim.weight.exp_avg": torch.full((3, 5), step / 2),
    }


def new_checkpoints(folder: Path, **options) -> manager.Checkpoints:
    """A Checkpoints object over this run folder, ready to save."""
    made = manager.Checkpoints(folder / "checkpoints", World(), **options)
    made.open()
    return made


def save(checkpoints: manager.Checkpoints, step: int, **options):
    """Save `state(step)` and wait for the end of the save."""
    checkpoints.save(state(step), facts(step), step=step, **options)
    checkpoints.finish()


def newest(folder: Path) -> int | None:
    """The step of the newest good checkpoint of a run, whose tensors are checked; None if there is none."""
    past = found(folder)
    if past is None:
        return None
    step = past.manifest["state"]["step"]
    assert same_tensors(tensors(past.folder), state(step))
    return step


def found(folder: Path) -> resume.Past | None:
    """The newest good checkpoint of a run."""
    checkpoints = new_checkpoints(folder)
    return resume.find_newest_good(checkpoints.folder, checkpoints.world)


def facts(step: int) -> dict:
    """The facts for the manifest of a small state."""
    config = {"samples": 1000, "batch_size": 1, "micro_batch": 1, "drop_last": False, "engine": "exact"}
    of_weight = {"dict": [["exp_avg", {"tensor": "optim.weight.exp_avg"}]]}
    states = {"optim": [{"dict": [["weight", of_weight]]}, {"list": []}], "frozen": []}
    return {"state": dataclasses.asdict(State(step=step, best={"step": step})), "config": config, "states": states}


def at_step(folder: Path, step: int) -> str:
    """The name of a run's newest checkpoint of a step."""
    return next(name for name in names(folder) if name.endswith(f"_step_{step}"))


def steps(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first."""
    return [int(name.partition("_step_")[2]) for name in names(folder)]


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints that are never removed."""
    marks = [folder / "checkpoints" / name / "keep" for name in names(folder)]
    return [step for step, mark in zip(steps(folder), marks) if mark.exists()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    manifest = read_manifest(folder)
    shards.read(folder, [*manifest["shards"]], found := shards.make_empty(manifest["tensors"]))
    return found


def names(folder: Path) -> list[str]:
    """The checkpoints of a run, newest first."""
    return [entry.name for entry in run_folder.list_checkpoints(folder / "checkpoints")]


def all_entries(folder: Path) -> list[str]:
    """All names in a run's checkpoints folder."""
    return sorted(entry.name for entry in (folder / "checkpoints").iterdir())


def log_of(folder: Path, rank: int = 0) -> str:
    """The log of a rank of a run."""
    return (folder / "logs" / f"rank_{rank}.log").read_text()


def change_manifest(folder: Path, change):
    """Change a checkpoint's manifest, with a valid checksum, as an attacker or another version might."""
    path = folder / "manifest.json"
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "crc32"}
    path.write_bytes(encode_manifest(change(manifest) or manifest))


def refused(out: Path, flags: str, capfd) -> str:
    """The one-line error of train.py for these flags."""
    capfd.readouterr()
    run(out, flags, wanted=2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1
    return lines[0]


def after_step(patch, step: int, act: Callable[[Path], object]):
    """Call act(folder) in a run of one process after this step, before what is due then and after the last save."""
    real = trainer.Trainer.after_step

    def boundary(self):
        if self.state.step == step:
            self.checkpoints.finish()
            act(self.folder)
        return real(self)

    patch.setattr(trainer.Trainer, "after_step", boundary)


def stop_at(patch, step: int):
    """Make all ranks stop after `step` steps, with a vote at every step."""
    real = trainer.Trainer.after_step

    def boundary(self):
        if self.state.step >= step:
            self.stop.request_stop("a test")
        return real(self)

    patch.setattr(trainer.Trainer, "after_step", boundary)
    patch.setattr(preemption, "MOST_STEPS", 1)


def run_until(out: Path, flags: str, step: int) -> Path:
    """Run until this step, as if asked to stop there, and return the run's folder."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        return run(out, flags, wanted=75)


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def payload(path: Path, mark: Path, wrap=lambda value: value) -> Path:
    """Write a pickle that creates the file `mark` if it is unpickled."""
    path.write_bytes(pickle.dumps(wrap(Payload(mark))))
    return path


def bits(folder: Path) -> dict:
    """Checksums of a finished run: final weights, newest checkpoint, and metrics without speeds."""
    newest = next(iter(run_folder.list_checkpoints(folder / "checkpoints")), None)
    found = {**weights(folder), **{f"saved {name}": value for name, value in tensors(newest).items()}}
    figures = [{name: value for name, value in line.items() if "perf/" not in name} for line in lines(folder)]
    return {"figures": figures, **{name: zlib.crc32(shards.as_bytes(value)) for name, value in found.items()}}
