"""What the values of flags may be: readers that give the value, or say what is wanted."""

import argparse
import keyword
import math
import re

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
GPU = re.compile(r"[0-9]{1,4}|[A-Za-z][A-Za-z0-9/-]*")


def whole(low: int):
    """A reader of whole numbers of at least `low`."""

    def read(text):
        if not WHOLE.fullmatch(text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low} (18 digits at most)")
        return int(text)

    return read


def real(low: float, high: float = math.inf, above: bool = False, below: bool = False):
    """A reader of finite numbers from `low` (or above it) to `high` (or below it)."""

    def read(text):
        value = float(text) if REAL.fullmatch(text) else math.nan
        excluded = (above and value == low) or (below and value == high)
        if not (low <= value <= high) or math.isinf(value) or excluded:
            bottom = f" {'above' if above else 'from'} {low}" if low > -math.inf else ""
            top = f" {'to below' if below else 'up to'} {high}" if high < math.inf else ""
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


def matching(pattern: str, wanted: str):
    """A reader of text that the pattern fits from end to end; `wanted` says what that is."""

    def read(value):
        if not re.fullmatch(pattern, value):
            raise argparse.ArgumentTypeError(f"{value!r} is not {wanted}")
        return value

    return read


every = matching(r"(?=0*[1-9])[0-9]{1,18}(epochs?|steps?|min|)", "an interval like 5epochs, 500steps or 10min")
run_name = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name of letters, digits, dots, dashes and underscores")
suffix = matching(r"[A-Za-z0-9-]*", "the end of a host name: letters, digits, dashes")
key_value = matching(r"[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?", "an option of sbatch like reservation=school or exclusive")


def plugin_name(text: str) -> str:
    """A checked plugin name: an identifier, never a path."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plugin's name: a file's name without .py is wanted")
    return text


def text(value: str) -> str:
    """Text that is not empty and fits on a line."""
    if not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise argparse.ArgumentTypeError(f"{value!r} is empty or holds control characters")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # how Python keeps bytes that it cannot decode
        raise argparse.ArgumentTypeError(f"{value!r} is not UTF-8: rename it")
    return value


def metric(value: str) -> str:
    """The name of a metric, alone or with :min or :max."""
    name, colon, way = text(value).partition(":")
    if not name or (colon and way not in ("min", "max")):
        raise argparse.ArgumentTypeError(f"{value!r} is no metric like accuracy, rec:min or f1:max")
    return value


def port(text: str) -> int:
    """A number of a TCP port."""
    value = whole(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 65535 is the last")
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
