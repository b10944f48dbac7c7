"""argparse for this command line: -x is --x, nothing is shortened, errors are one line."""

import argparse
import functools
import re
from types import ModuleType
from typing import NoReturn

from lib.config.types import yes_no
from lib.utils.errors import UsageError, no_exit, suggest

# A flag that stands alone for yes, or has yes or no behind it.
SWITCH = {"nargs": "?", "const": True, "default": False, "type": yes_no, "metavar": "yes|no"}
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf|nan)$")  # a number and not a flag


class Parser(argparse.ArgumentParser):
    """argparse with no abbreviations, and errors that are raised. type=bool and store_true take yes and no."""

    def __init__(self, **options):
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self._negative_number_matcher = NEGATIVE
        self.register("type", bool, yes_no)
        self.register("action", "store_true", functools.partial(argparse._StoreAction, **SWITCH))

    def error(self, message: str) -> NoReturn:
        """Raise what argparse finds wrong."""
        raise UsageError(message)

    def full_name(self, word: str, source: str = "") -> str:
        """Return the word with its flag spelt as argparse knows it. Raise UsageError for an unknown flag."""
        if not word.startswith("-") or NEGATIVE.match(word):
            return word
        name, equals, value = word.partition("=")
        for spelling in (name, name[1:], f"-{name}"):
            if spelling in self._option_string_actions and len(spelling) > 1:
                return spelling + equals + value
        hint = f"{suggest(name, self._option_string_actions)}: a plugin's flag needs its -arch, -dataset or -trainer"
        raise UsageError(f"{source}unknown flag {name}{hint}")

    def to_arguments(self, entries: dict[str, list[str]], path: str) -> list[str]:
        """Return the entries of a -cfg file as words of a command line."""
        words = []
        for key, values in entries.items():
            flag = self.full_name(f"-{key}", f"{path}: ")
            action = self._option_string_actions[flag]
            if isinstance(action, argparse._AppendAction):
                action.default = []  # to which the values would be added
                words += [f"{flag}={value}" for value in values]
            elif action.nargs in (None, "?") or len(values) == 1:
                words.append(f"{flag}={','.join(values)}")  # [1, 2.5] is 1,2.5 on the command line
            elif values or action.nargs == "*":  # others take no empty list, their default
                words += [flag, *values]
        return words

    def add_plugin_flags(self, module: ModuleType, title: str) -> None:
        """Add a plugin's flags. Raises UsageError for one that config.yaml cannot keep."""
        shared = [action.dest for action in self._actions]
        try:
            with no_exit():
                getattr(module, "add_args", lambda parser: None)(self.add_argument_group(title))
        except argparse.ArgumentError as error:
            raise UsageError(f"{module.__name__}: {error}; parser.set_defaults sets another default") from None
        for action in self._actions[len(shared) :]:
            if action.dest in shared:
                raise UsageError(f"{module.__name__}: there is a -{action.dest}; use parser.set_defaults")
            if action.nargs == 0 or action.dest not in [option.lstrip("-") for option in action.option_strings]:
                wanted = f"call it -{action.dest}, with a value or store_true, so that config.yaml can keep it"
                raise UsageError(f"{module.__name__}: {[*action.option_strings, action.dest][0]}: {wanted}")
        self.set_plugin_defaults({}, module)

    def set_plugin_defaults(self, defaults: dict, module: ModuleType) -> None:
        """Set a plugin's defaults. Raise UsageError for a default, here or in its add_args, of an unknown flag."""
        self.set_defaults(**defaults)
        names = [action.dest for action in self._actions]
        for action in self._actions:  # argparse checks the text of a default alone; a plugin's own type may convert
            if getattr(action.type, "__module__", "") == yes_no.__module__ and type(action.default) in (int, float):
                action.default = str(action.default)
        for name in sorted(set(self._defaults) - set(names)):
            raise UsageError(f"{module.__name__}: sets a default of -{name}: no shared flag{suggest(name, names)}")


class Help(argparse.HelpFormatter):
    """Shows the default of a flag behind its help, in lines as long as the terminal's."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is False or action.default in (None, "", argparse.SUPPRESS, [])
        return action.help if hidden else f"{action.help} ({'yes' if action.default is True else '%(default)s'})"
