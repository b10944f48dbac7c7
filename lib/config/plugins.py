"""Plugins, the files in lib/arch, lib/dataset and lib/trainer: found by name, read for their flags, imported to run.

Nearly all import torch, which takes seconds. So -h and wrong flags execute only what a plugin's flags need.
"""

import ast
import contextlib
import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.utils.errors import UsageError, call_optional, load_optional, no_exit, suggest

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = r".+=[^/,{}]+,.+|.+,.+=[^/,{}]+"  # as A=0.3,B=0.7
DEFINITIONS = ast.FunctionDef, ast.ClassDef
BUILDERS = {"dataset": "get_dataset", "arch": "get_model", "trainer": "Trainer"}  # in the order they are read


def names(kind: str) -> list[str]:
    """Return the names of all plugins of a kind: the files in lib/KIND."""
    return sorted(file.stem for file in (ROOT / "lib" / kind).glob("*.py") if not file.stem.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import lib/KIND/NAME.py. Raises UsageError if it lacks its builder, or needs a package that is missing."""
    from lib.utils import seeding  # which imports torch

    seeding.seed(seeding.IMPORT, [*BUILDERS].index(kind))  # its variables are the same at each start
    with no_exit():
        module = load_optional(f"lib.{kind}.{name}", f"-{kind} {name}")
    if not hasattr(module, BUILDERS[kind]):
        raise UsageError(f"-{kind} {name}: lib/{kind}/{name}.py has no {BUILDERS[kind]}")
    return module


def load_chosen(args: Namespace) -> list[ModuleType]:
    """Import the files of -dataset, -arch and -trainer. Raises UsageError as `load` does."""
    from lib.utils import watchdog  # which imports torch

    modules = []
    for kind in BUILDERS:
        watchdog.begin(f"importing -{kind} {getattr(args, kind)}")
        modules.append(load(kind, getattr(args, kind)))
    call_optional("scripts.check_flags", "check", args)
    return [mixed(modules[0], args.data), *modules[1:]]


def mixed(module: ModuleType, data: str) -> Any:
    """Return a module of lib/dataset; for -data A=0.3,B=0.7 one that mixes what it has in A and in B."""
    if not re.fullmatch(MIXTURE, data) or Path(data).exists():
        return module
    return load_optional("scripts.mixture", "-data A=0.3,B=0.7").MixedDataset(module, data)


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
    """Return add_args and describe with what they use. Raises LookupError if that is no function or import."""
    # A definition binds its name, and any other statement may bind all names in it.
    bound = {one: {one.name} if isinstance(one, DEFINITIONS) else names_in(one) for one in statements}
    kept, wanted = [], {"add_args", "describe", "annotations", "*"}  # __future__ changes how the rest is read
    while more := [one for one in statements if one not in kept and bound[one] & wanted]:
        kept += more
        wanted = wanted.union(*map(names_in, more))
    functions_and_imports = (ast.FunctionDef, ast.Import, ast.ImportFrom)
    if any(not isinstance(one, functions_and_imports) or getattr(one, "decorator_list", ()) for one in kept):
        raise LookupError
    return [one for one in statements if one in kept]


def names_in(node: ast.AST) -> set[str]:
    """Return all names in a piece of code but those of attributes and parameters."""
    nodes = list(ast.walk(node))
    used = {each.id for each in nodes if isinstance(each, ast.Name)}
    imported = {(each.asname or each.name).partition(".")[0] for each in nodes if isinstance(each, ast.alias)}
    return used | imported | {each.name for each in nodes if isinstance(each, DEFINITIONS)}
