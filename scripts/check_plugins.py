"""Reads the files of a run's trainer and models for what has another effect here than in other programs."""

import ast
import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
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
        for module in {sys.modules[kind.__module__] for kind in {*own, *parts}}:
            is_own = OURS.match(getattr(module, "__file__", None) or "")
            if is_own and module.__name__ != "lib.core.loss":  # whose sum is divided elsewhere
                for line, fault in faults(inspect.getsource(module), is_cut=len(trainer.plan.cut(0)) > 1):
                    log.warning("%s, line %d: %s", module.__file__, line, fault)


def faults(source: str, is_cut: bool) -> Iterator[tuple[int, str]]:
    """Yield lines, and what is wrong there: losses that are no means, if steps are cut; an evaluation_step.

    A loss that is a mean over the samples gives micro-batches that add up to the gradient of the whole batch.
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
        if isinstance(node, ast.FunctionDef) and node.name == "training_step":
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call) and "clip_grad_" in _name(one)):
                yield call.lineno, "training_step clips no gradients, which come later: take -clip_grad"
        if is_cut and isinstance(node, ast.Call):
            name = _name(node)
            options = {one.arg: getattr(one.value, "value", one) for one in node.keywords}  # of constants the values
            # A class takes the weights first, a function after outputs and targets.
            reduction, first = options.get("reduction", "mean"), len(node.args) > 2 * name.islower()
            if (reduction == "sum" or options.get("size_average", True) is False) and id(node) not in divided:
                yield node.lineno, f"a loss that is a sum {ADVICE}, unless it is divided by the number of samples"
            elif name in WEIGHTED and reduction == "mean" and (first or options.get("weight") is not None):
                yield node.lineno, f"a mean over class weights {ADVICE}: take -class_weights, or reduction='none'"


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _divides(node: ast.AST) -> bool:
    """Whether what is in this node may become a mean: a division, or a Ratio, which is one later."""
    is_ratio = isinstance(node, ast.Call) and _name(node) == "Ratio"
    return is_ratio or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
