"""What a run remembers: the numbers it was first started with, and what may not change without a word."""

import difflib
import json
import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist

from lib.utils import checkpoint, distributed, run_folder, shards, stored, weights
from lib.utils.distributed import World
from lib.utils.errors import UsageError
from lib.utils.loader import Plan, divisor
from lib.utils.state import State, all_tensors, prepare

log = logging.getLogger(__name__)
# What a run may change as it likes: everything else bends its trajectory.
HARMLESS = {
    "data", "out", "model", "reset", "cfg", "tb", "gpus", "cpu", "workers", "deterministic", "log_every",
    "max_bad_steps", "save_every", "keep_last", "keep_every", "best", "save_strict", "resume",
    "weights", "allow_change", "max_hours", "grace_s", "hang_minutes", "batch_per_gpu", "limit_steps", "check_resume",
    "parallel", "fsdp_replicas", "offload", "recompute", "compile", "find_unused", "log_histograms",
    "nnodes", "node_rank", "master_addr", "master_port", "master_suffix", "cache_dir", "debug_dist",
    "ngrok", "ngrok_auth", "ngrok_oauth", "ngrok_allow", "profile", "debug", "eval", "dry",
}  # fmt: skip
OTHERS = {"samples", "nan"}  # what -allow_change may name beside flags: the dataset's length, weights not finite
FACTS = {"state", "asked", "best", "bad_steps", "metrics", "scaler", "about"}  # what the trainer adds to a manifest


def remembered(args, world: World) -> dict:
    """What the newest checkpoint on any node says was asked, {} for a run without one. Its files are not verified
    yet.

    Raises UsageError where -resume names no checkpoint, and is needed.
    """
    answers = distributed.gather_json(_peek(args) if world.local_rank == 0 else [], world)
    found = max((answer for answer in answers if answer), key=lambda answer: answer[0], default=None)
    if found is None and args.resume:
        raise UsageError(f"-resume {args.resume}: there is no checkpoint; a run's folder, its checkpoints folder or "
                         f"one checkpoint is wanted")  # fmt: skip
    return found[1] if found else {}


def _peek(args):
    own = run_folder.path_of(args) / "checkpoints"
    other = [Path(args.resume), Path(args.resume) / "checkpoints"] if args.resume else []
    try:
        inside = [] if run_folder.starts_anew(args) else stored.listed(own)
        inside += [entry for folder in other for entry in stored.listed(folder)]
        folders = [folder for _, folder, _ in inside] + [f for f in other if (f / "manifest.json").is_file()]
    except OSError as error:
        log.warning("%s or -resume %s: %s", own, args.resume, error)
        return []
    for folder in folders:
        if asked := _asked_there(folder):
            return [stored.order(folder.name), asked]
    return [stored.order(""), {}] if folders else []


def _asked_there(folder):
    try:
        return checkpoint.read_manifest(folder).get("asked")
    except (shards.Damaged, UsageError):  # told when it is its turn to be taken
        return None


def check_start(args, plan: Plan, before: dict, model: torch.nn.Module, splits: dict):
    """Raises UsageError, while nothing has been written, for what could not go on from where it is to, and for -best
    of a run without a val split."""
    check_allowed(args, before)
    if args.best and "val" not in splits:
        raise UsageError(f"-best {args.best}: there is no val split to choose by")
    if before and not (args.eval or args.dry):
        check_changes(before, asked(args, plan), args.allow_change)
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


def check_allowed(args, before: dict):
    """Raises UsageError for an -allow_change that names nothing."""
    known = sorted({*vars(args), *before, *OTHERS})
    for name in set(args.allow_change) - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"-allow_change {name}: there is no such flag{f' (do you mean {close[0]}?)' if close else ''}"
        )


def check_changes(before: dict, now: dict, allowed: list[str]):
    """Raises UsageError that lists what bends the trajectory, old and new, unless -allow_change names it.

    What is allowed is told, and flags that only one side knows, as after a change of the code.
    """
    changed = [name for name in sorted(bending({**before, **now})) if before.get(name) != now.get(name)]
    told = {name: f"-{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}" for name in changed}
    refused = [name for name in changed if name in before and name in now and name not in allowed]
    if refused:
        words = " ".join(f"-allow_change {name}" for name in refused)
        raise UsageError(f"-model {now['model']} would go on with other settings: "
                         f"{', '.join(told[name] for name in refused)}; keep them, or add {words}, or start anew "
                         f"with -reset or another -model")  # fmt: skip
    if changed:
        log.warning("going on with other settings: %s", ", ".join(told.values()))


