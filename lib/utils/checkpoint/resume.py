"""The past of a run: finds its newest good checkpoint, checks that the run may continue from it, and loads it."""

import errno
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lib.utils import distributed
from lib.utils.checkpoint import atomic, run_folder, shards, weights
from lib.utils.checkpoint.shared_disk import Disk
from lib.utils.checkpoint.state import Parts, State, prepare
from lib.utils.data.plan import Plan, divisor
from lib.utils.distributed import World
from lib.utils.errors import UsageError, close

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
OTHERS = {"samples", "nan"}  # what -allow_change may name besides flags: the dataset's length, weights not finite


@dataclass
class Past:
    """A checkpoint to continue from, verified."""

    folder: Path
    manifest: dict
    own: bool  # or else that of another run
    damaged: list[str]  # what is wrong with newer ones
    sender: int  # a rank whose disk has it whole
    lacking: dict[int, str]  # the ranks that lack it or a file of it, where nodes do not share a disk, and why

    @property
    def config(self) -> dict:
        """The flags of the run, with the numbers that its first start settled."""
        return self.manifest["config"]


def find(args: "Args", disk: Disk) -> Past | None:
    """Return the newest good checkpoint of the run, or else of -resume; None for a new run.

    Raises:
        UsageError: -resume names no good checkpoint, or the newest one is of another format.
        Damaged: the run has checkpoints, and none is good.
        OSError: the disk does not answer, which says nothing about the checkpoints.
    """
    if args.eval:
        return None
    own = run_folder.run_of(args) / "checkpoints"
    if args.resume and Path(os.path.realpath(own)) in Path(os.path.realpath(args.resume)).parents:
        hint = "to start from an older one, give the new run another -model"
        raise UsageError(f"-resume {args.resume}: this run goes on from its newest checkpoint by itself; {hint}")
    past = newest_good(own, disk, resets=lambda: run_folder.restarts(args, disk.world))
    if past or not args.resume:
        return past
    other = newest_good(Path(os.path.realpath(args.resume)), disk, own=False)
    if other is None:
        hint = "give a run's folder or one of its checkpoints"
        raise UsageError(f"-resume {args.resume}: there is no checkpoint; {hint}")
    if other.lacking:
        raise UsageError(f"-resume {args.resume}: not each node has {other.folder.name}: copy it to all")
    return other


def newest_good(path: Path, disk: Disk, own: bool = True, resets: Callable[[], bool] = lambda: False) -> Past | None:
    """Return the newest checkpoint at a path that is whole on some disk, the same for all ranks; None without any.

    A disk that `resets` has none: its old run is to be moved away.

    Raises:
        Damaged: there are some, and none is good.
        UsageError: the newest is of another version of the code; or none is good, and they are not the run's own.
        OSError: the disk does not answer.
    """
    names = disk.do(lambda: [] if resets() else _names(path))  # on each disk
    here = names[disk.groups.index(disk.ranks)]
    damaged = []
    for name in sorted({*chain(*names)}, key=lambda name: (run_folder.number(Path(name).name), name), reverse=True):
        verify = functools.partial(_verify, path / name, disk.share) if name in here else None
        manifest, fault = distributed.attempt(verify, disk.world) or ({}, None)
        [bad] = distributed.largest([fault != ""], disk.world)
        faults = distributed.gather_json(fault, disk.world) if bad else [""] * disk.world.size
        lacking = {rank: fault or f"{path / name} is not there" for rank, fault in enumerate(faults) if fault != ""}
        senders = [ranks[0] for ranks in disk.groups if lacking.keys().isdisjoint(ranks)]
        if senders:
            if len(names) > 1:
                manifest = distributed.broadcast_json(manifest, disk.world, senders[0])
            return Past(path / name, manifest, own, damaged, senders[0], lacking)
        damaged += [text for text in faults if text][:1]
    if damaged and own:
        raise shards.Damaged(f"{damaged[0]}; no good checkpoint is left: -reset starts from scratch")
    if damaged:
        raise UsageError(f"-resume: {damaged[0]}; no good checkpoint is left")
    return None


