"""The house rules: each is a function that gives a line for whatever breaks it in a file."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTERS = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "lib" / "launch").glob("*.py")))
ENVIRONMENT = ("lib/utils/distributed.py", *STARTERS)  # read here, written by the starters
ENVIRON = ("environ", "environb", "getenv", "putenv", "unsetenv")  # ways to it, in the module os
LAZY = ("submitit", "tensorboard", "torch.utils.tensorboard", "pyngrok", "tqdm")  # imported where they are used
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class File:
    """A file of the project, by its path from the root."""

    path: str
    text: str

    @cached_property
    def tree(self):
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list:
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def ours(self) -> bool:
        """Whether it runs in a training run, unlike scripts and tests."""
        return self.path == "train.py" or self.path.startswith("lib/")

    def imports(self) -> Iterator[tuple[str, ast.stmt]]:
        """The modules it imports; of `from x import y` both x and x.y, as y may be either."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield "." * node.level + (node.module or ""), node
                yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)

    def later(self) -> set:
        """The nodes that run only when a function is called."""
        return {
            inner for node in self.nodes if isinstance(node, FUNCTION) for inner in ast.walk(node) if inner != node
        }


def tracked(pattern: str) -> list[File]:
    """The files of the project, also those that git will know after the next commit."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    paths = sorted({line for line in listed.splitlines() if (ROOT / line).is_file()})
    return [File(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]


FILES = tracked("*.py")


# The rules: each gives a line for what breaks it


def optional_packages_are_imported_where_they_are_used(file: File):
    later = file.later() if file.ours else ()
    for name, node in file.imports():
        if file.ours and any(f"{name}.".startswith(f"{lazy}.") for lazy in LAZY) and node not in later:
            yield f"{node.lineno}: imports {name} outside of a function"


def modules_say_what_they_do(file: File):
    if file.text.strip() and not ast.get_docstring(file.tree):
        yield "1: no docstring"


def the_environment_has_its_place(file: File):
    if not file.ours:
        return
    for node in file.nodes:
        used = isinstance(node, ast.Attribute) and node.attr in ENVIRON
        taken = isinstance(node, ast.ImportFrom) and node.module == "os"
        if (used or taken) and file.path not in ENVIRONMENT:
            yield f"{node.lineno}: only {', '.join(ENVIRONMENT)} read the environment"
        elif isinstance(node, ast.stmt) and file.path not in ENVIRONMENT[1:] and writes_environment(node):
            yield f"{node.lineno}: only {', '.join(ENVIRONMENT[1:])} write the environment"


def writes_environment(statement) -> bool:
    text = ast.unparse(statement) if not hasattr(statement, "body") else ""
    changes = r"os\.environ(\[[^\]]*\] *\|?=(?!=)|\.(update|setdefault|pop|clear|popitem)\(| *\|=)"
    return bool(re.search(rf"{changes}|^del os\.environ|os\.(putenv|unsetenv)\(", text))


def print_is_for_the_terminal(file: File):
    for node in file.nodes:
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if called and file.ours and file.path not in STARTERS:
            yield f"{node.lineno}: print; log = logging.getLogger(__name__) is for this file"


def args_are_never_written_to(file: File):
    if file.path == "lib/config/args.py" or file.path.startswith("tests/"):
        return
    args = r"(\w+\.)*args"
    for node in file.nodes:
        target = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if target and re.fullmatch(args, ast.unparse(node.value)):
            yield f"{node.lineno}: writes to {ast.unparse(node)}"
        call = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
        written = isinstance(node, ast.Call) or not isinstance(getattr(node, "ctx", None), ast.Load)
        way = rf"(setattr|delattr)\({args},|(vars\({args}\)|{args}\.__dict__)(\.(update|pop|setdefault|clear)\(|\[)"
        if written and re.match(way, call):
            yield f"{node.lineno}: writes to args: {call}"


def no_exception_is_swallowed(file: File):
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(line, ast.Pass) or ast.unparse(line) == "..." for line in node.body)
            if node.type is None or silent:
                yield f"{node.lineno}: {'a bare except' if node.type is None else 'an exception that is passed over'}"


def nothing_is_left_to_do(file: File):
    for number, line in enumerate(file.text.splitlines(), 1):
        found = re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b(?! \(?#\d)", line)
        if found:
            yield f"{number}: {found[1]} without an issue's number"


def nobody_switches_the_linter_off(file: File):
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"#\s*(ruff:\s*no" r"qa|flake8:\s*no" r"qa|fmt:\s*of" r"f|no" r"qa\s*$)", line):
            yield f"{number}: switches the linter off"


def sentences_name_the_tests(file: File):
    for node in file.nodes:
        if file.path.startswith("tests/") and isinstance(node, FUNCTION[:2]) and node.name.startswith("test"):
            words = [word for word in node.name.split("_")[1:] if word]
            if len(words) < 3 or not node.name.startswith("test_"):
                yield f"{node.lineno}: {node.name} is no sentence"
