"""The past of a run: finds its newest good checkpoint, checks that the run may continue from it, and loads it."""

import dataclasses
import errno
import functools
import importlib.util
import json
import logging
import math
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lib.utils import distributed, files
from lib.utils.checkpoint import run_folder, shards, state, weights
from lib.utils.data.plan import Plan
from lib.utils.errors import UsageError, load_optional

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, *files.UNFIT)  # no file of a run's
SETTLED = ("batch_size", "micro_batch", "threads")  # flags that the first start decides where nobody gave them
MAY_DIFFER = ("processor", "torch", "pillow", "torchvision")  # facts that may change bits


@dataclasses.dataclass
class Past:
    """A checkpoint to continue from, verified."""

    folder: Path
    manifest: dict
    damaged: list[str]  # what is wrong with newer ones
    sender: int  # a rank whose disk has it whole
    missing_on: dict[int, str]  # where nodes share no disk: writers that lack it or a file of it, and why


def read_start(args: "Args", world: distributed.World) -> dict:
    """Return what the run's first start settled, even if it never saved; {} for a new run. All ranks call this."""
    path = run_folder.path_of(args) / "start.json"

    def read() -> dict:
        if run_folder.is_reset_due(args, world):
            return {}
        found, outcome = run_folder.read_json(path), run_folder.read_json(path.with_name("outcome.json"))
        is_saved = run_folder.list_checkpoints(path.parent / "checkpoints")
        if path.exists() and not found and not is_saved:
            raise UsageError(f"{path} does not hold what the run's first start settled: -reset starts from scratch")
        if outcome.get("state") == "failed" and not (outcome.get("lost_peer") or is_saved):  # other flags may mend it
            found = {name: value for name, value in found.items() if name == "resume" and value}
        return found

    return next(filter(None, world.on_writers(read)), {})


def find(args: "Args", world: distributed.World, start: dict | None = None) -> Past | None:
    """Return the newest good checkpoint of the run, or else of -resume; None for a new run.

    A run whose first `start` was given -resume, and that has no checkpoint yet, still begins there. Raises UsageError
    if -resume names none, there are some and none is good, or the newest has another format; OSError if a disk fails.
    """
    if args.eval:
        return None
    own = run_folder.path_of(args) / "checkpoints"
    origin = args.resume or (start or {}).get("resume")
    mine, other = (Path(os.path.realpath(path)) for path in (own, origin or ""))
    if origin and (mine in other.parents or (args.reset and mine == other / "checkpoints")):
        raise UsageError(f"-resume {origin} is of this run: to start from an older checkpoint, take another -model")
    past = find_newest_good(own, world, leave_out=run_folder.is_reset_due(args, world))
    steps = lambda: run_folder.read_json(own.parent / "outcome.json").get("step")  # noqa: E731
    if past is None and not (args.reset or args.debug) and any(world.on_writers(steps)):
        raise UsageError(f"{own} has no checkpoint, though the run has taken steps: -reset starts from scratch")
    if past is None and origin:
        past = find_newest_good(other, world)
        if past is None:
            raise UsageError(f"-resume {origin}: there is no checkpoint (now): give a run's folder, or -reset")
        past.manifest["state"]["best"] = None  # its weights are not here
    return past


def find_newest_good(path: Path, world: distributed.World, leave_out: bool = False) -> Past | None:
    """Return the newest checkpoint at a path, whole on some disk, the same for all ranks; None if there is none.

    A node may `leave_out` those on its disk, whose old run is to be moved away. Raises UsageError if there are some
    and none is good, or the newest is of another format; OSError if the disk does not answer: they may be good.
    """
    on_disk = (lambda: [] if leave_out else _names(path)) if world.is_writer else None
    listed = distributed.gather_results(on_disk, world)
    here = listed[0 if world.shares_disk else world.rank]  # None: this node's writer looks at its disk
    damaged = []
    names = {name for listing in listed for name in listing or ()}
    for name in sorted(names, key=lambda name: (run_folder.checkpoint_number(name.name), name), reverse=True):
        look = functools.partial(_fault_of, path / name, world, name in (here or ()))
        faults = distributed.gather_results(None if here is None else look, world)
        good = [rank for rank, fault in enumerate(faults) if fault == ""]
        missing_on = {rank: fault for rank, fault in enumerate(faults) if fault}
        if good and not (missing_on and world.shares_disk):
            manifest = state.read_manifest(path / name) if world.rank == good[0] else None
            return Past(path / name, distributed.broadcast(manifest, world, good[0]), damaged, good[0], missing_on)
        damaged += [*missing_on.values()][:1]
    if damaged:
        raise UsageError(f"{damaged[0]}; no good checkpoint is left: -reset without -resume starts from scratch")
    return None


def _names(path: Path) -> list[Path]:
    """Return the checkpoints at a path: of a run's folder or its checkpoints folder, or the path itself."""
    itself = [path] if (path / "manifest.json").is_file() else []
    found = run_folder.list_checkpoints(path) or run_folder.list_checkpoints(path / "checkpoints") or itself
    return [entry.relative_to(path) for entry in found]


