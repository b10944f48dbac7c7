"""Argparse types: functions that turn the text of a flag into its value, or say what is wanted."""

import argparse
import math
import os
import re
from collections.abc import Callable

DIGITS = r"[+-]?[0-9]{1,18}"
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"


def matching(pattern: str, wanted: str, convert: Callable = str, is_right: Callable = lambda value: True) -> Callable:
    """Return a type for text that matches the whole pattern and is right once converted; `wanted` describes it."""

    def read(value: str) -> object:
        if not (re.fullmatch(pattern, value) and is_right(convert(value))):
            raise argparse.ArgumentTypeError(f"{value!r} is not {wanted}")
        return convert(value)

    read.__annotations__["return"] = convert  # for the stub of `args`
    return read


# Surrogates (\ud800 and up) are Python's form of bytes that are not UTF-8.
text = matching(r"[^\x00-\x1f\x7f\ud800-\udfff]+", "a line of text in UTF-8")


def path(value: str) -> str:
    """Return a path with ~ and $NAME replaced, as a shell does on the command line but not in a file, or behind =."""
    found = text(os.path.expanduser(os.path.expandvars(value)))  # noqa: PTH111  # the rest stays as it is
    if unknown := re.match(r"~[^/]*|.*?(\$\w+|\$\{\w+\})", found):
        raise argparse.ArgumentTypeError(f"{value!r}: {unknown[1] or unknown[0]} is no variable and no home here")
    return found


plugin_name = matching(r"(?!\d)\w+", "a plugin's name: letters, digits and underscores, as my_net of my_net.py")
run_name = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name of letters, digits, dots, dashes and underscores")
metric = matching(r"[^\x00-\x1f\x7f:]+(:min|:max)?", "a metric like accuracy, rec:min or f1:max")
every = matching(r"(?=0*[1-9])[0-9]{1,18}(epochs?|steps?|)", "an interval like 5epochs or 500steps")
every_or_minutes = matching(r"auto|(?=0*[1-9])[0-9]{1,18}(epochs?|steps?|minutes?|)", "an interval like 10minutes")
weights = matching(r"balanced|\d+(\.\d+)?(,\d+(\.\d+)?)*", "balanced or a list of numbers like 1,2.5,0.5")
gpu_list = matching(r"\d{1,4}(,\d{1,4})*", "a list of GPUs like 0,1,2")


def whole(low: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `low`."""
    return matching(DIGITS, f"a whole number of at least {low}", int, lambda number: number >= low)


def real(wanted: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a type for finite numbers that are right; `wanted` describes them."""
    return matching(DECIMAL, wanted, float, lambda number: math.isfinite(number) and is_right(number))


def yes_no(value: str) -> bool:
    """Return True for yes, true, on and 1, False for no, false, off and 0."""
    if value.lower() in ("yes", "true", "on", "1"):
        return True
    if value.lower() in ("no", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{value!r} is neither yes nor no")
