"""Writes docs/flags.md and lib/config/namespace.pyi from the flags of train.py: python scripts/flags_page.py."""

import argparse
import contextlib
import io
import os
import re
import sys
import typing
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config
from lib.config import flags

ROOT = Path(__file__).resolve().parents[1]
PAGE, STUB = ROOT / "docs" / "flags.md", ROOT / "lib" / "config" / "namespace.pyi"
PLUGINS = ("arch ", "dataset ", "trainer ")  # groups of flags that belong to one plugin: a fork has others
INTRODUCTION = """# Which flags are there?

`python train.py -h` shows these and the chosen plugins' flags. In parentheses: the default run's defaults. In a run
only flags with a mark [may change](resume.md#what-may-change-between-two-starts):

- *allowed*: the run takes the new value.
- *once*: the flag counts for one start, and config.yaml does not keep it.
- *per node*: the machines of one run may have different values.

A flag may be written `-x v`, `-x=v` or `--x v`. A switch (`[yes|no]`) that stands alone is on. `-cfg FILE` reads
flags from YAML (`batch_size: 128`), below the command line.
"""


STUB_HEAD = '''"""Written by scripts/flags_page.py: the types of the shared flags, so that an editor completes `args.`

A plugin's own flags are of type Any.
"""

import argparse

from lib.config import flags

class Args(argparse.Namespace):
    def __init__(self, **values) -> None: ...
    @property
    def flag_rules(self) -> flags.Rules: ...
'''


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in ((PAGE, page()), (STUB, stub())):
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: written")
    return 0


def stub() -> str:
    """The whole stub of lib/config/namespace.py."""
    actions = [action for action in config.new_parser()._actions if action.dest not in ("h", "list")]
    return STUB_HEAD + "".join(f"    {action.dest}: {type_of(action)}\n" for action in actions)


def type_of(action: argparse.Action) -> str:
    """The type of a flag's value, as an annotation."""
    kind = typing.get_type_hints(action.type)["return"].__name__ if action.type else "str"
    if isinstance(action, argparse._AppendAction):
        return f"list[{kind}]"
    never_missing = action.default is not None or action.dest == "model"  # which parse_args makes up
    return kind if never_missing else f"{kind} | None"


def page() -> str:
    """The whole page."""
    shared = [group for group in groups(help_text()) if not group[0].startswith(PLUGINS)]
    return "\n".join([INTRODUCTION, *(section(title, rows) for title, rows in shared)])


def help_text() -> str:
    """What train.py prints for -h."""
    printed, wide = io.StringIO(), mock.patch.dict(os.environ, COLUMNS="1000")  # a flag a line
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        config.parse_args(["-h"])
    return printed.getvalue()


def groups(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The groups of a help text: their titles, each with its flags and what they do."""
    found = []
    for line in text.splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            found.append((title[1], []))
        elif flag := re.fullmatch(r"  (-\S.*?)(?:  +(.*))?", line):
            found[-1][1].append((flag[1], flag[2] or ""))
        elif found and found[-1][1] and line.startswith("   "):
            name, text = found[-1][1][-1]
            found[-1][1][-1] = name, f"{text} {line.strip()}".strip()
    return found


def section(title: str, rows: list[tuple[str, str]]) -> str:
    """A group as a list of Markdown."""
    lines = [f"- `{name}`: {text}{mark(name)}\n" for name, text in rows]
    return f"## {title}\n\n{''.join(lines)}"


def mark(name: str) -> str:
    """What a run does that finds another value of a flag (as `-data DIR`) when it continues; nothing: it refuses."""
    rules, flag = flags.rules(), re.match(r"-(\w+)", name)[1]
    if flag in ("h", "list"):
        return ""
    start = "once" if flag in rules.forgotten else "allowed" if flag in rules.free else ""
    marks = [word for word in (start, "per node" if flag in rules.per_node else "") if word]
    return f"; *{', '.join(marks)}*" if marks else ""


if __name__ == "__main__":
    sys.exit(main())