def _fault_of(folder: Path, world: distributed.World, there: bool) -> str:
    """Return what is missing or damaged of this rank's share of a checkpoint's files, "" if nothing is."""
    if not there:
        return f"{folder} is not there"
    if folder not in folder.parent.iterdir():  # a network disk shows it later; a listing does not come from memory
        raise OSError(errno.ESTALE, "another process on the same disk sees it, this one does not", str(folder))
    if folder.is_symlink():
        return f"{folder} is a link"
    try:
        manifest = state.read_manifest(folder)
        names = sorted(manifest["shards"])
        for file in names[world.rank :: world.size] if world.shares_disk else names:
            shards.verify(folder / file, manifest["shards"][file])
    except (shards.Damaged, OSError) as error:
        if isinstance(error, OSError) and error.errno not in MISSING:
            raise
        return str(error)
    return ""


def plan(args: "Args", data: dict, world: distributed.World, before: dict) -> Plan:
    """Return how this run cuts its samples, and which engine sums them: as its first start did, or by new flags.

    `data`: of `fingerprint.describe`; `before`: what the first start settled. Raises UsageError if nothing is left.
    """
    batch = args.batch_per_gpu * world.size if args.batch_per_gpu else args.batch_size
    if args.batch_per_gpu and args.batch_per_gpu == before.get("batch_per_gpu"):
        batch = before["batch_size"]
    micro = args.micro_batch or before.get("micro_batch") or math.ceil(batch / distributed.max_world_size(world))
    if args.drop_last and data["samples"] < batch:
        raise UsageError(f"-batch_size {batch} with -drop_last leaves nothing of {data['samples']} training samples")
    engine = before.get("engine", "exact" if world.device.type == "cpu" else "stock")
    if args.deterministic:
        load_optional("lib.core.exact", "-deterministic")  # which says if it is gone
        engine = "exact"
    elif args.deterministic is False or importlib.util.find_spec("lib.core.exact") is None:
        engine = "stock"
    plan = Plan(data["samples"], batch, micro, args.drop_last, data, engine)
    return dataclasses.replace(plan, total_steps=args.steps or args.epochs * plan.steps)


def config_to_save(args: "Args", plan: Plan) -> dict:
    """Return all flags as JSON has them, what the first start settled, the data, and what else bits depend on."""
    instructions = torch.backends.cpu.get_cpu_capability()
    processor = torch.cuda.get_device_name() if torch.cuda.is_initialized() else instructions
    facts = {"samples": plan.samples, "engine": plan.engine, "torch": torch.__version__}
    facts |= {"processor": processor, **{name: metadata.version(name) for name in ("pillow", "torchvision")}}
    settled = dict(zip(SETTLED, (plan.batch, plan.micro, torch.get_num_threads()), strict=True))
    return json.loads(json.dumps({**vars(args), **settled, **facts, **plan.data}, default=str))


def check_flags(args: "Args", plan: Plan, past: Past | None, before: dict, splits: dict) -> str:
    """Describe how flags and data differ from those `before`, where this is allowed; "" for no difference.

    A name that only one side knows, as after a change of the code, may differ; so may what MAY_DIFFER names. Without
    a checkpoint only the data are compared. Raises UsageError for what the run may not continue with.
    """
    for flag, value in (("best", args.best), ("stop_after", args.stop_after)):
        if value and not any(name.startswith("val") for name in splits):
            raise UsageError(f"-{flag} {value}: there is no val split to choose by")
    now, texts = config_to_save(args, plan), {}
    free = args.flag_rules.free | ({"epochs"} if args.steps else set())
    for name in sorted({*before, *now} - free if past or (args.eval and before) else {*before} & {*plan.data}):
        if before.get(name) != now.get(name):
            flag = f"-{name}" if name in vars(args) else name  # or a fact: samples, torch, processor
            texts[name] = f"{flag} was {before.get(name, 'unknown')!s:.99} and is {now.get(name, 'unknown')!s:.99}"
    text = ", ".join(texts.values())
    if past is None:
        return text
    allowed = {*args.allow_change, *MAY_DIFFER}
    facts = {*plan.data, *(name for name in before if name.endswith(" digest"))}  # those of a split that is gone, too
    if allowed & {"data", "samples"}:
        allowed |= facts
    if refused := ({*texts} & {*before} & {*now, *facts}) - allowed:
        allow = " ".join(sorted({f"-allow_change {'data' if name in facts else name}" for name in refused}))
        scratch = "another -model" if args.reset else "-reset or another -model"  # done once in a launch
        hint = f"keep them (-cfg RUN/config.yaml has all), or add {allow}, or start from scratch with {scratch}"
        shown = ", ".join(texts[name] for name in texts if name in {*refused, *MAY_DIFFER})  # these may be the cause
        raise UsageError(f"-model {args.model} would resume with other settings: {shown}; {hint}")
    named = (past.manifest["state"]["best"] or {"metric": ""})["metric"].partition("/")[0]
    digests = [sorted(one for one in data if one.startswith("val") and "digest" in one) for data in (before, now)]
    chosen = {named} if f"{named} samples" in before else {one[0].partition(" ")[0] for one in digests if one}
    if {f"{split} {fact}" for split in chosen for fact in ("digest", "samples")} & texts.keys():
        past.manifest["state"]["best"] = None  # it was measured on other data
    return text


