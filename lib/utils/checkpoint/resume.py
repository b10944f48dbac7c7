"""Whether a run may continue from a checkpoint, with which numbers, and loading it."""

import json
import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist

from lib.utils import distributed
from lib.utils.checkpoint import manager, run_folder, search, shards, shared_disk, stored, weights
from lib.utils.checkpoint.state import Parts, State, prepare
from lib.utils.data.plan import Plan, divisor
from lib.utils.distributed import World
from lib.utils.errors import UsageError, close

log = logging.getLogger(__name__)
FACTS = {"state", "asked", "best", "scaler", "about"}  # what the trainer adds to a manifest
OTHERS = {"samples", "nan"}  # what -allow_change may name besides flags: the dataset's length, weights not finite
# What starts from scratch where one of these flags may change, by how the names of its tensors begin.
ANEW = {"optim.": ("optimizer", "momentum"), "trainer.": ("trainer",)}


def remembered(args, world: World) -> dict:
    """What the newest checkpoint on any node says was asked, {} for a run without one. Its files are not verified
    yet.

    Raises UsageError where -resume names no checkpoint, and is needed, OSError where the disk does not answer.
    """
    answers = distributed.together((lambda: _peek(args, world)) if world.local_rank == 0 else None, world)
    found = max((answer for answer in answers if answer), key=lambda answer: answer[0], default=None)
    if found is None and args.resume:
        raise search.nothing(args.resume)
    return found[1] if found else {}


def _peek(args, world):
    own = stored.run_of(args) / "checkpoints"
    there = [] if run_folder.starts_anew(args, world) else shared_disk.retry(lambda: stored.listed(own))
    try:
        there += shared_disk.retry(lambda: stored.meant(Path(args.resume))) if args.resume else []
    except OSError as error:
        log.warning("-resume %s: %s", args.resume, error)
    for folder in there:
        if asked := _asked_there(folder):
            return [stored.order(folder.name), asked]
    return [stored.order(""), {}] if there else []


def _asked_there(folder):
    try:
        return shared_disk.retry(lambda: manager.read_manifest(folder)).get("asked")
    except (shards.Damaged, UsageError):  # reported when it is its turn to be loaded
        return None


def check_start(args, plan: Plan, before: dict, model: torch.nn.Module, splits: dict):
    """Raises UsageError, while nothing has been written, for what could not go on from where it is to, and for -best
    of a run without a val split."""
    _check_allowed(args.allow_change, {*vars(args), *before})
    if args.best and "val" not in splits:
        raise UsageError(f"-best {args.best}: there is no val split to choose by")
    if before and not (args.eval or args.dry):
        changes(before, asked(args, plan), args)
    elif args.weights and not before:
        weights.fitting(args.weights, model, "meta")


def plan(args, samples: int, world: World, before: dict) -> Plan:
    """How this run cuts its samples: the global batch and the micro-batch that it began with, or those asked for now.

    Raises UsageError for a batch that cannot be shared out.
    """
    if args.batch_per_gpu and args.batch_per_gpu == before.get("batch_per_gpu"):
        batch = before["batch_size"]
    else:
        batch = args.batch_per_gpu * world.size if args.batch_per_gpu else args.batch_size
    if batch < world.size:
        raise UsageError(f"-batch_size {batch} has not a sample for each of {world.size} processes: try {world.size}")
    kept = before.get("micro_batch") or batch + 1
    micro = args.micro_batch or (divisor(batch, math.ceil(batch / world.size)) if batch % kept else kept)
    if batch % micro:
        raise UsageError(f"-batch_size {batch} cannot be cut into micro-batches of -micro_batch {micro}")
    if args.drop_last and samples < batch:
        raise UsageError(f"-batch_size {batch} with -drop_last leaves nothing of {samples} training samples")
    return Plan(samples, batch, micro, args.drop_last, world.size)


def asked(args, plan: Plan) -> dict:
    """What was asked, as JSON has it, with the numbers that the first start settled."""
    settled = {**vars(args), "batch_size": plan.batch, "micro_batch": plan.micro, "samples": plan.samples}
    return json.loads(json.dumps(settled, default=str))


def _check_allowed(allowed: list[str], known: set[str]):
    """Raises UsageError for an -allow_change that names nothing known."""
    known = known | OTHERS
    for name in {*allowed} - known:
        raise UsageError(f"-allow_change {name}: there is no such flag{close(name, sorted(known))}")


