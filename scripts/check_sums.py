"""Finds sums over a micro-batch, and means over a part of it, in the loss that a training_step returns."""

import ast
import functools
import re
from collections.abc import Iterator

from torch.nn import functional

# Calls whose result has a value for each element, and those that keep these.
EACH = set("abs square pow exp log log1p relu clamp softplus logsigmoid log_softmax gather where masked_fill".split())
SHAPES = set("float double to view reshape flatten squeeze unsqueeze sum".split())
AT_LEAST = {"clamp", "clamp_min", "max", "maximum", "float", "double", "to"}  # around a number of targets
MEANS = "mean|loss|criterion|entropy|nll|div|norm|var|std|softmax"  # in names of calls, unless reduction='none'
# Calls whose result is a mean, unless `reduction` says otherwise: torch's losses, and a trainer's own.
LOSSES = {name for name in dir(functional) if name.endswith(("loss", "entropy", "with_logits"))} | {
    "loss",
    "criterion",
}
MASKS = set("bool eq ne lt le gt ge isnan isfinite logical_not logical_and logical_or logical_xor".split())
MASK = r"(\w+_)?mask"  # the usual name of one in a batch
FACTS = set("device dtype shape size ndim numel len".split())  # of a tensor, without its values
RANKS = set("argsort sort topk kthvalue randperm".split())  # masks by ranks leave equally many of each sample


walk = functools.cache(lambda node: [*ast.walk(node)])  # of the same nodes, again and again
text_of = functools.cache(ast.unparse)