def restore_state(past: Past | None, plan: Plan) -> state.State:
    """Return how far the run is, in steps of this plan.

    With another -batch_size or other data as many samples of the epoch count as done; under -steps, as many steps.
    """
    if past is None:
        return state.State()
    saved, before = state.State(**past.manifest["state"]), past.manifest["config"]
    old = Plan(before["samples"], before["batch_size"], before["micro_batch"], before["drop_last"])
    if not before.get("steps") and (old.batch, old.steps) != (plan.batch, plan.steps):
        epochs, done = divmod(saved.step, old.steps)
        step = epochs * plan.steps + min(done * old.batch // plan.batch, plan.steps - 1)
        saved.validated = step if saved.validated == saved.step else 0
        saved.step, saved.evaluated = step, saved.evaluated or done > 0
    saved.epoch = (saved.step - (not saved.evaluated)) // plan.steps  # the next one begins with what is due
    # A run that now ends here begins with its last validation.
    saved.evaluated &= saved.step < plan.total_steps or saved.validated == saved.step
    return saved


def load(past: Past, parts: state.Parts, world: distributed.World, args: "Args") -> None:
    """Fill a run's parts from a checkpoint. Raises UsageError if it is another's, or not finite, unless allowed."""
    for flag in ("resume", "weights") if past.folder.parent == run_folder.path_of(args) / "checkpoints" else ():
        if given := getattr(args, flag):
            log.info("-%s %s is not used: this run has checkpoints of its own", flag, given)
    allowed = {*args.allow_change, *(["lr_ratio"] if "lr_start" in args.allow_change else [])}
    if "optimizer_arg" in allowed:  # the options' names, of both
        words = [*args.optimizer_arg, *past.manifest["config"]["optimizer_arg"]]
        allowed |= {word.partition("=")[0] for word in words}
    for fault in past.damaged:
        log.warning("%s; an older checkpoint is taken", fault)
    saved, states = past.manifest["tensors"], past.manifest["states"]
    tensors = {**parts.weights(), **parts.make_empty(saved)}
    here: dict = shards.schema(tensors)
    for name in {*states} ^ {*parts.states({})}:  # as of a scheduler that only one of them has
        (saved if name in states else here)[name] = "a state"
    odd = sorted(name for name in {**saved, **here} if saved.get(name) != here.get(name))
    if odd:
        shown = ", ".join(f"{name} was {saved.get(name)} and is {here.get(name)}" for name in odd[:4])
        other = "is of another model, optimizer or trainer"
        raise UsageError(f"{past.folder} {other}: {shown}; -weights takes only a model's weights")
    if not past.missing_on or world.rank == past.sender:
        shards.read(past.folder, [*state.read_manifest(past.folder)["shards"]], tensors)  # those of this disk
    if past.missing_on:
        log.warning("rank %d: %s; rank %d sends it", *next(iter(past.missing_on.items())), past.sender)
        for tensor in tensors.values():
            distributed.broadcast_tensor(tensor, past.sender)
    parts.load(states, tensors, allowed)
    for name, part in parts.others.items() if allowed & {"batch_size", "epochs", "steps"} else ():
        if isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau):
            log.warning("%s keeps its old length, which is in its state", name)
    bad = weights.not_finite(parts.modules["model"], world)
    if bad and "nan" not in allowed:
        hint = "remove it to resume from an older checkpoint, or take it as it is with -allow_change nan"
        raise UsageError(f"{past.folder}: {bad[0]} and {len(bad) - 1} more are not finite; {hint}")


def best_weights(past: Past, world: distributed.World) -> dict[str, Tensor]:
    """Return the best weights on writers, if a node may lack them; forget lost ones. All ranks call this."""

    def read() -> tuple[str, dict[str, Tensor]]:
        try:
            step = past.manifest["state"]["best"]["step"]  # a newer checkpoint may have been there
            tensors = shards.read_weights(past.folder.parents[1] / "best" / weights.FILE, step)
        except (FileNotFoundError, shards.Damaged) as error:
            return str(error), {}
        return "", tensors if past.missing_on else {}

    answer = distributed.attempt(read if world.rank == past.sender else None, world)
    fault, tensors = distributed.broadcast(answer, world, past.sender)
    if fault:
        log.warning("%s; the best weights are lost: the next evaluation counts as the best", fault)
        past.manifest["state"]["best"] = None
    return tensors if world.is_writer else {}
