"""Checks that all ranks train the same model, and that checkpoints have all that training changes."""

import contextlib
import dataclasses
import functools
import io
import logging
import math
import pickle
import re
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lib.core.buffers import is_statistic, take_first
from lib.core.optimizer import parameters_of
from lib.utils import distributed, seeding
from lib.utils.checkpoint import shards
from lib.utils.checkpoint.state import find_parts, unwrap
from lib.utils.data.fetch import lists, nested, option
from lib.utils.data.plan import MicroBatch
from lib.utils.errors import UsageError, call_optional

log = logging.getLogger(__name__)
# The attributes of lib/trainer/trainer.py as the template has them, and those that a subclass may replace.
OF_TRAINER = set(
    """all_optimizers args checkpoints checks config engine folder has_stepped is_evaluating is_loaded is_unscaled
    is_whole loaders logger logs_scalars loss loss_sums marks measured metrics micro_batch model
    more_optimizers must_wait of_base optimizer pending_losses pending_norms pending_saves place plan rate saved
    scaler schedule state stop total_steps trained val_splits world""".split()
)
MAY_REPLACE = {*"loaders logger loss model more_optimizers optimizer schedule total_steps val_splits".split()}
OF_MODULES = {*vars(nn.Module()), *"found_odd had_classes_first had_either".split()} - {"training"}
OF_OPTIMIZERS = {*vars(torch.optim.LBFGS([torch.zeros(1)])), "found_inf"} - {"_optimizer_step_post_hooks"}
NOT_OURS = r"scripts/|tests/|lib/(config|launch|run|utils/(checkpoint|watchdog))\b|.*/python3[^/]*/"
OURS = re.compile(f"{re.escape(str(Path(__file__).parents[2]))}/(?!{NOT_OURS})")  # files that a fork changes, or adds
PLAIN = int | float | str | tuple
CODE = MethodType, BuiltinFunctionType, functools.partial, type, ModuleType  # functions may keep values
UNTRAINED = "no optimizer trains %s (%d in all), which has a gradient"
OTHER = "%s (%d in all) is another value on other ranks, or in an earlier start: if it matters, seed it, or save it"
IDLE_STEP = "optimizer_step lets no optimizer step; gradients of several do not add up: see -batch_size"
IDLE = "no step has trained %s (%d in all): no gradient reached it"
LARGE = "%s (%d in all) is too large to be compared: if training changes it, give it a state_dict"
MOST_BYTES, MOST_VALUES, MOST_ROWS, MOST_PARTS = 1 << 25, 1 << 14, 1 << 12, 64  # of a value, an array, lists


