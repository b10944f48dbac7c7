"""Completes flags and plugin names of train.py with the TAB key: eval "$(python scripts/completion.py bash)", or zsh.

Works for `python train.py ...` and `./train.py ...`; type it again after a plugin is added.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config
from lib.config import plugins
from lib.config.parser import Parser
from lib.config.types import yes_no

PYTHON = """
_python_train_py() {
    [[ ${COMP_WORDS[1]} == *train.py && $COMP_CWORD -gt 1 ]] || return
    COMP_WORDS=("${COMP_WORDS[@]:1}")
    ((COMP_CWORD--))
    _shtab_train_py
}
complete -o bashdefault -o default -F _python_train_py python python3
"""


def main(arguments: list[str]) -> int:
    if arguments not in (["bash"], ["zsh"]):
        print(f"completion.py: {' '.join(arguments) or 'nothing'}: bash or zsh is wanted", file=sys.stderr)
        return 2
    try:
        import shtab
    except ModuleNotFoundError:
        message = "completion.py: needs shtab: uv pip install -r pyproject.toml --group completion"
        print(message, file=sys.stderr)
        return 2
    text = shtab.complete(flags(), arguments[0], root_prefix="train_py")
    print(text + PYTHON if arguments == ["bash"] else text)
    return 0


def flags() -> Parser:
    """Return a parser of all flags, including those of every plugin."""
    made = config.new_parser()
    made.formatter_class = argparse.HelpFormatter  # without defaults: they are those of the plugin loaded last
    for kind in config.BUILDERS:
        names = plugins.names(kind)
        for name in names:
            made.add_plugin_flags(plugins.load_flags(kind, name), f"{kind} {name}")
        made._option_string_actions[f"-{kind}"].choices = names
    for action in made._actions:
        if action.type is yes_no:
            action.choices = ["yes", "no"]
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
