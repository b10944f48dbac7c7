"""argparse as the command line here is read: -x as --x, nothing shortened, errors raised and told in one line."""

import argparse
import ast
import re
import sys
from pathlib import Path

from lib.config.types import yes_no
from lib.utils.errors import UsageError, close

NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE | re.DOTALL)  # meant as a number, no flag


class Parser(argparse.ArgumentParser):
    """argparse with -x as --x, no abbreviations, and errors that are raised."""

    def error(self, message):
        raise UsageError(message if len(message) < 2000 else f"{message[:1000]} ... {message[-900:]}")

    def exact(self, word: str, source: str = "") -> str:
        """The word as argparse reads it without guessing. Raises UsageError for a flag that there is not."""
        if not word.startswith("-") or NEGATIVE.match(word):
            return word
        name, equals, value = word.partition("=")
        for spelling in (name, name[1:], f"-{name}"):
            if spelling in self._option_string_actions and len(spelling) > 1:
                return spelling + equals + value
        raise UsageError(f"{source}unknown flag {name}{close(name, self._option_string_actions)}")

    def words_of(self, entries: dict[str, list[str]], path: str) -> list[str]:
        """What the entries of a -cfg file would be on the command line."""
        words = []
        for key, values in entries.items():
            flag = self.exact(f"-{key}", f"{path}: ")
            action = self._option_string_actions[flag]
            if isinstance(action, argparse._AppendAction) and action.nargs is None:
                words += [f"{flag}={value}" for value in values]
            elif action.nargs in (None, "?", 0) and len(values) != 1:
                raise UsageError(f"{path}: -{key} takes one value and not the list [{', '.join(values[:9])}]")
            elif any(value.startswith("-") and not NEGATIVE.match(value) for value in values[1:]):
                raise UsageError(
                    f"{path}: -{key}: values in a list cannot begin with a dash: {', '.join(values[:9])}"
                )
            else:
                words += [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
        return words

    def add_own(self, module, title: str):
        """Lets a plugin add its flags. Raises UsageError for one that is there already or that no file can hold."""
        file, shared = _file(module), list(self._actions)
        taken = {option.lstrip("-") for action in shared for option in action.option_strings}
        try:
            module.add_args(self.add_argument_group(title))
        except argparse.ArgumentError as error:
            raise UsageError(f"{file}: its flag clashes with a shared one ({error})") from None
        for action in self._actions[len(shared) :]:
            own = {option.lstrip("-") for option in action.option_strings}
            if taken & {*own, action.dest}:
                raise UsageError(f"{file}: its flag -{action.dest} clashes with a shared one")
            if action.dest not in own or action.nargs == 0:
                raise UsageError(f"{file}: {action.dest}: config.yaml needs a flag -{action.dest} with a value, or "
                                 "store_true")  # fmt: skip
        self.set_known({}, module)

    def set_known(self, defaults: dict, module):
        """Sets defaults for a plugin. Raises UsageError where they, or those it set itself, are of unknown flags."""
        self.set_defaults(**defaults)
        names = [action.dest for action in self._actions]
        for name in sorted(set(self._defaults) - set(names)):
            raise UsageError(f"{_file(module)}: sets the default of -{name}, which is no flag{close(name, names)}")


class Help(argparse.HelpFormatter):
    """One line a flag where it fits, the default behind it."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=118)

    def _get_help_string(self, action):
        quiet = action.default in (None, False, "", argparse.SUPPRESS) or action.default == []
        return action.help if quiet else f"{action.help} (%(default)s)"


class Switch(argparse.Action):
    """A flag that stands alone for yes, or has yes or no behind it."""

    def __init__(self, option_strings, dest, default=False, required=False, help=None):
        super().__init__(option_strings, dest, nargs="?", const=True, default=default, type=yes_no, required=required,
                         help=help, metavar="yes|no")  # fmt: skip

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)


class Listing(argparse.Action):
    """A flag that shows the plugins, each with the first line of its docstring, and ends, as -h does."""

    def __init__(self, option_strings, dest, help=None):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        for kind in ("arch", "dataset", "trainer"):
            files = sorted((Path(__file__).parents[1] / kind).glob("[!_]*.py"))
            rows = (f"  {file.stem:20} {summary(file)}\n" for file in files)
            parser._print_message(f"-{kind} NAME\n{''.join(rows)}", sys.stdout)
        parser.exit()


def summary(file: Path) -> str:
    """The first line of a Python file's docstring."""
    try:
        return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    except (SyntaxError, ValueError) as error:
        return f"cannot be read: {error}"


def _file(module):
    return f"{module.__name__.replace('.', '/')}.py"