def _names(path: Path) -> list[str]:
    """Return the checkpoints at a path: of a run's folder or its checkpoints folder, or the path itself."""
    itself = [path] if (path / "manifest.json").is_file() else []
    found = run_folder.listed(path) or run_folder.listed(path / "checkpoints") or itself
    if not found and any(path.glob("step_*")):
        hint = "which named checkpoints otherwise; take that version, or -reset"
        raise UsageError(f"{path}: written by an older version of the code, {hint}")
    return [str(entry.relative_to(path)) for entry in found]


def _verify(folder: Path, share: World) -> tuple[dict, str]:
    """Verify this rank's share of a checkpoint's files. Return the manifest and "", or {} and what is damaged."""
    if folder not in folder.parent.iterdir():  # a network disk shows it later; a listing does not come from memory
        raise OSError(errno.ESTALE, "another process on the same disk sees it, this one does not", str(folder))
    try:
        manifest = shards.read_manifest(folder)
        for file, wanted in sorted(manifest["shards"].items())[share.rank :: share.size]:
            shards.verify(folder / file, wanted)
    except shards.Damaged as error:
        return {}, str(error)
    except OSError as error:
        if error.errno not in run_folder.MISSING:
            raise
        return {}, f"{folder}: {error}"
    return manifest, ""


def plan(args: "Args", samples: int, world: World, past: Past | None) -> Plan:
    """Return how this run cuts its samples: by the batch and micro-batch that it began with, or those of new flags.

    Raises:
        UsageError: the batch cannot be shared out.
    """
    before = past.config if past else {}
    if args.batch_per_gpu and args.batch_per_gpu == before.get("batch_per_gpu"):
        batch = before["batch_size"]
    else:
        batch = args.batch_per_gpu * world.size if args.batch_per_gpu else args.batch_size
    if batch < world.size:
        raise UsageError(f"-batch_size {batch} has not a sample for each of {world.size} processes: try {world.size}")
    micro = _micro_batch_size(args, batch, world, before.get("micro_batch"))
    if batch % micro:
        raise UsageError(f"-batch_size {batch} cannot be cut into micro-batches of -micro_batch {micro}")
    if args.drop_last and samples < batch:
        raise UsageError(f"-batch_size {batch} with -drop_last leaves nothing of {samples} training samples")
    return Plan(samples, batch, micro, args.drop_last)


def _micro_batch_size(args: "Args", batch: int, world: World, saved: int | None) -> int:
    """Return the flag's; else as the run began, if that divides the batch; else a share of the most ranks to come."""
    if args.micro_batch:
        return args.micro_batch
    if saved and batch % saved == 0:
        return saved
    return divisor(batch, math.ceil(batch / distributed.most_ranks(world)))


def config(args: "Args", plan: Plan) -> dict:
    """Return all flags as JSON has them, with the numbers that the first start settled."""
    return json.loads(json.dumps({**vars(args), **settled(plan), "samples": plan.samples}, default=str))


def settled(plan: Plan) -> dict[str, int]:
    """Return the flags that the first start settled where nobody gave them."""
    return {"batch_size": plan.batch, "micro_batch": plan.micro, "threads": torch.get_num_threads()}


def check(args: "Args", plan: Plan, past: Past | None, splits: dict) -> None:
    """Raise UsageError, before anything is written, for flags that the run may not continue with."""
    known = {*vars(args), *(past.config if past else ())} | OTHERS
    for name in {*args.allow_change} - known:
        raise UsageError(f"-allow_change {name}: there is no such flag{close(name, sorted(known))}")
    for flag in ("best", "stop_after"):
        if (value := getattr(args, flag)) and "val" not in splits:
            raise UsageError(f"-{flag} {value}: there is no val split to choose by")
    if past:
        changes(past.config, config(args, plan), args)


def changes(before: dict, now: dict, args: "Args") -> str:
    """Describe the allowed differences between the saved and the current flags; "" for none.

    A flag that only one side knows, as after a change of the code, is allowed to differ.

    Raises:
        UsageError: a difference changes the result, and -allow_change does not name it.
    """
    fixed = {*before, *now} - args.flag_rules.free
    changed = [name for name in sorted(fixed) if before.get(name) != now.get(name)]
    texts = {name: f"-{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}" for name in changed}
    refused = [name for name in changed if name in before and name in now and name not in args.allow_change]
    if refused:
        allow = " ".join(f"-allow_change {name}" for name in refused)
        other = f"would go on with other settings: {', '.join(texts[name] for name in refused)}"
        hint = f"keep them, or add {allow}, or start from scratch with -reset or another -model"
        raise UsageError(f"-model {now['model']} {other}; {hint}")
    return ", ".join(texts.values())


