"""The past of a run: finds its newest good checkpoint, checks that the run may continue from it, and loads it."""

import errno
import json
import logging
import math
import os
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from lib.utils import distributed
from lib.utils.checkpoint import manager, run_folder, shards, weights
from lib.utils.checkpoint.shared_disk import Disk
from lib.utils.checkpoint.state import Parts, State, prepare
from lib.utils.data.plan import Plan, divisor
from lib.utils.distributed import World
from lib.utils.errors import UsageError, close

log = logging.getLogger(__name__)
OTHERS = {"samples", "nan"}  # what -allow_change may name besides flags: the dataset's length, weights not finite
GOOD = ["good", ""]  # what a rank found of a checkpoint
RETRY_S = (0.2, 1.0, 3.0)  # the waits before a read that failed is tried again


@dataclass
class Past:
    """A checkpoint to continue from, verified."""

    folder: Path
    manifest: dict
    reader: int | None = None  # the rank that reads it for all others, where nodes do not share a disk
    own: bool = True  # or else that of another run
    damaged: dict[Path, str] = field(default_factory=dict)  # newer ones: what is wrong on this disk, if anything

    @property
    def config(self) -> dict:
        """The flags of the run, with the numbers that its first start settled."""
        return self.manifest["config"]


def find(args, disk: Disk) -> Past | None:
    """Return the newest good checkpoint of the run, or else of -resume; None for a new run. It moves nothing.

    Raises:
        UsageError: -resume names no good checkpoint, or the newest one is of another format.
        Damaged: no checkpoint of the run is good.
        OSError: the disk does not answer, which says nothing about the checkpoints.
    """
    if args.dry or args.eval:
        return None
    own = run_folder.run_of(args) / "checkpoints"
    if args.resume and _real(own) in _real(args.resume).parents:
        hint = "to start from an older one, give the new run another -model"
        raise UsageError(f"-resume {args.resume}: this run goes on from its newest checkpoint by itself; {hint}")
    past, damaged = None, {}
    if not any(disk.do(lambda: run_folder.restarts(args, disk.world))):
        past, damaged = newest_good(own, disk)
    if past is None and args.resume:
        past = _of_another_run(args.resume, disk)
        past.damaged |= damaged
    elif past is None and damaged:
        hint = "-reset starts from scratch, -resume takes another run's"
        raise shards.Damaged(f"{_fault(damaged)}; no good checkpoint is left: {hint}")
    return past


def _of_another_run(path: str, disk: Disk) -> Past:
    try:
        past, damaged = newest_good(_real(path), disk, own=False)
    except OSError as error:
        raise UsageError(f"-resume {path}: {error}") from None
    if past:
        return past
    if damaged:
        raise UsageError(f"-resume {path}: no good checkpoint is there: {_fault(damaged)}")
    raise UsageError(f"-resume {path}: there is no checkpoint; give a run's folder or one of its checkpoints")


def _fault(damaged):
    return next(filter(None, damaged.values()), "damaged on another machine's disk")


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def newest_good(folder: Path, disk: Disk, own: bool = True) -> tuple[Past | None, dict[Path, str]]:
    """Return the newest checkpoint that is whole on some disk, the same for all ranks, and the damaged newer ones."""
    names = disk.do(lambda: _names(folder, own))  # on each disk
    here = names[disk.groups.index(disk.ranks)]
    damaged = {}
    for name in sorted({*chain(*names)}, key=lambda name: run_folder.number(Path(name).name), reverse=True):
        report, manifest = _verify(folder / name, disk.share) if name in here else (["absent", ""], None)
        [fault] = distributed.largest([report != GOOD], disk.world)
        reports = distributed.gather_json(report, disk.world) if fault else [GOOD] * disk.world.size
        for kind, raised in (("unreadable", OSError), ("refused", UsageError)):
            if texts := [text for found, text in reports if found == kind]:
                raise raised(texts[0])
        if any(found == "damaged" for found, _ in reports):
            ours = [reports[rank] for rank in disk.ranks]
            damaged[folder / name] = next((text for found, text in ours if found == "damaged"), "")
        readers = [ranks[0] for ranks in disk.groups if all(reports[rank][0] == "good" for rank in ranks)]
        if readers and manifest and len(disk.groups) == 1:
            return Past(folder / name, manifest, own=own, damaged=damaged), damaged
        if readers:
            manifest = distributed.broadcast_json(manifest, disk.world, readers[0])
            return Past(folder / name, manifest, readers[0], own, damaged), damaged
    return None, damaged


def _names(folder, own):
    found = _retry(lambda: run_folder.listed(folder) if own else run_folder.checkpoints_at(folder))
    if own and not found and any(folder.glob("step_*")):
        hint = "which named checkpoints otherwise; take that version, or -reset"
        raise UsageError(f"{folder}: written by an older version of the code, {hint}")
    return [str(entry.relative_to(folder)) for entry in found]


def _verify(folder, share):
    """Return what this rank finds of a checkpoint, and its manifest."""
    try:
        return ["good", ""], _retry(lambda: _check(folder, share))
    except OSError as error:
        hint = "this may pass, so nothing was moved; start again when the disk answers, or remove it to go on from an"
        return ["unreadable", f"{folder} cannot be read ({error}): {hint} older checkpoint"], None
    except shards.Damaged as error:
        return ["damaged", str(error)], None
    except UsageError as error:
        return ["refused", f"{folder}: {error}"], None