def bending(asked: dict) -> dict:
    """Of these flags and values, those that bend a run's trajectory."""
    return {name: value for name, value in asked.items() if name not in HARMLESS and not name.startswith("slurm")}


def check_known(found):
    """Raises UsageError for a checkpoint whose entries are not those that this code writes."""
    wanted = FACTS | {"format", "tensors", "shards", "pieces", "crc32"}
    odd = {*found.manifest} ^ wanted or {*found.manifest["state"]} ^ {*vars(State())}
    if odd:
        raise UsageError(f"{found.folder}: written by another version of the code ({found.manifest.get('about')}): "
                         f"{', '.join(sorted(odd))} is missing there or unknown here; take that version, or "
                         f"-weights, or -reset")  # fmt: skip


def state(manifest: dict, plan: Plan) -> State:
    """How far the run is, in steps of this plan: the same share of the epoch is done if -batch_size or the number of
    samples was allowed to change."""
    saved, before = State(**manifest["state"]), manifest["asked"]
    old = Plan(before["samples"], before["batch_size"], before["micro_batch"], before["drop_last"])
    if (old.batch, old.steps) == (plan.batch, plan.steps):
        return saved
    done = saved.step - saved.epoch * old.steps
    now = plan.steps if done == old.steps else min(done * old.batch // plan.batch, plan.steps)
    log.warning("step %d is step %d of this -batch_size", saved.step, saved.epoch * plan.steps + now)
    saved.step = saved.epoch * plan.steps + now
    return saved


def load(found, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World, allowed=()):
    """Fills the model and the optimizer from a verified checkpoint, whatever number of ranks wrote it.

    `allowed`, of -allow_change: with "optimizer" or "momentum" one of another kind begins anew, with "nan" weights
    may be what they are. Raises UsageError where its tensors are not the model's, or a weight is not finite.
    """
    fresh = not optimizer.state
    prepare(optimizer)
    tensors = all_tensors(model, optimizer)
    there, here = found.manifest["tensors"], checkpoint.schema(tensors)
    never = [name for name in here if name.startswith("optim.") and name not in there]
    here = {name: facts for name, facts in here.items() if name not in never}
    anew = {"optimizer", "momentum"} & {*allowed} and _optim(there) != _optim(here)
    if anew:
        log.warning("%s: its optimizer is another one: this one begins without memory", found.folder)
        there, here = ({n: facts for n, facts in names.items() if n.startswith("model.")} for names in (there, here))
    if there != here:
        odd = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
        told = ", ".join(f"{name} was {there.get(name)} and is {here.get(name)}" for name in odd[:4])
        raise UsageError(f"{found.folder} is of another model or optimizer: {told}{', ...' if len(odd) > 4 else ''}")
    _fill(found, {name: tensors[name] for name in here}, world)
    _check_finite(found, model, world, allowed)
    if anew and fresh:
        optimizer.state.clear()
    forget(model, optimizer, never if fresh and not anew else [])


def _optim(schema):
    return {name: facts for name, facts in schema.items() if name.startswith("optim.")}


@torch.no_grad()
def _fill(found, tensors, world):
    if found.source in (None, world.rank):
        shards.read(found.folder, found.manifest["pieces"], tensors)
    for name in sorted(tensors) if found.source is not None else ():
        values = tensors[name].detach().contiguous()
        dist.broadcast(values.reshape(-1).view(torch.uint8), found.source)
        tensors[name].copy_(values)


def _check_finite(found, model, world, allowed):
    local = {name: getattr(value, "to_local", lambda v=value: v)() for name, value in model.named_parameters()}
    mine = [name for name, value in local.items() if not torch.isfinite(value).all()]
    odd = [name for names in distributed.gather_json(mine, world) for name in names]
    if odd and "nan" not in allowed:
        raise UsageError(f"{found.folder}: {odd[0]} and {len({*odd}) - 1} more are not finite; remove it to go on "
                         f"from an older checkpoint, or take it as it is with -allow_change nan")  # fmt: skip


def forget(model, optimizer, names: list[str]):
    """Drops the optimizer's memory of parameters that had none when the checkpoint was made."""
    for name, parameter in model.named_parameters():
        if any(word.startswith(f"optim.{name}.") for word in names):
            optimizer.state.pop(parameter, None)
