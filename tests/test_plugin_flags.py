"""Plugins and their flags: own flags, other defaults of shared flags, flags set by the data, and errors."""

import pickle
import subprocess
import sys

import pytest
from command_line import cfg_file, help_of, parsed, plugin_file, plugin_folder, read_back, refusal, saved_args

import train
from lib import config, launch
from lib.config import plugins
from lib.core import loss
from lib.utils.errors import UsageError


@pytest.mark.parametrize("number", ["-3", "-3.5", "-.5", "-1e-3", "-1E+3", "-1e3", "-2.", "+4", "1e-3", "-inf"])
def test_a_plugins_flag_accepts_negative_numbers_in_any_form(number, monkeypatch, tmp_path):
    text = "def add_args(parser):\n parser.add_argument('-cold_x', type=float)\n"
    text += " parser.add_argument('-cold_many', type=float, nargs='+')\nget_model = print\n"
    plugin_file(monkeypatch, tmp_path, "arch", "cold", text)
    for command in (["-cold_x", number], [f"-cold_x={number}"], ["--cold_x", number], [f"--cold_x={number}"]):
        assert parsed(["-arch", "cold", *command, "-seed", "3"]).cold_x == float(number)
    assert parsed(["-arch", "cold", "-cold_many", number, "2", number]).cold_many == [float(number), 2, float(number)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("add_argument('-epochs', type=int)", "conflicting option string: -epochs"),
        ("add_argument('-odd_x', dest='epochs')", "there is a -epochs; use parser.set_defaults"),
        ("add_argument('--epochs', type=int)", "there is a -epochs; use parser.set_defaults"),
        ("add_argument('--odd-x')", "--odd-x: call it -odd_x, with a value or store_true"),
        ("add_argument('odd_x')", "odd_x: call it -odd_x, with a value or store_true"),
        ("add_argument('-odd_x', action='store_false')", "-odd_x: call it -odd_x, with a value or store_true"),
        ("add_argument('-odd_x', action='count')", "-odd_x: call it -odd_x, with a value or store_true"),
        ("set_defaults(epoch=3)", "sets a default of -epoch: no shared flag (do you mean epochs?)"),
    ],
)
def test_a_plugin_flag_that_config_yaml_cannot_hold_is_refused(line, message, monkeypatch, tmp_path):
    plugin_file(monkeypatch, tmp_path, "arch", "odd", f"def add_args(parser): parser.{line}\nget_model = print\n")
    assert refusal("-arch odd").startswith("lib.arch.odd: ") and message in refusal("-arch odd")


@pytest.mark.parametrize(
    ("kind", "name"), [("arch", "get_model"), ("dataset", "get_dataset"), ("trainer", "Trainer")]
)
def test_a_plugin_without_its_builder_is_refused(kind, name, monkeypatch, tmp_path):
    plugin_folder(monkeypatch, tmp_path, kind, "odd", "def get_modle(args): pass\n")
    with pytest.raises(UsageError, match=f"-{kind} odd: lib/{kind}/odd.py has no {name}"):
        plugins.load(kind, "odd")


@pytest.mark.parametrize("place", ["", "def add_args(parser): "])
def test_a_plugin_that_calls_sys_exit_while_flags_are_read_fails_the_run(place, monkeypatch, tmp_path):
    plugin_folder(monkeypatch, tmp_path, "arch", "quits", f"import sys\n{place}sys.exit(0)\nget_model = print\n")
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\) was called"):
        train.main(["-arch", "quits", "-out", str(tmp_path / "out")])


def test_a_plugin_that_cannot_be_read_shows_its_own_error_alone(monkeypatch, tmp_path):
    plugin_folder(monkeypatch, tmp_path, "arch", "half", "def get_model(args:\n")
    with pytest.raises(SyntaxError) as caught:
        parsed("-arch half")
    assert caught.value.filename == str(tmp_path / "half.py") and caught.value.__context__ is None


def test_a_plugin_that_needs_a_missing_package_is_refused_with_its_name(monkeypatch, tmp_path):
    plugin_folder(monkeypatch, tmp_path, "arch", "lacks", "import nowhere_at_all\nget_model = print\n")
    with pytest.raises(UsageError, match=r"-arch lacks: .* No module named 'nowhere_at_all': .*is .venv active"):
        plugins.load("arch", "lacks")


