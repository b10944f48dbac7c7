"""Reads the files of a run's trainer and models for what has another effect here than in other programs."""

import ast
import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lib.core.replicas import OURS
from lib.utils.checkpoint.state import find_parts, unwrap
from lib.utils.errors import suggest

log = logging.getLogger(__name__)
OF_OTHERS = {"configure_optimizers", "training_step"}  # methods of a model that other programs call
WEIGHTED = {"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"}  # which divide by the targets' weights
ADVICE = "changes with the number of micro-batches and processes"


def warn(trainer: Any) -> None:
    """Warn of methods that nothing calls, and of what `faults` finds."""
    kinds = type(trainer).__mro__
    model = type(unwrap(trainer.model)).__mro__  # under FSDP, its first class is torch's
    base = [one for one in kinds if hasattr(one, "optimizer_step")][-1]
    own = kinds[: kinds.index(base)]
    names = {name for kind in own for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"}
    names = names - {*dir(base), *dir(nn.Module)} | OF_OTHERS & {*dir(model[0])}
    modules = {one for root in find_parts(trainer).modules.values() for one in root.modules()}
    parts = {kind for one in modules for kind in type(one).__mro__}
    with contextlib.suppress(OSError, TypeError, KeyError, SyntaxError):  # in a notebook, or without its source
        files = {kind.__module__ for kind in {*own, *model}} - {"builtins"} | {"lib.core.optimizer"}
        text = "".join(inspect.getsource(sys.modules[file]) for file in files if not file.startswith("torch."))
        for name in sorted(names):
            if not re.search(rf"(?<!def )\b{name}\b|getattr\(self, [^\"']", text):
                hint = suggest(name, vars(base).keys() - {name})
                log.warning("neither its file nor lib calls %s, of the trainer or the model%s", name, hint)
        overrides = {name for kind in own for name in vars(kind)}
        step = inspect.getsource(kinds[0].training_step)
        is_logged = re.search(r"\.training_step\(|train_metrics", step) or "training_step" not in overrides
        if trainer.args.train_metrics and not is_logged:
            log.warning("-train_metrics: this training_step logs none; that of lib/trainer/trainer.py does")
        # Of what is ignored, the trainer's own loss knows, too; of what passes keep, the checkpoints.
        known = {"targets"} if getattr(trainer.loss, "ignore_index", -100) != -100 else set()
        known |= {"targets"} if "count_targets" in overrides else set()
        known |= {name for one in modules for name, _ in one.named_buffers(recurse=False)}
        for module in {sys.modules[kind.__module__] for kind in {*own, *parts}}:
            is_own = OURS.match(getattr(module, "__file__", None) or "")
            if is_own and module.__name__ != "lib.core.loss":  # whose sum is divided elsewhere
                for line, fault in faults(inspect.getsource(module), len(trainer.plan.cut(0)) > 1, known):
                    log.warning("%s, line %d: %s", module.__file__, line, fault)


def faults(source: str, is_cut: bool, known: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield lines, and what is wrong there: losses that are no means, if steps are cut; what passes hand on; others.

    A loss that is a mean over the samples gives micro-batches that add up to the gradient of the whole batch.
    `known`: attributes that are saved, and "targets" if those that a loss ignores are not counted.
    """
    nodes = [*ast.walk(ast.parse(source))]
    methods = {one.name for one in nodes if isinstance(one, ast.FunctionDef)} - {"evaluation_step"}
    divided = {id(part) for one in nodes if _divides(one) for part in ast.walk(one)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "evaluation_step" and len(node.args.args) > 1:
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            names |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
            if not names & {node.args.args[1].arg, "model", *methods}:
                yield (
                    node.lineno,
                    "evaluation_step uses another model than the one that is kept: see evaluated_weights",
                )
        if isinstance(node, ast.FunctionDef):
            for line, name in _handed_on(node):
                if name not in known:
                    yield line, f"self.{name} goes from pass to pass, but to no checkpoint and no other process"
        if isinstance(node, ast.FunctionDef) and node.name == "training_step":
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call) and "clip_grad_" in _name(one)):
                yield call.lineno, "training_step clips no gradients, which come later: take -clip_grad"
        if is_cut and isinstance(node, ast.Call):
            name = _name(node)
            options = {one.arg: getattr(one.value, "value", one) for one in node.keywords}  # of constants the values
            ignores = any(one.arg == "ignore_index" and ast.unparse(one.value) != "-100" for one in node.keywords)
            # A class takes the weights first, a function after outputs and targets.
            reduction, first = options.get("reduction", "mean"), len(node.args) > 2 * name.islower()
            if (reduction == "sum" or options.get("size_average", True) is False) and id(node) not in divided:
                yield node.lineno, f"a loss that is a sum {ADVICE}, unless it is divided by the number of samples"
            elif name in WEIGHTED and reduction == "mean" and (first or options.get("weight") is not None):
                yield node.lineno, f"a mean over class weights {ADVICE}: take -class_weights, or reduction='none'"
            elif "targets" not in known and reduction == "mean" and (ignores or name in ("CTCLoss", "ctc_loss")):
                yield (
                    node.lineno,
                    f"a mean over some targets {ADVICE}: override count_targets, to return their number",
                )


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _handed_on(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield lines and attributes of `self` that are detached there as an earlier call has left them."""
    for node in (one for one in ast.walk(function) if isinstance(one, ast.Call | ast.GeneratorExp | ast.ListComp)):
        name = _name(node) if isinstance(node, ast.Call) else ""
        if name == "detach":
            loads = _attributes(node, ast.Load) - {"detach"}
        elif re.search("detach_|repackage", name) or (not name and ".detach()" in ast.unparse(node)):
            loads = _attributes(node, ast.Load)
        else:
            continue
        statements = [one for one in ast.walk(function) if isinstance(one, ast.stmt) and one is not function]
        after = [one for one in statements if (one.end_lineno or 0) >= node.lineno]
        first = [one for one in function.body if one.lineno < node.lineno and not isinstance(one, ast.If)]
        for name in sorted(loads & {name for one in after for name in _attributes(one, ast.Store)}):
            if not any(name in _attributes(one, ast.Store) for one in first):
                yield node.lineno, name


def _attributes(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names of the attributes of `self` that are read or set in this node."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, context)]
    return {one.attr for one in found if isinstance(one.value, ast.Name) and one.value.id == "self"}


def _divides(node: ast.AST) -> bool:
    """Whether what is in this node may become a mean: a division, or a Ratio, which is one later."""
    is_ratio = isinstance(node, ast.Call) and _name(node) == "Ratio"
    return is_ratio or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
