"""Wrong input to train.py: one line that says what would be right, exit code 2, nothing written."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import command_line
import pytest
import torch
from command_line import parsed, plugin_folder, shared
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import config
from lib.config import plugins
from lib.utils.errors import UsageError

RELAXED = settings(deadline=None, derandomize=True)
NUMBERS = {name: action for name, action in shared().items() if action.metavar in ("N", "X")}
NO_NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1e400",
    "1_0",
    "",
    "x",
    "1,5",
    "0x10",
    " 1",
    "1 2",
    "\u0661",
    "-1",
    "--1",
]
ZERO_FITS = [
    "ignore_index",
    "workers",
    "val_workers",
    "seed",
    "lr_end",
    "lr_warmup",
    "weight_decay",
    "momentum",
    "clip_grad",
    "label_smoothing",
    "keep_every",
]


@pytest.fixture
def error_of(tmp_path, capsys):
    """A function that returns the error of a command line."""
    return partial(command_line.error_of, out=tmp_path / "out", capsys=capsys)


# Names


@pytest.mark.parametrize("kind", ["arch", "dataset", "trainer"])
@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "../x",
        "/abs/olute",
        "lib/arch/mlp",
        "mlp.py",
        "lib.arch.mlp",
        ".",
        "..",
        "os",
        "sys",
        "__init__",
        "a b",
        "MLP",
        "mlp\n",
        "mlp\0",
        "ä",
        "import",
        "None",
        "-x",
        "x" * 300,
    ],
)
def test_an_unknown_plugin_is_refused_and_the_existing_ones_are_listed(kind, name, error_of):
    before = set(sys.modules)
    line = error_of([f"-{kind}", name])
    assert line.startswith(f"-{kind} {name!r}: no such file in lib/{kind}; there are ")
    assert all(existing in line for existing in plugins.names(kind))
    assert not {module for module in set(sys.modules) - before if module.endswith(name)}


@pytest.mark.parametrize(
    ("flag", "close"),
    [
        ("-arch=convmet", "convnet"),
        ("-dataset=digit", "digits"),
        ("-dataset=cifar", "cifar10"),
        ("-trainer=train", "tr"),
    ],
)
def test_a_misspelt_plugin_is_refused_and_the_closest_is_suggested(flag, close, error_of):
    assert f"(do you mean {close}" in error_of([flag])


@pytest.mark.parametrize("flag", ["optimizer", "loss", "lr_schedule"])
def test_an_unknown_choice_is_refused_and_the_valid_ones_are_listed(flag, error_of):
    for value in ("nope", "", "os", "../x", "ADAM"):
        line = error_of([f"-{flag}={value}"])
        assert f"-{flag}: invalid choice: {value!r}" in line
        assert all(choice in line for choice in shared()[flag].choices)


@pytest.mark.parametrize(
    ("flag", "close"),
    [
        ("-epohcs", "-epochs"),
        ("-batchsize", "-batch_size"),
        ("-learn", None),
        ("--modle", "-model"),
        ("-res", "-reset or -resume"),
    ],
)
def test_an_unknown_flag_is_refused_and_the_closest_is_suggested(flag, close, error_of):
    line = error_of([flag, "3"])
    assert line.startswith(f"unknown flag {flag}")
    assert close is None or f"(do you mean {close}" in line


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/absolute",
        "a/b",
        "a\\b",
        "",
        ".",
        "..",
        ".hidden",
        " ",
        "a b",
        " a",
        "a\n",
        "a\nb",
        "a\0b",
        "a\tb",
        "é",
        "a:b",
        "~",
        "$HOME",
        "*",
        "-x",
        "x" * 101,
        "x" * 300,
        "\u202e",
        "😀",
    ],
)
def test_a_run_name_with_invalid_characters_is_refused(name, error_of):
    line = error_of([f"-model={name}"])
    assert line == f"argument -model: {name!r} is not a name of letters, digits, dots, dashes and underscores"


@RELAXED
@given(st.text(max_size=8) | st.text("ab./\\-_~ \0\n", max_size=8))
def test_a_valid_run_name_stays_below_the_output_folder(name):
    try:
        name = parsed([f"-model={name}"]).model
    except UsageError:
        return
    assert Path("out", name).resolve().parent == Path("out").resolve()
    assert name.isascii() and len(name) <= 100 and not name.startswith(".") and not set(name) & set("/\\ ~")


# Numbers


@pytest.mark.parametrize("name", NUMBERS)
def test_an_invalid_number_is_refused_for_every_numeric_flag(name, error_of):
    bad = NO_NUMBERS + ([] if name in ZERO_FITS else ["0", "-0", "0.0", "0e5"])
    bad += ["0.5", "1e3", "9" * 19, "9" * 5000] if NUMBERS[name].metavar == "N" else []
    bad += ["1e309", "1e-400"] if NUMBERS[name].metavar == "X" and name not in ZERO_FITS else []
    for value in set(bad) - ({"-1"} if name in ("lr_end", "ignore_index") else set()):
        forms = [[f"-{name}={value}"], [f"--{name}={value}"]] + ([] if value == "--1" else [[f"-{name}", value]])
        for flags in forms:
            line = error_of([*flags, *([] if name == "cpu" else ["-cpu", "1"])])
            assert line.startswith(f"argument -{name}: ") and "is not a" in line and "number" in line
            assert repr(value) in line or len(value) > 1000


@RELAXED
@given(name=st.sampled_from(sorted(NUMBERS)), text=st.text("0123456789.eE+-_naif x", max_size=7))
def test_an_accepted_number_has_the_value_that_was_written(name, text):
    try:
        value = vars(parsed([f"-{name}={text}", "-lr_end=0", *(["-micro_batch=1"] if "batch" in name else [])]))[name]
    except UsageError:
        return
    if name not in ("lr_end", "micro_batch"):
        assert value == float(text) and math.isfinite(value) and value >= 0 and "_" not in text


@pytest.mark.parametrize(
    "value", ["", "x", "-1", "0", "0steps", "1.5epochs", "5 steps", "1_0steps", "5hours", "10min", "steps"]
)
def test_an_invalid_interval_is_refused(value, error_of):
    assert error_of([f"-save_every={value}"]).startswith(
        f"argument -save_every: {value!r} is not an interval like 5epochs or 500steps"
    )


def own_numbers():
    """The numeric flags of the shipped plugins."""
    for kind in ("arch", "dataset"):
        for name in plugins.names(kind):
            parser = config.new_parser()
            count = len(parser._actions)
            parser.add_plugin_flags(plugins.load_flags(kind, name), name)
            yield from ((kind, name, own.dest) for own in parser._actions[count:] if own.type in (int, float))


@pytest.mark.parametrize(("kind", "name", "flag"), list(own_numbers()))
def test_an_invalid_number_is_refused_for_the_flags_of_plugins(kind, name, flag, error_of, tmp_path):
    for value in ("", "x", "1,5", "1 2"):
        line = error_of([f"-{kind}={name}", f"-{flag}={value}", "-data", str(tmp_path)])
        assert line.startswith(f"argument -{flag}: invalid ") and repr(value) in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-hang_minutes 1e308", "'1e308' is not a number above 0 up to 1000000"),
        ("-grace_s 1e308", "'1e308' is not a number above 0 up to 1000000"),
        ("-momentum 1", "'1' is not a number from 0 to below 1"),
        ("-trainer ema -ema_decay 1", "'1' is not a number from 0 to below 1"),
        ("-trainer ema -ema_decay inf", "'inf' is not a number from 0 to below 1"),
        ("-trainer ema -ema_decay nan", "'nan' is not a number from 0 to below 1"),
    ],
)
def test_a_number_out_of_range_is_refused(flags, message, error_of):
    assert error_of(flags) == f"argument {flags.split()[-2]}: {message}"


def test_a_path_that_is_not_utf_8_is_refused(error_of, tmp_path):
    for flag in ("out", "data", "resume", "weights"):
        path = str(tmp_path / os.fsdecode(b"\xff"))
        assert error_of([f"-{flag}", path]) == f"argument -{flag}: {path!r} is not a line of text in UTF-8"


# Flags that contradict each other


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("-fp16 -bf16", ["-fp16 and -bf16", "give one"]),
        ("-gpus 0 -cpu 1", ["-gpus", "-cpu", "give one"]),
        ("-batch_size 8 -batch_per_gpu 8", ["-batch_size", "-batch_per_gpu", "give one"]),
        ("-cpu 1 -batch_size 10 -micro_batch 4", ["-batch_size 10", "-micro_batch 4", "try -batch_size 8"]),
        ("-cpu 1 -batch_per_gpu 3 -micro_batch 2", ["-batch_size 3", "cannot be cut", "-micro_batch 2"]),
        ("-cpu 1 -batch_size 5000 -drop_last", ["-batch_size 5000", "-drop_last", "1259 training samples"]),
        ("-lr_start 1e-3 -lr_end 1", ["-lr_end 1.0", "-lr_start 0.001"]),
        ("-cpu 1 -data nowhere", ["-data nowhere", "digits.npz"]),
        ("-cpu 1 -arch gpt -gpt_heads 5", ["-gpt_width 128", "-gpt_heads 5"]),
    ],
)
def test_contradicting_flags_are_refused_with_values_that_would_work(flags, parts, error_of, monkeypatch):
    monkeypatch.chdir(config.ROOT)
    line = error_of([*flags.split(), *([] if "-data" in flags else ["-data", str(config.ROOT / "data")])])
    assert all(part in line for part in parts), line


def test_gpus_that_do_not_exist_are_refused(error_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert error_of("-gpus 0,5,7") == "-gpus 0,5,7: 2 GPUs are visible here (4,5), numbered from 0"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    line = error_of(f"-gpus 0 -data {config.ROOT}/data")
    assert line.startswith("-gpus 0: torch ") and line.endswith("-cpu N trains on the CPU")
    for value in ("", "GPU-1", "0,,1", "-1", "0;1", "all!", "0 1"):
        assert error_of([f"-gpus={value}"]).startswith(f"argument -gpus: {value!r} is not a list of GPUs like 0,1,2")


def test_slurm_is_refused_on_a_machine_without_sbatch(error_of, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert error_of("-slurm -slurm_ngpus 2").startswith("-slurm: there is no sbatch on this machine")


def test_a_plugin_that_cannot_be_imported_is_refused_with_file_and_reason(error_of, monkeypatch, tmp_path):
    plugin_folder(monkeypatch, tmp_path, "arch", "missing", "import no_such_package.part\n")
    reason = "lib/arch/missing.py cannot be imported: No module named 'no_such_package'"
    assert error_of("-arch missing").startswith(f"-arch missing: {reason}")


# As a command of the shell


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-epochs", "0"], "argument -epochs: '0' is not a whole number of at least 1"),
        (["-arch", "../x"], "-arch '../x': no such file in lib/arch; there are convnet"),
        (["-model", "é\n"], "is not a name"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2_in_the_shell(flags, message, tmp_path):
    env = {**os.environ, "LC_ALL": "C", "PYTHONPATH": "", "COLUMNS": "20"}
    line = [sys.executable, "-B", str(config.ROOT / "train.py"), *flags]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=env)
    assert run.returncode == 2 and not run.stdout
    assert len(run.stderr.splitlines()) == 1 and run.stderr.startswith("train.py: ") and message in run.stderr
    assert not list(tmp_path.iterdir())


def test_every_numeric_flag_is_tested_above():
    numeric = {name for name, action in shared().items() if callable(action.type) and numeric_type(action.type)}
    assert numeric == set(NUMBERS) and len(numeric) > 25 and set(ZERO_FITS) <= numeric


def numeric_type(kind) -> bool:
    return kind.__qualname__.split(".")[0] in ("whole", "real")