class Checks:
    """What is checked before each evaluation and save of a trainer, on all ranks alike."""

    def __init__(self, trainer: Any):
        roots = [root for part, root in find_parts(trainer).modules.items() if part != "model"]
        for one in [one for root in roots for one in root.modules()]:
            if type(one).__module__ == "torch.nn.modules.loss":  # so that an edit of its weights counts
                one._non_persistent_buffers_set |= {*one._buffers}
        self.trainer, self.parts = trainer, parts_of(trainer)
        self.schema = shards.schema(find_parts(trainer).weights())
        data = trainer.loaders["train"].dataset
        if trainer.args.shuffle and lists(data, "weights") and option(data, "sampler") is None:
            raise UsageError("the training samples got their weights after get_dataset, too late: set them there")
        is_given = trainer.of_base["loss"] == id(trainer.loss) and type(trainer.loss).__module__.startswith("torch.")
        is_weighted = type(trainer.loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and trainer.loss.weight is not None
        if is_given and (is_weighted or getattr(trainer.loss, "reduction", "mean") == "sum"):
            raise UsageError(f"-loss {trainer.args.loss} must be the mean over a batch, no sum; see lib/core/loss.py")
        for group in [group for one in find_parts(trainer).optimizers.values() for group in one.param_groups]:
            group["as_made"] = {key: one for key, one in group.items() if isinstance(one, PLAIN) and "lr" not in key}
        self.compare("at the start: of the samples, a loader gives each its share")
        self.said: dict[str, list[str]] = {}  # the last warnings, and the parameters in them
        self.made = plain_values(trainer)  # before the first step
        self.values: dict[str, Any] = {}  # the same after the first step, which may build caches
        self.fixed: dict[str, str] = {}  # of what the first step changed, and of tensors: what has not changed since
        self.before: dict[str, str] = {}  # the same of the start that saved the checkpoint
        self.agreed = 0  # the last step at which the ranks had the same weights
        self.count = 0  # of the checks before a save
        self.steps = 0  # of this start
        self.changed: list[str] = []  # what training_step changes
        self.saved, self.validated = {}, {}  # marks of weights: of the last step's save, of the last validation
        self.taken: Any = None, None  # what the usual training_step has returned last, and the batch that it got

    def count_step(self, norm: Tensor) -> None:
        """Count a step; name what went wrong in it, once; after the first one, note what no checkpoint has."""
        if not (self.trainer.has_stepped or IDLE_STEP in self.said) and math.isfinite(norm):
            log.warning(IDLE_STEP)
            self.said[IDLE_STEP] = []
        if not self.steps:
            self.check_shapes()
        self.values = self.values or plain_values(self.trainer)
        self.steps += 1

    def check_shapes(self) -> None:
        """Raise UsageError for a tensor that has another shape or type than at the start, or is another."""
        now = shards.schema(find_parts(self.trainer).weights())
        for name in [name for name in {**self.schema, **now} if self.schema.get(name) != now.get(name)]:
            fault = f"{name} was {self.schema.get(name)} at the start and is {now.get(name)}"
            raise UsageError(f"{fault}: no start could continue; make it in get_model with its last type and shape")

    @contextlib.contextmanager
    def watch_pass(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Name what a pass of a start's steps 2, 11, 101, or of an epoch's first, changes: tensors, states, a seed.

        At a run's first step a teacher is a copy of the model, and a layer may take its first values from the data.
        """
        is_due = self.trainer.state.step and (self.steps in (0, 1, 10, 100) or micro_batch.step == 0)
        # In the first pass after a resume, a layer may take its first values again: so also without other parts.
        watched = is_due and micro_batch.first and (micro_batch.step_parts > 1 or not self.steps) and not self.changed
        before = self.marks_of_pass() if watched else {}
        place = seeding.PASS, self.trainer.args.seed, self.trainer.state.step, micro_batch.number
        before["torch's seed"] = seeding.hash_ints(*place)  # which call_training_step sets
        yield
        odd = [name for name, mark in (self.marks_of_pass() if watched else {}).items() if mark != before.get(name)]
        if micro_batch.step_parts == 1:  # buffers and others then change once a step, as on any number of processes
            odd = [name for name in odd if isinstance(find_parts(self.trainer).weights().get(name), nn.Parameter)]
        self.changed += odd
        if watched and self.changed:
            fault = f"training_step changes {', '.join(self.changed[:4])} ({len(self.changed)}), once a micro-batch"
            log.warning("%s: other processes do so another number of times; optimizer_step does once", fault)

    def marks_of_pass(self) -> dict[str, Any]:
        """Return marks of what no pass should change on this rank."""
        others = {"torch's seed": torch.initial_seed(), "self.state": repr(self.trainer.state)}
        others["the number of collectives"] = self.count_collectives()
        return self.checksums(lambda name, _: not is_statistic(name)) | others

    def count_collectives(self) -> int:
        """Return how many this rank has joined; 0 where passes have some (DDP's, FSDP's), or no backend counts."""
        world, is_exact = self.trainer.world, self.trainer.plan.engine == "exact"
        is_counted = is_exact and self.trainer.args.parallel != "fsdp" and world.device.type == "cpu"
        group: Any = torch.distributed.group.WORLD if is_counted and world.size > 1 else None
        return group._get_sequence_number_for_group() if group else 0

    def checksums(self, is_wanted: Callable[[str, Tensor], bool], most: int = sys.maxsize) -> dict[str, Any]:
        """Return marks of the parts' wanted tensors on this rank, by `most` values of each, and of other states."""
        parts = find_parts(self.trainer)
        weights = {name: shards.local_part(one) for name, one in parts.weights().items() if is_wanted(name, one)}
        large = {name: one.detach().reshape(-1) for name, one in weights.items() if one.numel() > most}
        weights |= {name: one[:: one.numel() // most + 1] for name, one in large.items()}
        return shards.checksums(weights) | {name: Mark().of(one.state_dict()) for name, one in parts.others.items()}

    def run(self, saves: bool = False) -> None:
        """Name what is trained by no optimizer; before a save, what no checkpoint has; compare the ranks' weights.

        Raises UsageError if a module or an optimizer was made after the start, RuntimeError if the copies differ.
        """
        parts, state = find_parts(self.trainer), self.trainer.state
        if other := self.parts ^ parts_of(self.trainer):
            name = min(name for name, _ in other)
            raise UsageError(f"{name} was made or replaced after the start: the trainer's __init__ must make it")
        self.check_shapes()
        self.trainer.scheduled_groups()  # notes the rates of new ones
        trained = {*parameters_of(self.trainer.all_optimizers)}
        bare = {f"trainer.{key}": one for key, one in vars(self.trainer).items() if isinstance(one, nn.Parameter)}
        named = {**bare, **parts.parameters()}.items()
        known = {one for optimizer in self.trainer.all_optimizers for one in optimizer.state}
        odd = [name for name, one in named if one.grad is not None and one not in trained]
        idle = [name for name, one in named if one in trained - known and one.requires_grad and one.grad is None]
        self.count += saves
        is_last = self.trainer.stop.agreed or self.trainer.is_done()
        is_turn = is_last or self.count & (self.count - 1) == 0  # at 1, 2, 4, 8 and so on
        now = plain_values(self.trainer) if saves and self.values and is_turn else {}
        same = {name: one for name, one in now.items() if one not in (None, LARGE) and one == self.values.get(name)}
        kept = {name: str(mark) for name, mark in same.items() if type(mark) is str or mark != self.made.get(name)}
        self.fixed = {f"{name} {mark}".rpartition(" ")[0]: mark for name, mark in kept.items()} if now else self.fixed
        others = [*distributed.gather(self.fixed, self.trainer.world), self.before]
        parted = [name for name, mark in self.fixed.items() if any(one.get(name, mark) != mark for one in others)]
        is_due = known and self.steps and self.agreed != state.step  # no step has trained what an epoch's end thaws
        large = [name for name, mark in now.items() if mark == LARGE and name.startswith("trainer.")]
        for text, names in ((UNTRAINED, odd), (IDLE, idle if is_due else []), (OTHER, parted), (LARGE, large)):
            if names and names != self.said.get(text):
                log.warning(text, names[0], len(names))
                self.said[text] = names
        before = {**dict.fromkeys(now, "not there"), **self.values} if self.values else now
        names = [name for name, mark in now.items() if None not in (mark, before[name]) and mark != before[name]]
        self.values = before | dict.fromkeys(names)  # None: it is named once
        if names:
            advice = "right if nothing needs it later; else make it a saved buffer or a state, alike on all ranks"
            log.warning("training changes %s (%d), in no checkpoint: %s", ", ".join(names[:32]), len(names), advice)
        are_parted = self.trainer.plan.engine == "stock" and self.trainer.world.size > 1
        for root in parts.modules.values() if are_parted else ():  # DDP shares buffers in the next pass
            take_first([*root.buffers(), *(one for name, one in root.named_parameters() if is_statistic(name))])
        self.compare(f"at step {state.step}; at step {self.agreed} all were the same")
        self.agreed = state.step
        self.saved = self.marks(states=False) if saves else {}

    def marks(self, states: bool = True) -> dict[str, Any]:
        """Return marks of parameters and statistics, by some of their values; with `states` also of all else."""
        is_own = self.trainer.world.rank == 0 or self.trainer.plan.engine == "exact"  # else rank 0 has the buffers
        keeps = lambda name, one: isinstance(one, nn.Parameter) or (is_own and (states or is_statistic(name)))  # noqa: E731
        found, others = self.checksums(keeps, MOST_VALUES), find_parts(self.trainer).others
        return {name: mark for name, mark in found.items() if states or name not in others}

    def has_changed(self) -> bool:
        """Return whether any rank's weights differ from those of the last validation. All ranks call this."""
        is_other = self.validated not in ({}, self.marks(states=False))
        return bool(distributed.all_reduce_max([is_other], self.trainer.world)[0])

    def check_saved(self) -> None:
        """Raise UsageError if weights differ from those of the last step's save: a resume would lose the change."""
        saved, self.saved = self.saved, {}
        now = self.marks(states=False) if saved else {}
        names = [name for name in saved if saved[name] != now.get(name)]
        if names:
            fault = f"{names[0]} ({len(names)} in all) has changed since step {self.agreed} was saved"
            raise UsageError(f"{fault}: a resume may repeat that, or lose it; let on_epoch_end() do it")

    def compare(self, when: str) -> None:
        """Compare all copies of weights and states. Raises RuntimeError on all ranks, which call this together."""
        mine = self.checksums(lambda _, one: not shards.is_sharded(one)) if self.trainer.world.size > 1 else {}
        mine |= {"self.state": repr(dataclasses.replace(self.trainer.state, unlogged={}))}
        first = distributed.broadcast(mine, self.trainer.world)
        odd = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
        parted = [(rank, names[0]) for rank, names in enumerate(distributed.gather(odd, self.trainer.world)) if names]
        if parted:
            name, ranks = parted[0][1], ", ".join(str(rank) for rank, _ in parted)
            fault = f"the copies of {name} differ: rank {ranks} and rank 0 have other values {when}"
            raise RuntimeError(f"{fault}; each process must make them alike")


def check_rate(group: dict) -> None:
    """Raise UsageError if something has set a group's learning rate since the last step, as torch's schedules do."""
    if group["lr"] != group.get("lr_set", group["lr"]):
        fault = f"something set the learning rate to {float(group['lr']):.4g}, which the next step overwrites"
        raise UsageError(f"{fault}: override set_learning_rate, which sets it, or change a group's lr_scale")


def parts_of(trainer: Any) -> set[tuple[str, int]]:
    """Return names and ids of what a trainer has from its start on: parts with a state, the loaders, the plan."""
    parts, loaders = find_parts(trainer), {f"the loader of {split}": one for split, one in trainer.loaders.items()}
    named = {**parts.modules, **parts.optimizers, **parts.others, **loaders, "self.plan": trainer.plan}
    return {(name, id(one)) for name, one in named.items()}


def check_names(trainer: Any) -> None:
    """Raise UsageError for attributes of a subclass in place of what the trainer itself has under their names."""
    for name, own in sorted(vars(trainer).items()):
        is_fixed = name in OF_TRAINER - MAY_REPLACE - {"of_base"}
        replaced = is_fixed and id(own) != trainer.of_base.get(name, id(None))
        hides = callable(getattr(type(trainer), name, None)) and not callable(own)
        if replaced or hides or (name == "schedule" and not isinstance(own, dict)):
            raise UsageError(f"self.{name} is a {type(own).__name__}: the trainer needs that name, take another")
    call_optional("scripts.check_plugins", "warn", trainer)


def plain_values(trainer: Any) -> dict[str, Any]:
    """Return a mark, the same for equal values, of what training may change and no checkpoint has, by name.

    They are attributes that a trainer adds, those of optimizers, those and hooks of its modules, whether these train;
    numbers, texts, arrays, samplers and functions of datasets; variables of classes, their files, and the project's.
    """
    parts = find_parts(trainer)
    skipped = {id(trainer), id(torch.default_generator), *(number for _, number in parts_of(trainer))}
    skipped |= {id(kept) for one in parts.optimizers.values() for kept in (one.state, one.param_groups)}
    storages = {one.untyped_storage().data_ptr() for one in parts.weights().values() if not shards.is_sharded(one)}
    of_trainer = OF_TRAINER - {"schedule", "total_steps"}  # which a trainer may change
    own = vars(trainer).keys() - of_trainer - (trainer.state_dict().keys() if "self" in parts.others else set())
    named: dict[str, Any] = {f"trainer.{key}": getattr(trainer, key) for key in sorted(own)}
    named = {name: one.detach() if isinstance(one, Tensor) else one for name, one in named.items()}
    named |= variables([trainer, *(module for root in parts.modules.values() for module in root.modules())])
    for part, root in parts.modules.items():
        of_ddp = {**root._buffers, "comm_hooks": getattr(root, "_comm_hooks", None)}  # which no checkpoint has
        named |= {f"{part}.{key}": value for key, value in of_ddp.items()}
        for name, module in unwrap(root).named_modules(prefix=part):
            hooks = [*filter(is_own, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])]
            forward = getattr(getattr(module, "forward", None), "__qualname__", "")  # it may be replaced
            kept = {"hooks": hooks, **module._buffers, **vars(module), "forward": forward}.items()  # or in `storages`
            named |= {f"{name}.{key}": one for key, one in kept if not (key in OF_MODULES or isinstance(one, CODE))}
    for name, one in parts.parameters().items():
        named |= {f"{name}.{key}": value for key, value in vars(one).items() if type(one) is nn.Parameter}
    for split, loader in trainer.loaders.items():
        for one in [one for one in nested(loader.dataset) if not hasattr(one, "set_epoch")]:
            for key, value in {"weights": None, **getattr(one, "__dict__", {})}.items():  # which may come later
                is_state = isinstance(value, PLAIN | set | None) or key in ("on_device", "tensors", "weights")
                is_state |= hasattr(value, "get_obj")  # of multiprocessing
                is_state |= key == "sampler" and not hasattr(value, "set_epoch")
                is_state |= isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) < MOST_BYTES
                if isinstance(value, list | dict) and not is_state:  # a cache grows
                    entries = [*value.values()] if isinstance(value, dict) else value
                    key, value = f"{key} of {len(value)}", entries[:: len(value) // MOST_ROWS + 1]
                    is_state = all(isinstance(one, PLAIN | Tensor | np.ndarray) for one in value)
                own = [] if is_state else own_parts(value)  # else a library's, which reading may change: by its id
                if is_state or callable(value) or any(map(callable, own)):
                    place = f"the {split} samples' {key} (unseen by loaders: see set_epoch)"
                    named.setdefault(place, []).append(value if is_state else own or id(value))
    for part, optimizer in parts.optimizers.items():
        own = {key: value for key, value in vars(optimizer).items() if not isinstance(value, CODE)}
        named |= {f"{part}.{key}": own[key] for key in own.keys() - OF_OPTIMIZERS - optimizer.state_dict().keys()}
    marks = {name: Mark(skipped, storages).of(value) for name, value in named.items()}
    shapes = {name: tuple(one.shape) for name, one in named.items() if isinstance(one, Tensor | np.ndarray)}
    return marks | {name: f"{shape} {marks[name]}" for name, shape in shapes.items() if marks[name] is not None}


def variables(objects: list[Any]) -> dict[str, Any]:
    """Return the variables of the objects' classes, and of the files with these, but not of installed packages."""
    loaded = [(name, one, getattr(one, "__dict__", {})) for name, one in [*sys.modules.items()] if "__" not in name]
    places: dict[str, Any] = {name: one for name, one, its in loaded if OURS.match(str(its.get("__file__")))}
    kinds = {kind for one in objects for kind in type(one).__mro__ if is_own(kind)}
    places |= {kind.__module__: sys.modules.get(kind.__module__, kind) for kind in kinds}  # some are in no module
    classes = {one for place in places.values() for one in vars(place).values() if isinstance(one, type)}
    places |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in {*kinds, *filter(is_own, classes)}}
    named = [(name, key, value) for name, place in places.items() for key, value in vars(place).items()]
    return {f"{name}.{key}": one for name, key, one in named if "__" not in key and not isinstance(one, CODE)}


def own_parts(value: Any, depth: int = 9, seen: set[int] | None = None) -> list[Any]:
    """Return a value if its class is the project's, or what a library's transform is composed of that is."""
    if is_own(type(value)) or isinstance(value, FunctionType):
        return [value]
    seen = set() if seen is None else seen
    is_new = depth and id(value) not in seen and len(seen) < MOST_ROWS
    seen.add(id(value))
    inner = getattr(value, "__dict__", value)
    inner = [*inner.values()] if isinstance(inner, dict) else inner
    is_short = isinstance(inner, list | tuple) and len(inner) < MOST_PARTS and is_new
    return [part for one in inner for part in own_parts(one, depth - 1, seen)] if is_short else []


def is_own(one: Any) -> bool:
    """Return whether a class, a function or an object's class is neither Python's nor an installed package's."""
    name = getattr(one, "__module__", None) or "builtins"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not re.search("(site|dist)-packages", file) and name.partition(".")[0] not in sys.stdlib_module_names


class Mark(pickle.Pickler):
    """Computes the CRC32 of a value's pickle. What has a state itself is no part of it."""

    def __init__(self, skipped: Collection[int] = (), storages: Collection[int] = (), whole: Any = None):
        super().__init__(self)
        self.fast = True  # without references, which depend on more than the value
        self.skipped, self.storages, self.crc, self.left, self.is_deep = skipped, storages, 0, MOST_BYTES, False
        self.whole, self.seen = whole or self, set()  # the mark of the whole, of whose objects each counts once

    def of(self, value: Any) -> Any:
        """Return the CRC32, another one each time of an iterator; LARGE, or None of what cannot be pickled."""
        if isinstance(value, Tensor) and value.grad_fn is not None:  # made by each pass
            return None
        try:
            self.dump(value)
        except Exception as error:  # noqa: BLE001  # of any class
            self.whole.is_deep |= isinstance(error, RecursionError)  # the whole has no mark then
            if not isinstance(error, OverflowError):
                return None
        if self.whole.is_deep:
            return None
        return self.crc if self.whole.left >= 0 else LARGE

    def write(self, data: Any) -> None:
        """Take a part of the pickle."""
        self.crc = zlib.crc32(data, self.crc)

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object: of a tensor its checksum, unless it is the model's or has a gradient."""
        if id(value) in self.skipped or id(value) in self.whole.seen:
            return ""
        if hasattr(value, "get_obj"):  # of multiprocessing
            return bytes(value.get_obj())
        if hasattr(value, "__dict__") and not isinstance(value, Collection) and is_own(type(value)):
            self.whole.seen.add(id(value))
            return [(key, Mark(self.skipped, self.storages, self.whole).of(one)) for key, one in vars(value).items()]
        if isinstance(value, set):
            return sorted(map(repr, value))
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            return time.monotonic_ns()
        if isinstance(value, Tensor):
            is_other = value.grad_fn is not None or shards.is_sharded(value) or value.layout is not torch.strided
            if is_other or value.untyped_storage().data_ptr() in self.storages:
                return ""
        if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) > MOST_VALUES:  # some of the values
            return tuple(value.shape), value.reshape(-1)[:: math.prod(value.shape) // MOST_VALUES + 1]
        self.whole.left -= value.nbytes if isinstance(value, Tensor | np.ndarray) else max(256, sys.getsizeof(value))
        if self.whole.left < 0:
            raise OverflowError("too large")
        if isinstance(value, FunctionType):  # with what it keeps
            kept = [cell.cell_contents for cell in value.__closure__ or ()]
            kept += [one for one in (value.__defaults__, value.__kwdefaults__, vars(value)) if one]
            return value.__qualname__, value.__code__.co_firstlineno, *kept
        return str(shards.checksums({"": value})) if isinstance(value, Tensor) else None