def _check(folder, share):
    """Return the manifest of a checkpoint, once this rank's share of the files is verified."""
    _check_visible(folder)
    manifest = manager.read_manifest(folder)
    try:
        State.from_dict(manifest.get("state", {}))
    except TypeError as error:
        other = f"written by another version of the code ({manifest.get('about')}): {error}"
        raise UsageError(f"{other}; take that version, or -weights, or -reset") from None
    for file, wanted in sorted(manifest["shards"].items())[share.rank :: share.size]:
        shards.verify(folder / file, wanted)
    return manifest


def _check_visible(folder):
    """Raise OSError for a checkpoint that another rank of the disk sees: a network disk may show it a little later.

    Its folder is listed, which a network disk does not answer from memory.
    """
    if folder not in folder.parent.iterdir():
        raise OSError(errno.ESTALE, "it is not seen here, but by another process on the same disk")


def _retry(read):
    """Return `read()`, tried again for some seconds where the disk does not answer (EIO, ESTALE, EMFILE)."""
    for wait in RETRY_S:
        try:
            return read()
        except OSError as error:
            if error.errno in run_folder.MISSING:
                raise
            log.warning("%s: tried again in %g s", error, wait)
            time.sleep(wait)
    return read()


def plan(args, samples: int, world: World, past: Past | None) -> Plan:
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


def _micro_batch_size(args, batch: int, world: World, saved: int | None) -> int:
    """Return the flag's; else as the run began, if that divides the batch; else a share of the most ranks to come."""
    if args.micro_batch:
        return args.micro_batch
    if saved and batch % saved == 0:
        return saved
    return divisor(batch, math.ceil(batch / distributed.most_ranks(world)))


def config(args, plan: Plan) -> dict:
    """Return all flags as JSON has them, with the numbers that the first start settled."""
    return json.loads(json.dumps({**vars(args), **settled(plan), "samples": plan.samples}, default=str))


def settled(plan: Plan) -> dict[str, int]:
    """Return the flags that the first start settled where nobody gave them."""
    return {"batch_size": plan.batch, "micro_batch": plan.micro, "threads": torch.get_num_threads()}


def check(args, plan: Plan, past: Past | None, splits: dict):
    """Raise UsageError, before anything is written, for flags that the run may not continue with."""
    known = {*vars(args), *(past.config if past else ())} | OTHERS
    for name in {*args.allow_change} - known:
        raise UsageError(f"-allow_change {name}: there is no such flag{close(name, sorted(known))}")
    if args.best and "val" not in splits:
        raise UsageError(f"-best {args.best}: there is no val split to choose by")
    if past:
        changes(past.config, config(args, plan), args)


def changes(before: dict, now: dict, args) -> str:
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
    saved, before = State.from_dict(past.manifest["state"]), past.config
    saved.best = saved.best if past.own else None
    old = Plan(before["samples"], before["batch_size"], before["micro_batch"], before["drop_last"])
    if (old.batch, old.steps) != (plan.batch, plan.steps):
        done = old.step_in_epoch(saved)
        now = plan.steps if done == old.steps else min(done * old.batch // plan.batch, plan.steps)
        saved.step = saved.epoch * plan.steps + now
    return saved


def set_damaged_aside(past: Past, disk: Disk, own: Path):
    """Rename damaged checkpoints in the run's own folder to NAME.corrupt, on the disks where they are damaged."""
    for folder, fault in past.damaged.items():
        aside = folder.parent == own and fault
        if fault:
            log.warning("%s: %s; an older checkpoint is taken", fault, "set aside" if aside else "passed over")
        disk.do(lambda folder=folder, aside=aside: _rename(folder) if aside else None)


def _rename(folder):
    target = folder.with_name(f"{folder.name}.corrupt")
    while os.path.lexists(target):
        target = target.with_name(f"{target.name}_")
    folder.rename(target)


def load(past: Past, parts: Parts, world: World, allowed=()):
    """Fill the parts of a run from a checkpoint, whatever number of ranks wrote it.

    An optimizer's memory that the checkpoint lacks starts from scratch: its parameter took no part in a step yet.

    Raises:
        UsageError: the tensors are not those of the run; or a weight is not finite, and "nan" is not in `allowed`.
    """
    fresh = prepare(parts)
    tensors = parts.tensors()
    memory = tuple(f"{part}." for part in parts.optimizers)
    wanted = {name for name in tensors if name in past.manifest["tensors"] or not name.startswith(memory)}
    _check_tensors(past, {name: tensors[name] for name in wanted})
    _fill(past, {name: tensors[name] for name in wanted}, world)
    parts.forget_all_but(wanted, fresh)
    odd = weights.not_finite(parts.modules["model"], world)
    if odd and "nan" not in allowed:
        hint = "remove it to go on from an older checkpoint, or take it as it is with -allow_change nan"
        raise UsageError(f"{past.folder}: {odd[0]} and {len(odd) - 1} more are not finite; {hint}")


def _check_tensors(past, tensors):
    there, here = past.manifest["tensors"], manager.schema(tensors)
    odd = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
    if odd:
        shown = ", ".join(f"{name} was {there.get(name)} and is {here.get(name)}" for name in odd[:4])
        kind = "trainer" if all(name.startswith("trainer.") for name in odd) else "model or optimizer"
        more = ", ..." if len(odd) > 4 else ""
        raise UsageError(f"{past.folder} is of another {kind}: {shown}{more}; -weights takes only a model's weights")


@torch.no_grad()
def _fill(past, tensors, world):
    if past.reader in (None, world.rank):
        own = shards.file_of(world.rank)  # holds all blocks of this rank, if as many ranks wrote it
        shards.read(past.folder, sorted(past.manifest["shards"], key=lambda file: file != own), tensors)
    for name in sorted(tensors) if past.reader is not None else ():
        values = tensors[name].detach().contiguous()
        dist.broadcast(values.reshape(-1).view(torch.uint8), past.reader)
        tensors[name].copy_(values)
