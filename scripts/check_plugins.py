"""Reads the files of a run's trainer and models for what has another effect here than in other programs."""

import ast
import contextlib
import inspect
import logging
import re
import sys
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from lib.config import args as config
from lib.config import plugins
from lib.core import loss, replicas
from lib.core.replicas import OURS
from lib.utils.checkpoint.shards import is_sharded
from lib.utils.checkpoint.state import find_parts, unwrap
from lib.utils.data.fetch import nested
from lib.utils.errors import UsageError, suggest
from scripts import check_code, check_model, check_samples, check_sums
from scripts.check_sums import name_of, text_of, walk

log = logging.getLogger(__name__)
OF_OTHERS = {"configure_optimizers", "training_step"}  # methods of a model that other programs call
WEIGHTED = {"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"}  # which divide by the targets' weights
HIDDEN = (
    "self.%s keeps %s, of which neither gradients are summed nor a checkpoint has the state: make it an attribute of "
    "the trainer itself, and not within another object"
)
DEPTH, MOST = 3, 100  # of what a trainer's attributes have: names below each other, and in each
CLIPPED = "%s has a hook of its own gradient, which gets that of a micro-batch: right if it is linear"
ADDING, EMPTY = {"append", "extend", "update", "add", "add_", "index_add_", "push", "put"}, {"[]", "{}", "None", "()"}
LOOPS = (ast.For, ast.While)
METHODS = {"evaluate", "validate", "save", "evaluate_best", "whole_weights"}  # which all processes call together
COLLECTIVE = METHODS | {"all_reduce", "all_gather", "all_gather_object", "gather", "broadcast", "barrier"}
GATHER = "evaluates: return Ratio(sum, count), or gather it in on_evaluation, without padding (count 0)"
OF_A_SHARE = {"evaluation_step": GATHER, "compute_metrics": GATHER}  # methods that see samples of one process
OF_A_SHARE |= {"training_step": "trains on: log_scalar() counts that of all, optimizer_step changes what is saved"}
IN_STEP = set("train_step training_step optimizer_step clip_gradients due_optimizers set_learning_rate".split())
BY_RANK = r"(not )?[\w.]*\b(is_main|is_writer)|(not )?[\w.]*\brank(\(\))?( == 0| != 0| > 0)?"  # if conditions
OF_LOADER = "next() of a loader seeds the generators, alike in each step, and gives each process other samples: "
OF_LOADER += "take a DataLoader of your own whose generator self.state.step seeds, or samples of the dataset by index"
OF_PARTS = {  # flags by which the run makes a trainer's parts
    "loss": ("loss", "label_smoothing", "class_weights"),
    "optimizer": ("optimizer", "optimizer_arg", "weight_decay", "momentum"),
}
WITH_MODES = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # layers that training mode changes
OWN_DRAWS = re.compile(r"\b((torch|random)\.Generator|default_rng|RandomState|Random)\(")  # which no run seeds
GENERATOR = (
    "what %s draws by its %s depends on what was read before it: draw by torch, numpy.random or random, which are "
    "seeded for each sample"
)
ADVICE = "changes with the number of micro-batches and processes"


def warn(trainer: Any) -> None:
    """Warn of what a trainer, a model and data have without effect. Raises UsageError as `refuse_without_effect`."""
    check_code.check(trainer)
    refuse_without_effect(trainer)
    check_samples.warn(trainer)  # on all processes, as what reads a sample may count it
    if trainer.world.is_main:
        check_model.warn_lost_layers(find_parts(trainer).modules)
        for check in (
            warn_of_epochs,
            warn_of_flags,
            warn_of_methods,
            warn_of_steps,
            warn_of_files,
            warn_of_parts,
        ):
            with contextlib.suppress(OSError, TypeError, KeyError, SyntaxError):  # in a notebook
                check(trainer)


def warn_of_parts(trainer: Any) -> None:
    """Warn of optimizers that a trainer does not find, and of hooks of gradients."""
    parts = find_parts(trainer)
    known = {id(one) for one in (*parts.optimizers.values(), *parts.modules.values())}
    left = [(name, one) for name, one in vars(trainer).items() if name not in replicas.OF_TRAINER]
    for name, one in left:
        if isinstance(one, torch.optim.Optimizer) and id(one) not in known:
            log.warning(HIDDEN, name, f"the optimizer {type(one).__name__}")
            break
        inner = getattr(one, "__dict__", one)
        inner = dict(enumerate(inner)) if isinstance(inner, list | tuple) else inner
        if isinstance(inner, dict) and id(one) not in known and name.count(".") < DEPTH and len(inner) < MOST:
            known.add(id(one))
            left += [(f"{name}.{key}", value) for key, value in inner.items()]
    hooked = [name for name, one in parts.parameters().items() if one._backward_hooks]
    if hooked and len(trainer.plan.cut(0)) > 1:
        log.warning(CLIPPED, hooked[0])


