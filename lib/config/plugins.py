"""Plugins, the files in lib/arch, lib/dataset and lib/trainer: found by name, read for their flags, imported to run.

Nearly all import torch, which takes seconds. So -h, -list and wrong flags execute only what a plugin's flags need.
"""

import ast
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from lib.utils.errors import UsageError, no_exit, suggest

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = {"dataset": "get_dataset", "arch": "get_model", "trainer": "Trainer"}  # in the order they are read


def names(kind: str) -> list[str]:
    """Return the names of all plugins of a kind: the files in lib/KIND."""
    return sorted(file.stem for file in (ROOT / "lib" / kind).glob("*.py") if not file.stem.startswith("_"))


def summary(kind: str, name: str) -> str:
    """Return the first line of a plugin's docstring, or why it cannot be read."""
    try:
        text = ast.get_docstring(ast.parse((ROOT / "lib" / kind / f"{name}.py").read_text()))
    except (SyntaxError, ValueError) as error:
        return f"cannot be read: {error}"
    return (text or "").partition("\n")[0]


def load(kind: str, name: str) -> ModuleType:
    """Import lib/KIND/NAME.py. Raises UsageError if it lacks its builder, or needs a package that is missing."""
    try:
        with no_exit():
            module = importlib.import_module(f"lib.{kind}.{name}")
    except ModuleNotFoundError as error:
        file = f"lib/{kind}/{name}.py"
        raise UsageError(f"-{kind} {name}: {file} cannot be imported: {error} (is .venv active?)") from None
    if not hasattr(module, BUILDERS[kind]):
        raise UsageError(f"-{kind} {name}: lib/{kind}/{name}.py has no {BUILDERS[kind]}")
    return module


def load_flags(kind: str, name: str) -> ModuleType:
    """Return lib/KIND/NAME.py with only what its flags need. If its text does not show that, import it in full."""
    there = names(kind)
    if name not in there:
        choices = f"there are {', '.join(there)}{suggest(name, there)}"
        raise UsageError(f"-{kind} {name!r}: no such file in lib/{kind}; {choices}")
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec(f"lib.{kind}.{name}")
        assert spec and spec.origin
        module, tree = importlib.util.module_from_spec(spec), ast.parse(Path(spec.origin).read_bytes())
        tree.body = needed_statements(tree.body)
        if "torch" in sys.modules:  # `describe` may compute, as an import in `load`
            sys.modules["torch"].set_num_threads(1)
        exec(compile(tree, spec.origin, "exec"), vars(module))
        return module
    return load(kind, name)  # whose message says what is wrong


def needed_statements(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that `add_args` and `describe` need: these two, what they use, what that uses, and so on.

    Raises LookupError if one of them is no function, import or constant, or if the file imports *.
    """
    kept, wanted = set(), {"add_args", "describe", "annotations"}  # of __future__: it changes how the rest is read
    while more := [one for one in statements if one not in kept and bound_names(one) & wanted]:
        kept.update(more)
        wanted = wanted.union(*map(names_in, more))
    if not all(map(is_plain, kept)) or any("*" in names_in(one) for one in statements):
        raise LookupError
    return [one for one in statements if one in kept]


def is_plain(statement: ast.stmt) -> bool:
    """Whether a statement is a function, an import or a constant, which mean the same without the others."""
    constant = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    function = isinstance(statement, ast.FunctionDef) and not statement.decorator_list
    return constant or function or isinstance(statement, (ast.Import, ast.ImportFrom))


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the name that a definition binds, or all names in another statement."""
    is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
    return {statement.name} if is_definition else names_in(statement)


def names_in(node: ast.AST) -> set[str]:
    """Return all names in a piece of code but those of attributes and parameters."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            found.add(each.name)
    return found