def test_a_flag_of_a_plugin_that_is_not_chosen_is_refused_with_what_it_needs(tmp_path):
    said = "unknown flag -zebra_stripes: a plugin's flag needs its -arch, -dataset or -trainer"
    assert refusal("-zebra_stripes 3") == said
    path = cfg_file(tmp_path, "zebra_stripes: 3\n")
    assert refusal(["-cfg", path]) == f"{path}: {said}"


def test_a_list_that_a_flag_makes_of_one_word_is_read_back_from_config_yaml(monkeypatch, tmp_path):
    text = "def numbers(text): return [int(one) for one in text.split(',')]\n"
    text += "def add_args(parser): parser.add_argument('-odd_sizes', type=numbers, default=[])\nget_model = print\n"
    plugin_file(monkeypatch, tmp_path, "arch", "odd", text)
    args = parsed("-arch odd -odd_sizes 3,4")
    assert read_back(args, tmp_path)["odd_sizes"] == args.odd_sizes == [3, 4]


def test_two_plugins_with_the_same_flag_are_refused(monkeypatch, tmp_path):
    text = "def add_args(parser): parser.add_argument('-same_x')\nget_model = get_dataset = print\n"
    plugin_file(monkeypatch, tmp_path, "arch", "one", text)
    plugin_file(monkeypatch, tmp_path, "dataset", "two", text)
    assert parsed("-arch one").same_x is None is parsed("-dataset two -arch mlp").same_x
    with pytest.raises(UsageError, match="-same_x: conflicting option string"):
        parsed("-arch one -dataset two")


def test_a_dataset_sets_the_default_arch(monkeypatch, tmp_path):
    text = """
def add_args(parser): parser.set_defaults(arch="resnet", num_classes=3, lr_start=0.25)
def get_dataset(args): pass
"""
    plugin_file(monkeypatch, tmp_path, "dataset", "suited", text)
    args = parsed("-dataset suited")
    assert (args.arch, args.num_classes, args.lr_start, args.resnet_depth) == ("resnet", 3, 0.25, 18)
    args = parsed("-dataset suited -arch mlp -num_classes 4")
    assert (args.arch, args.num_classes, "resnet_depth" in args) == ("mlp", 4, False)


def test_a_dataset_sets_flags_from_its_data(monkeypatch, tmp_path, capsys):
    text = """
import pathlib
from lib.utils.errors import UsageError
def add_args(parser):
    parser.add_argument("-described_extra", type=int, default=0, help="more")
    parser.set_defaults(num_classes=2, image_size=5)
def describe(args):
    names = pathlib.Path(args.data)
    if not names.is_dir():
        raise UsageError(f"-data {args.data}: no such folder")
    return {"num_classes": len(list(names.iterdir())) + args.described_extra}
def get_dataset(args): pass
"""
    plugin_file(monkeypatch, tmp_path, "dataset", "described", text)
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / name).touch()
    command = ["-dataset", "described", "-data", str(tmp_path / "data")]
    assert parsed(command).num_classes == 3 and parsed(command).image_size == 5
    assert parsed([*command, "-described_extra", "4"]).num_classes == 7
    assert parsed([*command, "-num_classes", "9"]).num_classes == 9
    file = cfg_file(tmp_path, f"dataset: described\ndata: {tmp_path / 'data'}\ndescribed_extra: 2\n")
    assert parsed(["-cfg", file]).num_classes == 5
    assert parsed(["-cfg", cfg_file(tmp_path, "num_classes: 8"), *command]).num_classes == 8
    assert refusal(["-dataset", "described", "-data", "nowhere"]) == "-data nowhere: no such folder"
    assert "-described_extra" in help_of(["-dataset", "described", "-data", "nowhere", "-h"], capsys)


def test_describe_with_an_unknown_flag_is_refused(monkeypatch, tmp_path):
    text = "def describe(args): return {'classes': 3}\nget_dataset = print\n"
    plugin_file(monkeypatch, tmp_path, "dataset", "wrong", text)
    said = "lib.dataset.wrong: sets a default of -classes: no shared flag (do you mean num_classes"
    assert refusal("-dataset wrong").startswith(said)