class Step:
    """A training_step: what its names are at a line, and which come from the batch. What is unclear is no fault."""

    def __init__(self, function: ast.FunctionDef):
        inner = [one for one in walk(function) if isinstance(one, ast.FunctionDef | ast.Lambda)][1:]
        hidden = {id(each) for one in inner for each in walk(one)}
        self.nodes = [one for one in walk(function) if id(one) not in hidden]
        self.values: list[tuple[int, str, ast.expr]] = []  # the line after which a name has a value
        for one in self.nodes:
            if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
                before = ast.copy_location(ast.Name(one.target.id, ast.Load()), one)
                self.keep(
                    one.target, ast.copy_location(ast.BinOp(before, one.op, one.value), one), one.end_lineno or 0
                )
            elif isinstance(one, ast.Assign):
                for target in one.targets:
                    self.keep(target, one.value, one.end_lineno or 0)
            elif isinstance(one, ast.For):
                self.keep(one.target, one.iter, one.lineno)
        self.batch = {one.arg for one in function.args.args[1:]}
        for _ in self.values:  # until it has all
            self.batch |= {name for _, name, value in self.values if self.of_batch(value)}

    def keep(self, target: ast.expr, value: ast.expr, line: int) -> None:
        """Note the value of a target, of pairs one by one."""
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        are_pairs = len(targets) > 1 and isinstance(value, ast.Tuple) and len(value.elts) == len(targets)
        values = value.elts if are_pairs else [value] * len(targets)  # pyright: ignore[reportAttributeAccessIssue]
        for one, its in zip(targets, values, strict=True):
            if isinstance(one, ast.Name):
                self.values.append((line, one.id, its))

    def value(self, node: ast.expr) -> ast.expr | None:
        """Return a node, or what it is if it is a name: None if that is not known."""
        while isinstance(node, ast.Name):
            before = [(line, value) for line, name, value in self.values if name == node.id and line < node.lineno]
            if not before:
                return None
            node = max(before, key=lambda one: one[0])[1]
        return node

    def of_batch(self, node: ast.expr) -> bool:
        return any(isinstance(one, ast.Name) and one.id in self.batch for one in walk(node))

    def faults(self, node: ast.expr | None, is_divided: bool = False) -> Iterator[tuple[int, bool]]:
        """Yield lines of sums that are added to a loss, and whether each is a mean over a part of the batch."""
        node = self.value(node) if node else None
        if isinstance(node, ast.UnaryOp):
            yield from self.faults(node.operand, is_divided)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if self.summed(self.bare(node.left)) and self.is_count(node.right):
                yield node.lineno, True
            elif not self.of_batch(node.right):
                yield from self.faults(node.left, is_divided=True)
        elif isinstance(node, ast.BinOp):
            is_product, is_rest = isinstance(node.op, ast.Mult), isinstance(node.left, ast.Constant)  # 1 - overlap
            sides = [(node.left, node.right), (node.right, node.left)]
            for one, other in sides if isinstance(node.op, ast.Mult | ast.Add) or not is_rest else []:
                if not (is_product and (self.of_batch(other) or self.is_mean(other))):
                    yield from self.faults(one, is_divided)
        elif node and (of := self.summed(node)) and self.has_each(of) and not (is_divided or self.is_mean(of)):
            yield node.lineno, False
        elif isinstance(node, ast.Call) and self.is_mean_of_part(node):
            yield node.lineno, True

    def is_mean_of_part(self, call: ast.Call) -> bool:
        """Whether a call is surely the mean over what a mask leaves."""
        is_mean = name_of(call) == "mean" and not call.keywords and len(_arguments(call)) == 1
        is_loss = name_of(call) in LOSSES and _reduction(call) == "mean"
        return (is_mean or is_loss) and any(map(self.is_part, _arguments(call)))

    def is_part(self, node: ast.expr) -> bool:
        """Whether a node surely has values for what a mask leaves, and no others."""
        node = self.value(node) or node
        if isinstance(node, ast.Call):
            if name_of(node) == "masked_select":
                return self.is_mask(_arguments(node)[-1])
            given = _arguments(node) if name_of(node) in LOSSES else _arguments(node)[:1]
            return name_of(node) in EACH | LOSSES | SHAPES - {"sum"} and any(map(self.is_part, given))
        if isinstance(node, ast.BinOp):
            sides = [(node.left, node.right), (node.right, node.left)]
            is_sum = isinstance(node.op, ast.Add | ast.Sub | ast.Pow)  # a factor of the batch may correct the mean
            return any(self.is_part(a) and (is_sum or self.is_part(b) or not self.of_batch(b)) for a, b in sides)
        if isinstance(node, ast.UnaryOp):
            return self.is_part(node.operand)
        return isinstance(node, ast.Subscript) and (self.is_mask(node.slice) or self.is_part(node.value))

    def is_mask(self, node: ast.expr) -> bool:
        """Whether a node is surely a mask that leaves more of some samples than of others."""
        if isinstance(node, ast.Name) and re.fullmatch(MASK, node.id) and self.is_given(node):
            return True
        node = self.value(node) or node
        if isinstance(node, ast.Subscript | ast.Attribute):
            key = text_of(node.slice).strip("'") if isinstance(node, ast.Subscript) else node.attr
            is_named = re.fullmatch(MASK, key) and self.is_given(node.value)  # batch["mask"], batch.mask
            return bool(is_named) or self.is_mask(node.value)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Invert) and self.is_mask(node.operand)
        if isinstance(node, ast.BinOp):
            is_logical = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
            return is_logical and (self.is_mask(node.left) or self.is_mask(node.right))
        if isinstance(node, ast.Call) and name_of(node) in SHAPES - {"sum", "float", "double"}:
            return any(map(self.is_mask, _arguments(node)[:1]))
        is_call = isinstance(node, ast.Call) and name_of(node) in MASKS
        return (is_call or isinstance(node, ast.Compare)) and self.has_values(node)

    def is_given(self, node: ast.expr) -> bool:
        """Whether a node is the batch, or an entry of it, as the step gets it."""
        node = self.value(node) or node
        if isinstance(node, ast.Subscript | ast.Attribute):
            return self.is_given(node.value)
        return isinstance(node, ast.Name) and node.id in self.batch

    def has_values(self, node: ast.AST) -> bool:
        """Whether a node depends on values of the batch, or on random numbers, and not on their ranks."""
        if isinstance(node, ast.Name):
            value = self.value(node)
            return node.id in self.batch if value is None else self.has_values(value)
        name = name_of(node) if isinstance(node, ast.Call) else getattr(node, "attr", "")
        if name in FACTS | RANKS or name.endswith("_like"):
            return name == "rand_like"
        return name in ("rand", "bernoulli") or any(map(self.has_values, ast.iter_child_nodes(node)))

    def bare(self, node: ast.expr) -> ast.expr:
        """Return a node without signs and factors."""
        node = self.value(node) or node
        if isinstance(node, ast.UnaryOp):
            return self.bare(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [one for one in (node.left, node.right) if self.of_batch(one)]
            return self.bare(sides[0]) if len(sides) == 1 else node
        return node

    def summed(self, node: ast.expr) -> ast.expr | None:
        """Return what of the batch a call sums to one number, None if it does not."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sum"):
            return None
        found = node.args if _is_torch(node) else [node.func.value, *node.args]
        is_whole = len(found) == 1 and not any(one.arg in ("dim", "axis") for one in node.keywords)
        return found[0] if is_whole and self.of_batch(found[0]) else None

    def is_count(self, node: ast.expr) -> bool:
        """Whether a node is one sum over the batch, or its number of what is not 0; at least some number, or more."""
        node = self.value(node) or node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not self.of_batch(node.right):
            return self.is_count(node.left)
        if isinstance(node, ast.Call) and name_of(node) in AT_LEAST:
            return any(self.is_count(one) for one in _arguments(node))
        is_number = isinstance(node, ast.Call) and name_of(node) == "count_nonzero" and self.of_batch(node)
        return is_number or self.summed(node) is not None

    def has_each(self, node: ast.expr) -> bool:
        """Whether a node surely has a value for each sample, or more."""
        node = self.value(node) or node
        if isinstance(node, ast.Call):
            if name_of(node) in SHAPES:
                return any(self.has_each(one) for one in _arguments(node)[:1])
            return self.of_batch(node) and (name_of(node) in EACH or _is_unreduced(node))
        if isinstance(node, ast.BinOp):
            is_power = isinstance(node.op, ast.Pow) and self.of_batch(node.left)
            return is_power or self.has_each(node.left) or self.has_each(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.has_each(node.operand)
        return isinstance(node, ast.Subscript) and self.has_each(node.value)

    def is_mean(self, node: ast.expr) -> bool:
        """Whether a node may be a mean, or have been divided by the number of samples."""
        node = self.value(node) or node
        if isinstance(node, ast.Call):
            if name_of(node) in EACH | SHAPES or _is_unreduced(node):
                return any(map(self.is_mean, _arguments(node)))
            return bool(re.search(MEANS, name_of(node).lower()))
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.Div) or self.is_mean(node.left) or self.is_mean(node.right)
        inner = getattr(node, "operand", node.value if isinstance(node, ast.Subscript) else None)
        return inner is not None and self.is_mean(inner)


def find(function: ast.FunctionDef) -> list[tuple[int, bool]]:
    """Return lines of sums in the loss of a training_step, and whether each is a mean over a part of the batch."""
    step = Step(function)
    returned = [one.value for one in step.nodes if isinstance(one, ast.Return)]
    return list(dict.fromkeys(found for one in returned for found in step.faults(one)))


def name_of(call: ast.Call) -> str:
    """Return the name of the function or the method that is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_torch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and text_of(call.func.value) in ("torch", "F", "functional")


def _arguments(call: ast.Call) -> list[ast.expr]:
    """Return what a call gets: of a method first its object."""
    is_method = isinstance(call.func, ast.Attribute) and not _is_torch(call)
    return [*([call.func.value] if is_method else []), *call.args]  # pyright: ignore[reportAttributeAccessIssue]


def _is_unreduced(call: ast.Call) -> bool:
    return _reduction(call) == "none"


def _reduction(call: ast.Call) -> str:
    given = [text_of(one.value).strip("'") for one in call.keywords if one.arg == "reduction"]
    return given[0] if given else "mean"
