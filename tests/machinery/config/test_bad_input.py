"""Wrong input to train.py: one line that says what would be right, exit code 2, nothing written."""

import os
import subprocess
import sys

import pytest
from command_line import shared, usage_error

from lib import config
from lib.config import plugins
from scripts import check_flags

NUMBERS = {name: action for name, action in shared().items() if action.metavar in ("N", "X")}
NO_NUMBERS = ["", " 1", "1 2", "\u0661", *"nan inf -inf 1e400 1_0 x 1,5 0x10 -1 --1".split()]
ZERO_FITS = """ignore_index workers val_workers seed lr_end lr_warmup weight_decay momentum clip_grad label_smoothing
    keep_every keep_hours restarts""".split()
NO_PLUGINS = "nope ../x /abs/olute lib/arch/mlp lib.arch.mlp mlp.py .. os __init__ MLP import -x".split()
NO_PLUGINS += ["mlp\n", "mlp\0", "ä", "x" * 300]
NO_RUNS = "../../x /absolute a/b a\\b .. .hidden é a:b ~ $HOME * -x \u202e".split()
NO_RUNS += ["", " ", "a b", "a\n", "a\0b", "x" * 101]
INTERVALS = ["", "x", "-1", "0steps", "1.5epochs", "5 steps", "1_0steps", "5hours", "steps"]
TEXT = "is not a line of text in UTF-8"
BAD_TEXTS = {  # flag: values, and what is said of each
    "model": (NO_RUNS, "is not a name of letters, digits, dots, dashes and underscores"),
    "save_every": (INTERVALS, "is not an interval like 10minutes"),
    **dict.fromkeys(("out", "data", "resume", "weights"), ([os.fsdecode(b"/no\xff"), "", "a\0b", "a\nb"], TEXT)),
}


def test_a_shared_flag_that_config_yaml_gives_back_as_another_value_is_refused():
    args = config.parse_args(["-arch", "mlp"])
    vars(args)["clip_grad"] = None  # as of a type that has a word for it
    assert "-clip_grad is None, and 0.0 when config.yaml is read again" in usage_error(check_flags.check, args)


@pytest.mark.parametrize("kind", ["arch", "dataset", "trainer"])
def test_an_unknown_plugin_is_refused_and_the_existing_ones_are_listed(kind, error_of):
    for name in NO_PLUGINS:
        before = set(sys.modules)
        line = error_of([f"-{kind}", name])
        assert line.startswith(f"-{kind} {name!r}: no such file in lib/{kind}; there are ")
        assert all(existing in line for existing in plugins.names(kind))
        assert not {module for module in set(sys.modules) - before if module.endswith(name)}


@pytest.mark.parametrize("flag", BAD_TEXTS)
def test_a_text_of_another_form_is_refused(flag, error_of):
    values, wanted = BAD_TEXTS[flag]
    for value in values:
        assert error_of([f"-{flag}={value}"]) == f"argument -{flag}: {value!r} {wanted}"


@pytest.mark.parametrize(("place", "name"), [*enumerate(NUMBERS)])
def test_an_invalid_number_is_refused_for_every_numeric_flag(place, name, error_of):
    """A third of the values for each flag, so each value for a third of the flags."""
    bad = NO_NUMBERS + ([] if name in ZERO_FITS else ["0", "-0", "0e5"])
    bad += ["0.5", "1e3", "9" * 5000] if NUMBERS[name].metavar == "N" else []
    bad += ["1e-400"] if NUMBERS[name].metavar == "X" and name not in ZERO_FITS else []
    for value in sorted({*bad} - ({"-1"} if name in ("lr_end", "ignore_index") else set()))[place % 3 :: 3]:
        line = error_of([f"-{name}={value}", *([] if name == "cpu" else ["-cpu", "1"])])
        assert line.startswith(f"argument -{name}: ") and "is not a" in line and "number" in line
        assert repr(value) in line or len(value) > 1000


def test_an_error_is_one_line_and_exit_code_2_in_the_shell(tmp_path):
    env = {**os.environ, "LC_ALL": "C", "PYTHONPATH": "", "COLUMNS": "20"}
    line = [sys.executable, "-B", str(config.ROOT / "train.py"), "-model", "é\n"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=env)
    assert run.returncode == 2 and not run.stdout
    assert len(run.stderr.splitlines()) == 1 and run.stderr.startswith("train.py: argument -model: ")
    assert not list(tmp_path.iterdir())
