"""What the values of flags may be: readers that give the value, or say what is wanted."""

import argparse
import keyword
import math
import re

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GPU = re.compile(r"[0-9]{1,4}|[A-Za-z][A-Za-z0-9/-]*")
OPTION = re.compile(r"[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?")
SUFFIX = re.compile(r"[A-Za-z0-9-]*")
EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+")
EVERY = re.compile(r"([0-9]{1,18})(epochs?|steps?|min|)")


def whole(low: int):
    """A reader of whole numbers of at least `low`."""

    def read(text):
        if not WHOLE.fullmatch(text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low} (18 digits at most)")
        return int(text)

    return read


def real(low: float, high: float = math.inf, above: bool = False):
    """A reader of finite numbers from `low` (or above it) to `high`."""

    def read(text):
        value = float(text) if REAL.fullmatch(text) else math.nan
        if not (low <= value <= high) or math.isinf(value) or (above and value == low):
            bottom = f" {'above' if above else 'from'} {low}" if low > -math.inf else ""
            top = f" up to {high}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{bottom}{top}")
        return value

    return read


def integer(text: str) -> int:
    """A whole number in digits: int() would take 1_0 and digits of other scripts."""
    if not WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """A number in digits, or inf or nan."""
    if not REAL.fullmatch(text) and text.lower().lstrip("+-") not in ("inf", "nan"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def every(text: str) -> str:
    """A checked interval: 5 or 5epochs, 500steps, 10min."""
    match = EVERY.fullmatch(text)
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval like 5epochs, 500steps or 10min")
    return text


def run_name(text: str) -> str:
    """A checked folder name for a run."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits, dots, dashes and underscores")
    return text


def plugin_name(text: str) -> str:
    """A checked plugin name: an identifier, never a path."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plugin's name: a file's name without .py is wanted")
    return text


def email(value: str) -> str:
    """A checked e-mail address."""
    if not EMAIL.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not an e-mail address")
    return value


def text(value: str) -> str:
    """Text that is not empty and fits on a line."""
    if not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise argparse.ArgumentTypeError(f"{value!r} is empty or holds control characters")
    return value


def port(text: str) -> int:
    """A number of a TCP port."""
    value = whole(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 65535 is the last")
    return value


def suffix(text: str) -> str:
    """The end of a host name's first part; empty for none."""
    if not SUFFIX.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the end of a host name: letters, digits, dashes")
    return text


def key_value(value: str) -> str:
    """An option of sbatch without its dashes, with =VALUE if it takes one."""
    if not OPTION.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not an option of sbatch like reservation=school or exclusive")
    return value


def gpu_list(text: str) -> str:
    """GPUs by index or UUID, each once."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not all(GPU.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPUs like 0,1,2 or GPU-8932f937, each once")
    return ",".join(names)


def yes_no(text: str) -> bool:
    """True or False of yes, no, true, false, 1, 0."""
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")
