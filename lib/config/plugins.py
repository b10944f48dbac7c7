"""Plugins, the files in lib/arch, lib/dataset and lib/trainer: found by name, read for their flags, imported to run.

Nearly all import torch, which takes seconds. So -h, -list and wrong flags execute only what a plugin's flags need.
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from lib.utils.errors import UsageError, close, no_exit

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = {"dataset": "get_dataset", "arch": "get_model", "trainer": "Trainer"}  # in the order they are read
FLAGS = {"add_args", "describe"}  # functions that the command line calls
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def names(kind: str) -> list[str]:
    """Return the names of all plugins of a kind: the files in lib/KIND."""
    return sorted(file.stem for file in (ROOT / "lib" / kind).glob("*.py") if not file.stem.startswith("_"))


def summary(kind: str, name: str) -> str:
    """Return the first line of a plugin's docstring."""
    file = ROOT / "lib" / kind / f"{name}.py"
    try:
        return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]
    except (SyntaxError, ValueError) as error:
        return f"cannot be read: {error}"


def load(kind: str, name: str) -> ModuleType:
    """Import lib/KIND/NAME.py. Raises UsageError if it cannot be imported or has no builder."""
    file = f"lib/{kind}/{name}.py"
    try:
        with no_exit():
            module = importlib.import_module(f"lib.{kind}.{name}")
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.lineno else file
        raise UsageError(f"-{kind} {name}: syntax error in {place}: {error.msg}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"-{kind} {name}: {file} needs what is not installed here: {error}") from None
    if not callable(getattr(module, BUILDERS[kind], None)):
        raise UsageError(f"-{kind} {name}: {file} has no {BUILDERS[kind]} that can be called")
    return module


def read(kind: str, name: str) -> ModuleType:
    """Return lib/KIND/NAME.py with only the statements that its flags need; in full if the text does not show them.

    A class of the file must be the same in `args` and in the run, so a file whose flags need one is imported, too.
    """
    there = names(kind)
    if name not in there:
        choices = f"there are {', '.join(there)}{close(name, there)}"
        raise UsageError(f"-{kind} {name!r}: no such file in lib/{kind}; {choices}")
    try:
        spec = importlib.util.find_spec(f"lib.{kind}.{name}")
        assert spec and spec.origin
        module = importlib.util.module_from_spec(spec)
        tree = ast.parse(Path(spec.origin).read_bytes())
        exec(compile(needed(tree), spec.origin, "exec"), vars(module))
    except Exception:  # noqa: BLE001
        return load(kind, name)  # whose message says what is wrong
    shown = BUILDERS[kind] in set().union(*map(bound, tree.body)) and not {"*", "exec", "globals"} & named(tree)
    own = [
        value for value in vars(module).values() if getattr(value, "__mro__", ()) and value.__module__ == spec.name
    ]
    return module if shown and not own else load(kind, name)


def needed(tree: ast.Module) -> ast.Module:
    """Return the statements that define or change one of FLAGS, the names in these statements, and so on."""
    changed = changes(tree)
    kept, wanted = set(), {*FLAGS, "annotations"}  # of __future__, which changes how the rest is read
    while more := [one for one in tree.body if one not in kept and changed[one] & wanted]:
        kept.update(more)
        wanted = wanted.union(*map(named, more))
    return ast.Module([one for one in tree.body if one in kept], [])


def changes(tree: ast.Module) -> dict[ast.stmt, set[str]]:
    """Return the names that each statement binds or may change, also by a function of the file that it calls."""
    functions = {one.name: named(one) for one in tree.body if isinstance(one, DEFINITIONS)}
    return {one: bound(one) | reached(called(one), functions) for one in tree.body}


def called(statement: ast.stmt) -> set[str]:
    """Return the names that a statement executes: all but those in the body of a definition."""
    if not isinstance(statement, DEFINITIONS):
        return named(statement)
    bases = [*statement.bases, *statement.keywords] if isinstance(statement, ast.ClassDef) else []
    return set().union(*map(named, [*statement.decorator_list, *bases]))


def reached(names: set[str], functions: dict[str, set[str]]) -> set[str]:
    """Return the names in these functions of the file and in those that they name: what a call may change."""
    found, new = set(), names & functions.keys()
    while new:
        found |= new
        new = set().union(*(functions[name] for name in new)) & functions.keys() - found
    return found.union(*(functions[name] for name in found))


def bound(statement: ast.stmt) -> set[str]:
    """Return the name that a definition or an assignment binds; for other statements all names they may change."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {one.id for one in targets if isinstance(one, ast.Name)} or named(statement)


def named(node: ast.AST) -> set[str]:
    """Return all names in a piece of code but those of attributes and parameters."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, DEFINITIONS):
            found.add(each.name)
    return found