def test_describe_that_calls_exit_does_not_end_the_program_as_if_it_were_finished(monkeypatch, tmp_path):
    text = "import sys\ndef describe(args): sys.exit(0)\nget_dataset = print\n"
    plugin_file(monkeypatch, tmp_path, "dataset", "leaves", text)
    with pytest.raises(RuntimeError, match="the run is not finished"):
        parsed("-dataset leaves")


PROBE = """
import sys, train
for line in sys.argv[1:]:
    wanted, *arguments = line.split()
    try:
        code = train.main(arguments)
    except SystemExit as end:
        code = end.code
    slow = {"torch", "torchvision", "numpy", "PIL", "submitit"} & set(sys.modules)
    assert code == int(wanted) and not slow, (line, code, slow)
"""


def test_help_and_wrong_flags_are_answered_without_importing_torch():
    """Importing torch takes seconds. -dataset tokens and folder have read the data that they describe by then."""
    shipped = {"arch": "convnet gpt mlp resnet", "dataset": "digits fake tokens", "trainer": "ema trainer"}
    lines = ["0 -h", "2 -lr_strat 3", "2 -arch nope", "2 -epochs 0"]
    lines += ["2 -cfg scripts/recipes/digits.yaml -epochs 0"] * (config.ROOT / "scripts" / "recipes").is_dir()
    for kind, its_names in shipped.items():
        there = [f"-{kind} {name}" for name in its_names.split() if name in plugins.names(kind)]
        lines += [f"0 {command} -h" for command in there] + [f"2 {command} -lr_end 9" for command in there]
    lines += ["2 -dataset folder -data nowhere"]
    done = subprocess.run([sys.executable, "-c", PROBE, *lines], cwd=config.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "CHOICES = ['a']\nCHOICES.append('b')\nget_model = print\n",
        "from string import *\nCHOICES = ['a', 'b']\nget_model = print\n",
        "try:\n    import no_such_package\nexcept ImportError:\n    CHOICES = 'ab'\nget_model = print\n",
        "from __future__ import annotations\nif True:\n    def get_model(args): pass\n"
        "    CHOICES = {'a': 1, 'b': 2}\n",
        "CHOICES = {}\ndef register(function):\n    CHOICES[function.__name__] = function\n    return function\n"
        "@register\ndef a(): pass\n@register\ndef b(): pass\nget_model = print\n",
        "CHOICES = []\ndef fill(): more()\ndef more(): CHOICES.extend('ab')\nfill()\nget_model = print\n",
        "import enum\nclass CHOICES(str, enum.Enum):\n    a, b = 'a', 'b'\nget_model = print\n",
    ],
)
def test_all_code_that_a_plugins_flags_need_is_executed(text, monkeypatch, tmp_path):
    own = "def add_args(parser):\n    parser.add_argument('-made_x', type=kind, choices=list(CHOICES))\n"
    kind = "def kind(text):\n    return CHOICES(text) if callable(CHOICES) else text\n"
    plugin_folder(monkeypatch, tmp_path, "arch", "made", text + kind + own)
    args = parsed("-arch made -made_x b")
    assert args.made_x == "b" and pickle.loads(pickle.dumps(args)) == args
    assert "invalid choice" in refusal("-arch made -made_x c") or "'c'" in refusal("-arch made -made_x c")


def test_only_code_that_a_plugins_flags_need_is_executed(monkeypatch, tmp_path, capsys):
    text = "import random\nprint(1)\ndef add_args(of): of.add_argument('-lazy_x')\nget_model = random.random()"
    plugin_folder(monkeypatch, tmp_path, "arch", "lazy", text)
    assert parsed("-arch lazy -lazy_x 3").lazy_x == "3" and not capsys.readouterr().out
    assert plugins.load("arch", "lazy").get_model == 0.5072458626150149 and capsys.readouterr().out == "1\n"


def test_a_loss_file_without_a_table_takes_any_name(monkeypatch):
    """As that of the source template."""
    monkeypatch.delattr(loss, "BY_NAME")
    launch.prepare(parsed("-arch mlp -loss anything"))