def state(past: Past | None, plan: Plan) -> State:
    """Return how far the run is, in steps of this plan.

    If -batch_size or the number of samples was allowed to change, the same share of the epoch counts as done. The
    best metric of another run does not count: its weights are not here.
    """
    if past is None:
        return State()
    saved, before = State(**past.manifest["state"]), past.config
    saved.best = saved.best if past.own else None
    old = Plan(before["samples"], before["batch_size"], before["micro_batch"], before["drop_last"])
    if (old.batch, old.steps) != (plan.batch, plan.steps):
        done = old.step_in_epoch(saved)
        now = plan.steps if done == old.steps else min(done * old.batch // plan.batch, plan.steps)
        saved.step = saved.epoch * plan.steps + now
    return saved


def send(past: Past | None, run: Path, disk: Disk) -> None:
    """Copy the checkpoint, the log lines and the best weights to disks that lack the checkpoint. All ranks call this.

    Raises RuntimeError if the copy is not what was sent.
    """
    if past is None or not past.lacking:
        return
    rank, why = next(iter(past.lacking.items()))
    log.warning("rank %d: %s; rank %d sends it", rank, why, past.sender)
    partial = past.folder.with_name(f"{past.folder.name}.partial")
    wants = disk.leads and not past.lacking.keys().isdisjoint(disk.ranks)
    if wants:
        for folder in (past.folder, partial):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (partial, run / "best"):
            folder.mkdir(parents=True, exist_ok=True)
    for file in ("manifest.json", *past.manifest["shards"]):
        disk.copy(past.folder / file, partial / file, past.sender, wants)
    for file in (run / "metrics.jsonl", run / "best" / "weights.safetensors"):
        if distributed.broadcast_json(file.exists(), disk.world, past.sender):
            disk.copy(file, file, past.sender, wants)

    def publish() -> None:
        _, fault = _verify(partial, World())
        if fault:
            raise RuntimeError(f"{fault}, after rank {past.sender} sent it")
        atomic.publish(partial, past.folder)

    distributed.attempt(publish if wants else None, disk.world)


def load(past: Past, parts: Parts, world: World, allowed: Collection[str] = ()) -> None:
    """Fill the parts of a run from a checkpoint, whatever number of ranks wrote it. Log which newer ones are damaged.

    An optimizer's memory that the checkpoint lacks starts from scratch: its parameter took no part in a step yet.

    Raises:
        UsageError: the tensors are not those of the run; or a weight is not finite, and "nan" is not in `allowed`.
    """
    for fault in past.damaged:
        log.warning("%s; an older checkpoint is taken", fault)
    fresh = prepare(parts)
    there, memory = past.manifest["tensors"], tuple(f"{part}." for part in parts.optimizers)
    tensors = {name: one for name, one in parts.tensors().items() if name in there or not name.startswith(memory)}
    _check_tensors(past, tensors)
    files = shards.read_manifest(past.folder)["shards"]  # of this disk
    own = shards.file_of(world.rank)  # holds all blocks of this rank, if as many ranks wrote it
    shards.read(past.folder, sorted(files, key=lambda file: file != own), tensors)
    parts.forget_all_but({*tensors}, fresh)
    odd = weights.not_finite(parts.modules["model"], world)
    if odd and "nan" not in allowed:
        hint = "remove it to go on from an older checkpoint, or take it as it is with -allow_change nan"
        raise UsageError(f"{past.folder}: {odd[0]} and {len(odd) - 1} more are not finite; {hint}")


def _check_tensors(past: Past, tensors: dict[str, Tensor]) -> None:
    there, here = past.manifest["tensors"], shards.schema(tensors)
    odd = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
    if odd:
        shown = ", ".join(f"{name} was {there.get(name)} and is {here.get(name)}" for name in odd[:4])
        kind = "trainer" if all(name.startswith("trainer.") for name in odd) else "model or optimizer"
        raise UsageError(f"{past.folder} is of another {kind}: {shown}; -weights takes only a model's weights")