def changes(before: dict, now: dict, args) -> str:
    """Describe the allowed differences between what a run was started with and what is asked now; "" for none.

    A flag that only one side knows, as after a change of the code, is allowed to differ. Raises UsageError for a
    difference that changes the result and that -allow_change does not name.
    """
    fixed = {*before, *now} - args.flag_rules.free
    changed = [name for name in sorted(fixed) if before.get(name) != now.get(name)]
    texts = {name: f"-{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}" for name in changed}
    refused = [name for name in changed if name in before and name in now and name not in args.allow_change]
    if refused:
        words = " ".join(f"-allow_change {name}" for name in refused)
        raise UsageError(f"-model {now['model']} would go on with other settings: "
                         f"{', '.join(texts[name] for name in refused)}; keep them, or add {words}, or start "
                         f"from scratch with -reset or another -model")  # fmt: skip
    return ", ".join(texts.values())


def check_found(found, now: dict, args):
    """Raises UsageError for a checkpoint that what is asked `now` cannot go on from, or whose entries are not those
    that this code writes. Tells what is allowed to differ."""
    wanted = FACTS | {"format", "tensors", "shards", "pieces", "crc32"}
    odd = {*found.manifest} ^ wanted or {*found.manifest["state"]} ^ {*vars(State())}
    if odd:
        raise UsageError(f"{found.folder}: written by another version of the code ({found.manifest.get('about')}): "
                         f"{', '.join(sorted(odd))} is missing there or unknown here; take that version, or "
                         f"-weights, or -reset")  # fmt: skip
    if others := changes(found.manifest["asked"], now, args):
        log.warning("going on with other settings: %s", others)


def state(manifest: dict, plan: Plan) -> State:
    """How far the run is, in steps of this plan: the same share of the epoch is done if -batch_size or the number of
    samples was allowed to change."""
    saved, before = State(**manifest["state"]), manifest["asked"]
    old = Plan(before["samples"], before["batch_size"], before["micro_batch"], before["drop_last"])
    if (old.batch, old.steps) == (plan.batch, plan.steps):
        return saved
    done = old.step_in_epoch(saved)
    now = plan.steps if done == old.steps else min(done * old.batch // plan.batch, plan.steps)
    log.warning("step %d is step %d of this -batch_size", saved.step, saved.epoch * plan.steps + now)
    saved.step = saved.epoch * plan.steps + now
    return saved


def load(found, parts: Parts, world: World, allowed=()):
    """Fills the parts of a run from a verified checkpoint, whatever number of ranks wrote it.

    `allowed`, of -allow_change: with "optimizer" or "momentum" an optimizer of another kind begins anew, with
    "trainer" what a trainer keeps of its own, with "nan" weights may be what they are. Raises UsageError where the
    tensors are not those of the run, or a weight is not finite.
    """
    fresh = prepare(parts)
    tensors = parts.tensors()
    there, here = found.manifest["tensors"], manager.schema(tensors)
    memory = tuple(f"{part}." for part in parts.optimizers)
    here = {name: facts for name, facts in here.items() if name in there or not name.startswith(memory)}
    for part, flags in ANEW.items():
        if {*flags} & {*allowed} and _of(part, there) != _of(part, here):
            log.warning("%s: its %s is another one: this one begins without memory", found.folder, flags[0])
            there, here = ({name: facts for name, facts in names.items() if not name.startswith(part)}
                           for names in (there, here))  # fmt: skip
    if there != here:
        odd = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
        told = ", ".join(f"{name} was {there.get(name)} and is {here.get(name)}" for name in odd[:4])
        kept = all(name.startswith("trainer.") for name in odd)
        hint = "; what its trainer keeps begins anew with -allow_change trainer" if kept else ""
        raise UsageError(f"{found.folder} is of another {'trainer' if kept else 'model or optimizer'}: {told}"
                         f"{', ...' if len(odd) > 4 else ''}{hint}")  # fmt: skip
    _fill(found, {name: tensors[name] for name in here}, world)
    _check_finite(found, parts.modules["model"], world, allowed)
    parts.forget_all_but(here, fresh)


def _of(part, schema):
    return {name: facts for name, facts in schema.items() if name.startswith(part)}


@torch.no_grad()
def _fill(found, tensors, world):
    if found.source in (None, world.rank):
        shards.read(found.folder, found.manifest["pieces"], tensors)
    for name in sorted(tensors) if found.source is not None else ():
        values = tensors[name].detach().contiguous()
        dist.broadcast(values.reshape(-1).view(torch.uint8), found.source)
        tensors[name].copy_(values)


def _check_finite(found, model, world, allowed):
    odd = weights.not_finite(model, world)
    if odd and "nan" not in allowed:
        raise UsageError(f"{found.folder}: {odd[0]} and {len(odd) - 1} more are not finite; remove it to go on "
                         f"from an older checkpoint, or take it as it is with -allow_change nan")  # fmt: skip