def classes_of(trainer: Any) -> tuple[list[type], type]:
    """Return a trainer's own classes, and the one that all extend."""
    kinds = type(trainer).__mro__
    base = [one for one in kinds if hasattr(one, "optimizer_step")][-1]
    return [*kinds[: kinds.index(base)]], base


def warn_of_methods(trainer: Any) -> None:
    """Warn of methods of a trainer or a model that nothing calls."""
    own, base = classes_of(trainer)
    model = type(unwrap(trainer.model)).__mro__  # under FSDP, its first class is torch's
    names = {name for kind in own for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"}
    names = names - {*dir(base), *dir(nn.Module)} | OF_OTHERS & {*dir(model[0])}
    names |= {name for name, one in vars(base).items() if inspect.isfunction(one) and name[0] != "_"} - {"fit"}
    files = {kind.__module__ for kind in {*own, *model, base}} - {"builtins"}
    files |= {"lib.core.optimizer", "lib.core.replicas", "lib.utils.checkpoint.just_in_time"}
    text = "".join(_source(sys.modules.get(file)) for file in files if not file.startswith("torch."))
    used = {*re.findall(r"(?<!def )\b\w+", text)}
    for name in [] if re.search(r"getattr\(self, [^\"']", text) else sorted(names):
        if name not in used:
            hint = suggest(name, vars(base).keys() - {name})
            log.warning("neither its file nor lib calls %s, of the trainer or the model%s", name, hint)


def warn_of_steps(trainer: Any) -> None:
    """Warn of flags that a step of one's own ignores, and of losses that FSDP does not sum."""
    args, step, update = trainer.args, _source(type(trainer).training_step), _source(type(trainer).optimizer_step)
    if args.train_metrics and step and not re.search(r"\.training_step\(|train_metrics", step):
        log.warning("-train_metrics: this training_step logs none; that of lib/trainer/trainer.py does")
    if args.parallel == "fsdp" and "full_tensor(" in step and not re.search("detach|no_grad", step):
        hint = "take -parallel ddp (detach() it if it is a figure)"
        log.warning("-parallel fsdp: a loss that adds full_tensor() gets a wrong gradient for it: %s", hint)
    called = r"clip_grad\b|clip_gradients|(?<!def )optimizer_step\(|self\.(?!due_optimizers|log_scalar)\w+\("
    if args.clip_grad and update and not re.search(called, update):
        log.warning("-clip_grad: this optimizer_step ignores it: let it call self.clip_gradients(due)")
    if args.fp16 and len(find_parts(trainer).optimizers) > 1 and re.search(r"clip_gradients\(\[", update):
        log.warning("-fp16: gradients keep the scaler's factor but for optimizers that clip_gradients gets")


def warn_of_files(trainer: Any) -> None:
    """Warn of what `faults` finds in files of a trainer, its modules and its loss, and `counters` in the data's."""
    own, base = classes_of(trainer)
    modules = {one for root in find_parts(trainer).modules.values() for one in root.modules()}
    parts = {kind for one in modules for kind in type(one).__mro__}
    # Of what is ignored, the trainer's own loss knows, too; of what passes keep, the checkpoints.
    known = {"targets"} if getattr(trainer.loss, "ignore_index", -100) != -100 else set()
    known |= set() if "losses.count_targets(" in _source(type(trainer).count_targets) else {"targets"}
    known |= {name for one in modules for name, _ in one.named_buffers(recurse=False)}
    in_modes = [
        getattr(one, "p", getattr(one, "track_running_stats", 1)) for one in modules if isinstance(one, WITH_MODES)
    ]
    is_cut, is_shared = len(trainer.plan.cut(0)) > 1, trainer.world.size > 1
    for module in {sys.modules.get(kind.__module__) for kind in {*own, *parts, base}}:
        source = _source(module) if OURS.match(getattr(module, "__file__", None) or "") else ""
        divided = _lines_of_sums(source) if module is loss else set()
        for line, fault in faults(source, is_cut, is_shared, known, has_modes=any(in_modes)):
            if line not in divided:
                log.warning("%s, line %d: %s", module.__file__, line, fault)
    for line, fault in faults_of_loss(trainer.loss, known) if is_cut and type(trainer.loss) in parts else ():
        log.warning("%s, line %d: %s", inspect.getfile(type(trainer.loss)), line, fault)
    loader = trainer.loaders["train"]
    kept = [value for one in nested(loader.dataset) for value in getattr(one, "__dict__", {}).values()]
    read = [*nested(loader.dataset), *(part for one in kept for part in replicas.own_parts(one))]
    for kind in {type(one) for one in read if replicas.is_own(type(one))}:
        for name in counters(_source(kind)) if loader.workers else ():
            log.warning("%s.%s is another one in each loader process (-workers)", kind.__name__, name)
        for name in generators(_source(kind)):
            log.warning(GENERATOR, kind.__name__, name)


def warn_of_flags(trainer: Any) -> None:
    """Warn of flags that were set for parts of a run of which its trainer has its own, which do not use them."""
    own, _ = classes_of(trainer)
    files = "".join(map(_source, {sys.modules.get(kind.__module__) for kind in own}))
    text = "".join(texts := [_source(kind) for kind in own])
    if "" in texts or re.search(r"\bargs[,)]", text):  # a function gets them all
        return
    skips_loss = "def training_step" in text and not re.search(r"self\.loss\b|\.training_step\(", text)
    parts = {"loss": None if skips_loss else trainer.loss, "optimizer": trainer.optimizer}
    used = {**getattr(parts["loss"], "__dict__", {}), **getattr(parts["optimizer"], "param_groups", [{}])[0]}
    used["optimizer"] = type(trainer.optimizer).__name__.lower()
    used["class_weights"] = trainer.args.class_weights if getattr(parts["loss"], "weight", None) is not None else None
    parser = config.new_parser()
    for kind in plugins.BUILDERS:
        parser.add_plugin_flags(sys.modules[f"lib.{kind}.{getattr(trainer.args, kind)}"], kind)
    for name, part in parts.items():
        inner = [*part.modules()] if isinstance(part, nn.Module) else [part]
        values = [value for one in inner for value in (one, *getattr(one, "__dict__", {}).values())]
        if any(id(value) == trainer.of_base[name] for value in values):
            continue
        for flag in OF_PARTS[name]:
            value, there = getattr(trainer.args, flag), used.get(flag)
            is_set = not _are_alike(value, parser.get_default(flag)) and value != there and (value or there)  # 0: off
            if is_set and not re.search(rf"args\.{flag}\b", files):
                log.warning("-%s: the training ignores it, as this trainer has its own %s", flag, name)


def _are_alike(value: Any, default: Any) -> bool:
    """Return whether a flag has its default, which may be a text."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value) == float(default)
    return str(value) == str(default)


def warn_of_epochs(trainer: Any) -> None:
    """Warn of schedules of torch that step with each step, and whose length is a number of epochs."""
    setter = _source(type(trainer).set_learning_rate)
    if ".step(" not in setter or "epoch" in setter or "plan.steps" in setter or trainer.plan.steps == 1:
        return
    for name, one in vars(trainer).items():
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
            ends = [getattr(one, key, 0) for key in ("T_max", "step_size")]
            last = max(*ends, *getattr(one, "milestones", ()))
            if 1 < last <= trainer.plan.epochs and last < trainer.plan.steps:
                advice = f"for {last:g} epochs write {last:g} * self.plan.steps"
                log.warning("self.%s counts steps, and its %g end within the first epoch: %s", name, last, advice)


def refuse_without_effect(trainer: Any) -> None:
    """Raise UsageError for hooks that FSDP never calls, and for torch schedules whose rates each step overwrites."""
    for one in find_parts(trainer).parameters().values():
        if is_sharded(one) and one._backward_hooks:
            hint = "call register_post_accumulate_grad_hook, or take -parallel ddp"
            raise UsageError(f"-parallel fsdp: a parameter has a register_hook, which FSDP never calls: {hint}")
    for optimizer in (trainer.optimizer, *trainer.more_optimizers):
        is_scheduled = any("initial_lr" in group for group in getattr(optimizer, "param_groups", ()))
        if is_scheduled and "lr_at(" in _source(type(trainer).set_learning_rate):
            fault = "a schedule of torch sets the learning rate, which each step sets by -lr_schedule"
            raise UsageError(f"{fault}: override set_learning_rate")


def faults(
    source: str, is_cut: bool, is_shared: bool = False, known: Collection[str] = (), has_modes: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield lines of a file, and what is wrong there: with losses if steps are cut, with evaluations, between passes.

    `is_shared`: there are several processes. `known`: attributes that are saved, and "targets" if those that a loss
    ignores are not counted. `has_modes`: a layer works otherwise in training mode.
    """
    tree = ast.parse(source)
    functions = [one for one in walk(tree) if isinstance(one, ast.FunctionDef)]
    imports = [one for one in walk(tree) if isinstance(one, ast.ImportFrom) and one.module == "torch.nn.functional"]
    functional = {name.asname or name.name for one in imports for name in one.names}
    gathers = re.search(r"\bdist\w*\.\w*(gather|reduce)|all_gather|all_reduce|\.reduce\(|torchmetrics", source)
    for line in _other_models(functions):
        yield line, "evaluation_step uses another model than the one that is kept: see evaluated_weights"
    for function in functions:
        if is_shared:
            if function.name in OF_A_SHARE and not gathers and "is_main" not in text_of(function):
                for line, name in _collected(function, functions):
                    yield line, f"self.{name} has what this process alone {OF_A_SHARE[function.name]}"
            yield from _own_loops(function)
            yield from _on_main_alone(function)
        clips = [one for one in _calls(function) if function.name == "training_step" and "clip_grad_" in name_of(one)]
        yield from (
            (one.lineno, "training_step clips no gradients, which come later: take -clip_grad") for one in clips
        )
        yield from _read_ahead(function)
        yield from _read_late(function)
        if function.name in ("on_evaluation", "on_epoch_end") and has_modes:
            yield from _in_training_mode(function, functions)
        for line, name in _handed_on(function, functions):
            if name not in known:
                yield line, f"self.{name} goes from pass to pass, but to no checkpoint and no other process"
        yield from _dropouts(function, functional) if "def training_step" not in source else ()  # which a model lacks
    yield from _read_in_step(functions, is_shared)
    if is_cut:
        yield from _no_means(tree, knows_targets="targets" in known)


def faults_of_loss(criterion: Any, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield lines of the file of a loss of one's own that is no mean over samples, and what is wrong there."""
    source = _source(type(criterion)) if OURS.match(inspect.getfile(type(criterion))) else ""
    if "self.reduction" in source and getattr(criterion, "reduction", "") != "sum":  # it has other ways, too
        return
    functions = [one for one in walk(ast.parse(source)) if isinstance(one, ast.FunctionDef) and one.name == "forward"]
    for line, is_counted in [found for one in functions for found in check_sums.find(one)]:
        place = line + inspect.getsourcelines(type(criterion))[1] - 1
        if not is_counted:
            yield place, f"a loss that is a sum {ADVICE}, unless it is divided by the number of samples"
        elif "targets" not in known and not hasattr(criterion, "ignore_index"):
            yield place, f"a mean over some targets, or weights of them, {ADVICE}: divide by the number of samples"


def _dropouts(function: ast.FunctionDef, functional: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield lines of calls that drop values in evaluations as well; `functional`: what is imported by its name."""
    tests = [one for one in walk(function) if isinstance(one, ast.If | ast.IfExp) and _asks_mode(one.test)]
    if any(isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return) for one in tests):
        return
    guarded = {id(part) for one in tests for part in walk(one)}
    assigned = [one for one in walk(function) if isinstance(one, ast.Assign) and _asks_mode(one.value)]
    known = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
    known |= {text_of(target) for one in assigned for target in one.targets}
    for call in [one for one in _calls(function) if id(one) not in guarded and not _asks_mode(one)]:
        options = {one.arg: text_of(one.value) for one in call.keywords}  # **others have no name
        name, module = name_of(call), text_of(call.func).rpartition(".")[0]
        if re.fullmatch(r"(feature_)?(alpha_)?dropout\d?d?", name) and len(call.args) < 3:
            is_torch = module.split(".")[-1] in ("F", "functional") or (not module and name in functional)
            share = options.get("p", text_of(call.args[1]) if len(call.args) > 1 else "0.5")
        else:
            is_torch = name == "scaled_dot_product_attention"
            share = options.get("dropout_p", text_of(call.args[4]) if len(call.args) > 4 else "0")
        if is_torch and None not in options and share not in ("0", "0.0", *known):
            yield call.lineno, "dropout is on in evaluations, too: give it self.training"


def _asks_mode(node: ast.AST) -> bool:
    """Return whether a node asks for the mode of a module, or has its name, as train."""
    return bool(re.search(r"\btrain", text_of(node)))


def _lines_of_sums(source: str) -> set[int]:
    """Return the lines of lib/core/loss.py with the sums that it divides elsewhere."""
    functions = [one for one in walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    sums = [one for one in functions if one.name in ("_sum", "compute_metrics")]
    return {line for one in sums for line in range(one.lineno, (one.end_lineno or 0) + 1)}


def _other_models(functions: list[ast.FunctionDef]) -> Iterator[int]:
    """Yield lines of an evaluation_step that does not use its model, and of an evaluate that gives it another."""
    methods = {one.name for one in functions if "model" in text_of(one)} - {"evaluation_step"}
    for function in functions:
        if function.name == "evaluation_step" and len(function.args.args) > 1:
            names = {one.id for one in walk(function) if isinstance(one, ast.Name)}
            names |= {one.attr for one in walk(function) if isinstance(one, ast.Attribute)}
            if not names & {function.args.args[1].arg, "model", *methods}:
                yield function.lineno
        for call in _calls(function) if function.name == "evaluate" else ():
            if name_of(call) == "evaluation_step" and call.args and _root(call.args[0]) not in ("", "model"):
                yield call.lineno


def _no_means(tree: ast.AST, knows_targets: bool) -> Iterator[tuple[int, str]]:
    """Yield lines with losses that are no means over samples: those of micro-batches add up to another gradient."""
    divided = {id(part) for one in walk(tree) if _divides(one) for part in walk(one)}
    steps = [one for one in walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "training_step"]
    for line, is_counted in [found for one in steps for found in check_sums.find(one)]:
        if not is_counted:
            yield line, f"a loss that is a sum {ADVICE}, unless it is divided by the number of samples"
        elif not knows_targets:
            yield line, f"a mean over some targets {ADVICE}: let count_targets return their number"
    counted = "return super().training_step("  # then the targets count that this one gets
    for step in [one for one in steps if not knows_targets and counted not in text_of(one)]:
        for call in _calls(step):  # a copy of the targets: what is masked in place counts as such
            of_tensor = isinstance(call.func, ast.Attribute) and text_of(call.func.value) not in ("torch", "np")
            filled = [call.func.value] if of_tensor else call.args[1:]  # pyright: ignore[reportAttributeAccessIssue]
            are_scores = re.search("logit|score|att|prob|weight", " ".join(map(text_of, filled)))
            if not are_scores and name_of(call) in ("masked_fill", "where") and "-100" in map(text_of, call.args):
                yield call.lineno, f"a mean over some targets {ADVICE}: let count_targets return their number"
    for call in _calls(tree):
        name = name_of(call)
        options = {one.arg: getattr(one.value, "value", one) for one in call.keywords}  # of constants the values
        ignored = [text_of(one.value) for one in call.keywords if one.arg == "ignore_index"]
        ignores = "loss" in name.lower() or name in WEIGHTED
        ignores &= any(not one.endswith(("-100", "ignore_index")) for one in ignored)
        # A class takes the weights first, a function after outputs and targets.
        reduction, first = options.get("reduction", "mean"), len(call.args) > 2 * name.islower()
        if (reduction == "sum" or options.get("size_average", True) is False) and id(call) not in divided:
            yield call.lineno, f"a loss that is a sum {ADVICE}, unless it is divided by the number of samples"
        elif name in WEIGHTED and reduction == "mean" and (first or options.get("weight") is not None):
            yield call.lineno, f"a mean over class weights {ADVICE}: take -class_weights, or reduction='none'"
        elif not knows_targets and reduction == "mean" and ignores:
            yield call.lineno, f"a mean over some targets {ADVICE}: let count_targets return their number"


def _source(one: Any) -> str:
    """Return the text of a module, class or function, "" if there is none, or only a part that cannot be read."""
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        text = textwrap.dedent(inspect.getsource(one))
        ast.parse(text)
        return text
    return ""


def counters(source: str) -> set[str]:
    """Return the attributes that a class of a dataset or a transform adds to while samples are read."""
    nodes = [node for one in _readers(source) for node in walk(one)]
    sums = [one.target for one in nodes if isinstance(one, ast.AugAssign)]
    found = {name for one in sums for name in _attributes(one, ast.expr_context)}
    for one in [one for one in nodes if isinstance(one, ast.Assign) and isinstance(one.value, ast.BinOp)]:
        found |= _attributes(one, ast.Store) & _attributes(one.value, ast.Load)
    return found


def generators(source: str) -> set[str]:
    """Return the attributes of a dataset's or transform's class by which it draws, seeded once for many samples."""
    nodes = [*walk(ast.parse(source))]
    made = [one for one in nodes if isinstance(one, ast.Assign) and OWN_DRAWS.search(text_of(one.value))]
    found = {name for one in made for name in _attributes(one, ast.Store)}
    readers = _readers(source)
    read = {name for one in readers for name in _attributes(one, ast.Load)}
    is_seeded = re.search(r"seed\(|set_state|\.state\b", "".join(map(text_of, readers)))
    return set() if is_seeded else found & read - {name for one in readers for name in _attributes(one, ast.Store)}


def _readers(source: str) -> list[ast.FunctionDef]:
    """Return the methods of a class of a dataset or a transform that read samples, with those that they call."""
    functions = [one for one in walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    readers = [one for one in functions if re.match("__getitem|__call__|forward$|transform$", one.name)]
    called = {name_of(call) for reader in readers for call in _calls(reader)}
    return [one for one in functions if one in readers or one.name in called]


def _collected(function: ast.FunctionDef, functions: list[ast.FunctionDef]) -> Iterator[tuple[int, str]]:
    """Yield lines and attributes of `self` that something is added to, but for numbers that count calls.

    `functions`: all of the file; those that this one calls count as well. What reset() empties is of one call.
    """
    called = {name_of(one) for one in _calls(function) if text_of(one.func) == f"self.{name_of(one)}"}
    nodes = [*walk(function), *(node for one in functions if one.name in called for node in walk(one))]
    emptied = {"metrics"}  # the trainer's, which are summed over all processes
    for one in [one for one in nodes if isinstance(one, ast.Call) and name_of(one) == "reset"]:
        emptied |= _attributes(one.func, ast.expr_context)
    for one in sorted(nodes, key=lambda one: getattr(one, "lineno", 0)):
        for target in _adds_to(one):
            if (name := _root(target)) and name not in emptied:
                yield one.lineno, name  # pyright: ignore[reportAttributeAccessIssue]


def _root(node: ast.expr) -> str:
    """Return the attribute of `self` that a chain of attributes and entries begins with, "" if it does not."""
    name = ""
    while isinstance(node, ast.Attribute | ast.Subscript):
        name, node = getattr(node, "attr", name), node.value
    return name if isinstance(node, ast.Name) and node.id == "self" else ""


def _adds_to(node: ast.AST) -> list[ast.expr]:
    """Return what a node adds something to: an entry, a sum, or an object by a method as append."""
    if isinstance(node, ast.Assign):
        return [one.value for one in node.targets if isinstance(one, ast.Subscript)]
    if isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Subscript):
            return [node.target.value]
        return [] if isinstance(node.value, ast.Constant) else [node.target]  # a number that counts calls
    if isinstance(node, ast.Call) and name_of(node) in ADDING and isinstance(node.func, ast.Attribute):
        given = [*node.args, *(one.value for one in node.keywords)]
        return [node.func.value] if any(not isinstance(one, ast.Constant) for one in given) else []
    return []


def _in_training_mode(function: ast.FunctionDef, functions: list[ast.FunctionDef]) -> Iterator[tuple[int, str]]:
    """Yield lines of a hook, and of functions that it calls, that use the model as it was trained last."""
    called = {name_of(one) for one in _calls(function) if text_of(one.func) == f"self.{name_of(one)}"}
    used = [function, *(other for other in functions if other.name in called)]
    is_meant = re.search(r"evaluating\(|\beval\(|train\(|running_stats|update_bn", "".join(map(text_of, used)))
    for one in [] if is_meant else used:
        for call in _calls(one):
            if text_of(call.func) == "self.model":
                advice = "on all processes: with self.evaluating(), torch.no_grad()"
                yield (
                    call.lineno,
                    f"self.model is in training mode here: it drops values, or changes its statistics: {advice}",
                )


def _own_loops(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield lines of loops over a loader's first batches, or that never ask whether one is padding."""
    for loop in [one for one in walk(function) if isinstance(one, ast.For | ast.comprehension)]:
        if not any(name_of(one) == "epoch" and "loader" in text_of(one.func) for one in _calls(loop.iter)):
            continue
        loops = [one for one in walk(loop) if one is not loop and isinstance(one, LOOPS)]
        inner = {id(each) for one in loops for each in walk(one)}
        ends = [one for one in walk(loop) if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)]
        tests = [text_of(one.test) for one in ends if id(one) not in inner]
        ends = [one for one in tests if "stop" not in one and not re.fullmatch(r"not .*count|.*count == 0", one)]
        if ends or "islice" in text_of(loop.iter):
            fault = "the first batches are others on each number of processes"
            yield loop.iter.lineno, f"{fault}: take a Subset in get_dataset"
        elif not re.search(r"\.count\b|train_step", text_of(function)):
            fault = "a process may get a step's last micro-batch once more, as padding"
            yield loop.iter.lineno, f"{fault}: leave it out if micro_batch.count is 0"


def _on_main_alone(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield lines where some processes alone call what all must call together: they would wait for the others."""
    fields = [getattr(node, name, []) for node in walk(function) for name in ("body", "orelse", "finalbody")]
    found: list[tuple[ast.expr, list, list]] = []  # a test, what follows where it holds, and where not
    for block in [one for one in fields if isinstance(one, list)]:
        for place, one in enumerate(block):
            if isinstance(one, ast.If):
                ends = isinstance(one.body[-1], ast.Return | ast.Continue)
                found.append((one.test, one.body, [*one.orelse, *(block[place + 1 :] if ends else [])]))
    found += [(one.values[0], one.values[1:], []) for one in walk(function) if isinstance(one, ast.BoolOp)]
    for test, *sides in found:
        texts = [text_of(part) for part in (test.values if isinstance(test, ast.BoolOp) else [test])]
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):  # with others the main process goes on
            texts = [text for text in texts if re.match(r"not |.*(!= 0|> 0|\brank(\(\))?)$", text)]
        if any("size" in text for text in texts) or not any(re.fullmatch(BY_RANK, text) for text in texts):
            continue
        calls = [[call for statement in side for call in _calls(statement)] for side in sides]
        for mine, theirs in (calls, calls[::-1]):
            for call in mine:
                text = text_of(call.func)
                is_collective = re.fullmatch(r"self\.\w+|(torch\.)?(distributed|dist)\.\w+", text)
                if is_collective and name_of(call) in COLLECTIVE - {name_of(other) for other in theirs}:
                    yield call.lineno, f"{text} waits for all processes: call it on each"


def _handed_on(function: ast.FunctionDef, functions: list[ast.FunctionDef]) -> Iterator[tuple[int, str]]:
    """Yield lines and attributes of `self` that are detached there as an earlier call has left them.

    `functions`: all of the file; those that this one has called before may have set some.
    """
    uses = [*walk(function)] if "detach" in text_of(function) or "repackage" in text_of(function) else []
    statements = [one for one in uses if isinstance(one, ast.stmt) and one is not function]
    stores = [(one.end_lineno or 0, _attributes(one, ast.Store)) for one in statements]
    begun = {one: _attributes(one, ast.Store) for one in function.body if uses and not isinstance(one, ast.If)}
    for one in begun:  # with what the functions that it calls set
        called = {name_of(call) for call in _calls(one)}
        begun[one] = begun[one].union(*(_attributes(other, ast.Store) for other in functions if other.name in called))
    for node in (one for one in uses if isinstance(one, ast.Call | ast.GeneratorExp | ast.ListComp)):
        name = name_of(node) if isinstance(node, ast.Call) else ""
        if name == "detach":
            loads = _attributes(node, ast.Load) - {"detach"}
        elif re.search("detach_|repackage", name) or (not name and ".detach()" in text_of(node)):
            loads = _attributes(node, ast.Load)
        else:
            continue
        later = {name for end, names in stores if end >= node.lineno for name in names}
        of_this_pass = {name for one, names in begun.items() if one.lineno < node.lineno for name in names}
        for one in begun:  # what is emptied at the end has been filled in this pass
            if isinstance(one, ast.Assign) and text_of(one.value) in EMPTY:
                of_this_pass |= begun[one]
        for name in sorted(loads & later - of_this_pass):
            yield node.lineno, name


def _attributes(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names of the attributes of `self` that are read or set in this node."""
    found = [one for one in walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, context)]
    return {one.attr for one in found if isinstance(one.value, ast.Name) and one.value.id == "self"}


def _read_ahead(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield lines of a train_step that goes through its batches by itself, and does not seed the passes."""
    is_seeded = re.search(r"seeding\.|call_training_step|super\(\)\.train_step", text_of(function))
    if function.name == "train_step" and len(function.args.args) > 1 and not is_seeded:
        given = function.args.args[1].arg
        loops = [one for one in walk(function) if isinstance(one, ast.For) and not _calls_own(one)]
        loops += [one.generators[0] for one in walk(function) if isinstance(one, ast.ListComp)]
        read = [one.iter for one in loops]
        read += [one.value for one in walk(function) if isinstance(one, ast.Starred)]
        read += [arg for call in _calls(function) if name_of(call) in ("list", "tuple") for arg in call.args]
        for one in [one for one in read if given in re.findall(r"\w+", text_of(one))]:
            advice = "before each pass that comes later, seeding.seed(seeding.PASS, seed, step, micro_batch.number)"
            yield one.lineno, f"train_step reads {given}, which seeds the generators for each as it comes: {advice}"


def _read_late(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield lines of a step that uses what logging and saving fill or empty."""
    uses = [*walk(function)] if function.name in IN_STEP else []
    last = [one.value for one in uses if isinstance(one, ast.Subscript) and text_of(one.slice) == "-1"]
    last += [one.value for one in uses if isinstance(one, ast.Attribute) and one.attr == "append"]
    for one in [one for one in uses if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)]:
        text = text_of(one)
        if re.fullmatch(r"self\.(state\.(grad_norm|bad_\w+)|pending_(losses|norms))", text) and one not in last:
            advice = "keep your own in a saved buffer; self.pending_losses[-1] has this step's losses"
            yield one.lineno, f"{text} depends on when the run logs and saves: {advice}"


def _read_in_step(functions: list[ast.FunctionDef], is_shared: bool) -> Iterator[tuple[int, str]]:
    """Yield lines of steps, and of functions of the file that they call, with a next() of what a loader's epoch is.

    Steps that set the generators back by themselves count only if each process gets other samples (`is_shared`).
    """
    called = {name_of(call) for one in functions if one.name in IN_STEP for call in _calls(one)} - METHODS
    attributes = {name for one in functions for name in _epochs(one) if name.startswith("self.")}
    for function in [one for one in functions if one.name in IN_STEP | called]:
        is_reset = re.search(r"seeding\.|rng", text_of(function)) and not is_shared
        iterators = attributes | _epochs(function)
        for call in [] if is_reset else _calls(function):
            if (
                name_of(call) == "next"
                and call.args
                and (_is_epoch(call.args[0]) or text_of(call.args[0]) in iterators)
            ):
                yield call.lineno, OF_LOADER


def _epochs(function: ast.FunctionDef) -> set[str]:
    """Return names and attributes that this function sets to the batches of a loader."""
    assigned = [one for one in walk(function) if isinstance(one, ast.Assign) and _is_epoch(one.value)]
    return {text_of(target) for one in assigned for target in one.targets}


def _is_epoch(node: ast.expr) -> bool:
    """Whether a node is a call of a loader's epoch, or iter() of one."""
    if isinstance(node, ast.Call) and name_of(node) == "iter" and node.args:
        return _is_epoch(node.args[0])
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "epoch"


def _calls_own(node: ast.AST) -> bool:
    """Whether a method of `self`, or a backward pass, is called in this node."""
    return any(text_of(call.func).startswith("self.") or name_of(call) == "backward" for call in _calls(node))


def _calls(node: ast.AST) -> list[ast.Call]:
    return [one for one in walk(node) if isinstance(one, ast.Call)]


def _divides(node: ast.AST) -> bool:
    """Whether what is in this node may become a mean: a division, or a Ratio, which is one later."""
    is_ratio = isinstance(node, ast.Call) and name_of(node) == "Ratio"
    return is_ratio or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