def test_plugin_files_of_the_source_template_run_unchanged(monkeypatch, tmp_path):
    text = """
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x)

def get_model(args):
    return Model()
"""
    plugin_file(monkeypatch, tmp_path, "arch", "plain", text)
    text = """
import torch
from torch.utils.data import Dataset

class Random(Dataset):
    def __init__(self):
        self.data = torch.randn(40, 16)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index]

def get_dataset(args):
    return Random()
"""
    plugin_file(monkeypatch, tmp_path, "dataset", "plain", text)
    command = f"-arch plain -dataset plain -loss mse -cpu 1 -epochs 2 -out {tmp_path / 'out'}"
    assert train.main(command.split()) == 0
    assert (tmp_path / "out" / "plain_plain" / "final" / "weights.safetensors").is_file()


def test_config_yaml_holds_every_kind_of_plugin_flag(monkeypatch, tmp_path):
    text = """
import argparse, pathlib
def add_args(parser):
    parser.add_argument("-many_path", type=pathlib.Path, default=pathlib.Path("x y"))
    parser.add_argument("-many_limit", type=float, default=float("inf"))
    parser.add_argument("-many_on", action="store_true")
    parser.add_argument("-many_flag", type=bool, default=True)
    parser.add_argument("-many_widths", type=int, nargs="+", default=[64, 64])
    parser.add_argument("-many_pair", type=float, nargs=2)
    parser.add_argument("-many_words", action="append")
    parser.add_argument("--many_dashes", "-m", default="a")
    parser.add_argument("-many_needed", required=True)
def get_model(args): pass
"""
    plugin_file(monkeypatch, tmp_path, "arch", "many", text)
    base = "-arch many -many_needed=-x "
    commands = ["", "-many_on", "-many_on -many_flag no -many_path /a/b -many_limit 3", "-many_on=no -m b"]
    commands += ["-many_widths 1", "-many_widths 1 2 3 -many_pair -1e-3 -.5", "-many_words=a -many_words=-b"]
    for command in commands:
        args = parsed(base + command)
        assert read_back(args, tmp_path) == saved_args(args), command
    assert args.many_words == ["a", "-b"] and args.many_flag is True and args.many_on is False
    assert parsed(base + "-many_flag=False").many_flag is False
    assert "the following arguments are required: -many_needed" in refusal("-arch many")
    file = tmp_path / "config.yaml"
    file.write_text("arch: many\n")
    assert parsed(["-cfg", str(file), "-many_needed", "a"]).many_needed == "a"
    text = "def add_args(parser): parser.add_argument('-raw', default=3); parser.set_defaults(steps=9)"
    text += "; parser.add_argument('-off', type=lambda t: None if t == 'no' else int(t), default=5)"
    plugin_file(monkeypatch, tmp_path, "arch", "raw", f"{text}\ndef get_model(args): pass")
    assert (parsed("-arch raw").steps, parsed("-arch raw -epochs 2").steps) == (9, None)
    pytest.importorskip("scripts.check_flags")
    with pytest.raises(UsageError, match="-raw is 3, and '3' when"):
        plugins.load_chosen(parsed("-arch raw"))
    with pytest.raises(UsageError, match="-off is None, and 5 when"):
        plugins.load_chosen(parsed("-arch raw -off no"))


@pytest.mark.parametrize(
    "lines",
    [
        "A = 3",
        "A = 3\nA += 1",
        "B = 3\nA = 2 * B",
        "A: int = 3",
        "A = B = 3",
        "if hasattr(sys, 'argv'):\n    A = 3",
        "try:\n    A = missing\nexcept NameError:\n    A = 3",
        "from math import *\nA = pi",
        "@dataclasses.dataclass\nclass Options:\n    size: int = 3\nA = Options().size",
        "def triple(number=1):\n    return 3 * number\ntriple.__defaults__ = (2,)\nA = 3",
        "A = 3\nfor number in range(3):\n    A = number",
    ],
)
def test_flags_read_from_a_plugins_source_are_those_of_the_executed_file(lines, monkeypatch, tmp_path):
    own = "def add_args(parser):\n    parser.add_argument('-whole_a', default=A)\n"
    text = f"import dataclasses, sys\n{lines}\n{own}def get_model(args): pass\n"
    plugin_folder(monkeypatch, tmp_path, "arch", "whole", text)
    whole = {}
    exec(text, whole)
    assert parsed(["-arch", "whole"]).whole_a == whole["A"]
