"""The command line: which flags exist, how they are read, which errors they give, what -h shows, and args."""

import argparse
import copy
import pickle
import re

import pytest
from command_line import ALONE, cfg_file, help_of, other_value, parsed, refusal, shared
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib import config
from lib.config import flags, plugins, types
from lib.utils.errors import UsageError

TEMPLATE = """data out model reset tb gpus cfg dataset batch_per_gpu shuffle workers arch trainer epochs save_every
    fp16 optimizer lr_start lr_end lr_warmup slurm slurm_ngpus slurm_nnodes slurm_nodelist slurm_partition
    slurm_timeout"""
RELAXED = settings(deadline=None, derandomize=True)


def test_every_flag_of_the_source_template_exists():
    assert set(TEMPLATE.split()) <= set(vars(parsed("")))
    args = parsed("")
    assert (args.dataset, args.arch, args.trainer, args.optimizer) == ("digits", "convnet", "trainer", "adamw")
    assert args.model == "digits_convnet" and args.out == "out" and args.data == "data"
    assert parsed("-arch mlp -dataset fake").model == "fake_mlp"
    if "slurm" in shared():
        assert vars(parsed("-slurm_nodelist GPU17,GPU18"))["slurm_nodelist"] == "GPU17,GPU18"


@pytest.mark.parametrize("name", ALONE)
def test_a_flag_can_be_written_in_four_forms(name):
    value = other_value(shared()[name])
    forms = ([f"-{name}", value], [f"--{name}", value], [f"-{name}={value}"], [f"--{name}={value}"])
    first, *others = [vars(parsed(command)) for command in forms]
    assert all(first == other for other in others)
    assert first[name] != shared()[name].default
    assert str(first[name]).lower() in (value, f"['{value}']", "true", "false", f"{value}.0", "1e-05")


@pytest.mark.parametrize("name", [name for name in ALONE if shared()[name].type is types.yes_no])
def test_a_yes_no_flag_may_stand_alone_or_have_a_value(name):
    values = dict.fromkeys("yes True on 1".split(), True) | dict.fromkeys("no FALSE off 0".split(), False)
    for text, value in values.items():
        assert vars(parsed(f"-{name} {text}"))[name] is value is vars(parsed(f"-{name}={text}"))[name]
    assert vars(parsed(f"-{name}"))[name] is True is vars(parsed(f"-{name} -seed 3"))[name]
    assert f"-{name}: 'maybe' is neither yes nor no" in refusal(f"-{name} maybe")
    assert f"-{name}: '-1' is neither" in refusal(f"-{name} -1")


def test_the_last_value_of_a_flag_counts():
    assert parsed("-epochs 3 --epochs=4 -arch resnet -arch mlp").epochs == 4
    assert "resnet_depth" not in parsed("-arch resnet -arch mlp")
    assert parsed("-allow_change epochs --allow_change=seed").allow_change == ["epochs", "seed"]


@pytest.mark.parametrize("number", ["-1e-3", "-5", "-.5", "-0.5E+0"])
def test_a_negative_number_is_read_as_a_value_and_not_as_a_flag(number):
    for form in (["-lr_end", number], ["-lr_end=" + number], ["--lr_end", number]):
        assert config.parse_args(form).lr_end == float(number)


@pytest.mark.parametrize("number", ["-1e-3", "-5", "-.5", "-1_0", "-inf", "-nan", "-1e400"])
def test_a_negative_number_that_is_out_of_range_is_refused_as_other_values_are(number):
    for form in (["-momentum", number], [f"--momentum={number}"]):
        assert refusal(form) == f"argument -momentum: {number!r} is not a number from 0 to below 1"
    assert f"-epochs: {number!r} is not a whole number of at least 1" in refusal(["-epochs", number])


@pytest.mark.parametrize("arch", plugins.names("arch"))
def test_abbreviated_flags_are_refused_and_the_full_flag_is_suggested(arch):
    """All flags for the default arch, only its own flags for any other; of each a third of its beginnings."""
    known = {f"-{action}" for action in vars(parsed(f"-arch {arch}"))} | {"-h", "-help"}
    flags = sorted(known if arch == parsed("").arch else known - {f"-{name}" for name in shared()})
    for place, flag in enumerate(flags):
        for end in range(2 + place % 3, len(flag), 3):
            start = flag[:end]
            if start in known:
                continue
            command = ([start], [f"-{start}"], [start, "3"], [f"{start}=3"])[end % 4]
            message = refusal(["-arch", arch, *command])
            assert message.startswith(f"unknown flag {command[0].partition('=')[0]} (do you mean")
            assert flag in re.search(r"do you mean (.*)\?\)", message)[1].split()


@RELAXED
@given(flag=st.sampled_from(ALONE), at=st.integers(0, 20), letter=st.sampled_from("abcxyz_-"))
def test_a_misspelt_flag_is_refused_and_the_closest_is_suggested(flag, at, letter):
    at %= len(flag)
    wrong = f"-{flag[:at]}{letter}{flag[at + 1 :]}".rstrip("-")
    if wrong.lstrip("-") not in {*shared(), "h", "help", ""}:
        message = refusal([wrong, "3"])
        assert message.startswith(f"unknown flag {wrong}")
        others = any(other.startswith(wrong[1:]) for other in shared())  # it is the beginning of another flag
        assert len(flag) < 5 or at == 0 or others or f"-{flag}" in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-lr_strat 3", "unknown flag -lr_strat (do you mean -lr_start or "),
        ("-batch-size 3", "unknown flag -batch-size (do you mean -batch_size or"),
        ("---epochs 3", "unknown flag ---epochs"),
        ("--", "unknown flag --"),
        ("-", "unknown flag -"),
        ("epochs 3", "unrecognized arguments: epochs 3"),
        ("-epochs 3 4", "unrecognized arguments: 4"),
        ("-model a -1", "unrecognized arguments: -1"),
        ("-epochs", "argument -epochs: expected one argument"),
        ("-epochs -reset", "argument -epochs: expected one argument"),
        ("-best=", "argument -best: '' is not a metric like accuracy"),
        ("-best rec:low", "argument -best: 'rec:low' is not a metric like accuracy, rec:min or f1:max"),
        ("-best :min", "argument -best: ':min' is not a metric"),
        ("-lr_schedule x", "argument -lr_schedule: invalid choice: 'x' (choose from"),
        ("-arch convmet", "-arch 'convmet': no such file in lib/arch; there are "),
    ],
)
def test_an_error_names_the_flag_the_value_and_what_would_be_right(command, message):
    assert refusal(command).startswith(message)


@RELAXED
@given(
    st.lists(
        st.text(min_size=1, max_size=12) | st.sampled_from(["-epochs", "-cfg", "-reset", "--x=1", "-1"]), max_size=4
    )
)
@example(["-h=3"])
@example(["-cfg", "a\0b"])
@example(["-cfg="])
@example(["-arch", "-arch"])
@example(["-epochs", "9" * 5000])
def test_no_command_line_ends_in_a_traceback(command):
    try:
        assert isinstance(parsed(command), config.Args)
    except UsageError as error:
        assert str(error)
    except SystemExit as end:
        assert end.code == 0 and {"-h", "-help", "--h", "--help"} & set(command)


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("-fp16 -bf16", "-fp16 and -bf16 exclude each other: give one of them"),
        ("-gpus 0 -cpu 2", "-gpus and -cpu exclude each other: give one of them"),
        ("-batch_size 8 -batch_per_gpu 8", "give one of them"),
        ("-batch_size=8 --batch_per_gpu=8", "give one of them"),
        ("-steps 9 -eval_every 2", "-eval_every 2 with -steps: say 2steps or 2epochs"),
        ("-lr_start 1e-3 -lr_end 1e-2", "-lr_end 0.01 is above -lr_start 0.001"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(command, right):
    assert right in refusal(command)


def test_batch_per_gpu_is_accepted_with_any_default_of_batch_size():
    args = parsed("-dataset digits -batch_per_gpu 5 -micro_batch 5")
    assert args.batch_per_gpu == 5 and args.micro_batch == 5
    assert parsed("-fp16 -bf16=no").fp16 and parsed("-batch_size 12 -micro_batch 4").micro_batch == 4


def test_help_shows_groups_flags_defaults_and_units_in_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    out = help_of("-h", capsys)
    lines = {line.split()[0].rstrip(","): line for line in out.splitlines() if line.startswith("  -")}
    assert {f"-{name}" for name in shared()} <= set(lines)
    for group in ("run", "machine", "data", "training", "optimization", "saving and stopping"):
        assert f"\n{group}:\n" in out
    args = parsed("")
    for name in "epochs lr_start batch_size weight_decay optimizer save_every out clip_grad seed".split():
        at = out.index(f"\n  -{name} ")
        assert f"({getattr(args, name)})" in out[at : at + 240].replace("\n", " "), f"-{name} without its default"
    assert "(True)" not in out, "defaults are written yes or no"
    assert max(map(len, out.splitlines())) <= 72
    for action in shared().values():
        assert action.help


def test_help_has_common_search_terms_and_the_most_needed_groups_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken
    out = help_of("-h", capsys)
    for text in ("accumulation", "checkpointing", "mixed precision", "early stopping", "EMA", "warm-up", "clip"):
        assert text in out, text
    groups = ["run", "data", "training", "optimization", "saving and stopping", "machine"]
    groups += ["slurm"] if "slurm" in shared() else []
    places = [out.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)


def test_help_shows_the_flags_of_the_chosen_plugins_only(capsys, tmp_path):
    out = help_of("-h", capsys)
    assert "-convnet_width" in out and "\narch convnet:\n" in out and "-resnet_depth" not in out
    file = cfg_file(tmp_path, "arch: resnet")
    for command in ("-h -arch resnet", "-arch=resnet --help", "-help --arch resnet", f"-cfg {file} --h"):
        out = help_of(command, capsys)
        assert "\narch resnet:\n" in out and "-resnet_depth" in out and "(18)" in out and "-convnet_width" not in out
    out = help_of("-h -dataset fake -fake_samples 3", capsys)
    assert "\ndataset fake:\n" in out and "-fake_samples" in out
    assert "no such file" in refusal("-h -arch nope")


def test_args_are_read_only_and_can_be_pickled_and_copied():
    args = parsed("-epochs 3")
    with pytest.raises(AttributeError, match=r"args is read-only: args\.lr_start cannot be set to 3"):
        args.lr_start = 3
    with pytest.raises(AttributeError, match="read-only"):
        args.brand_new = 3
    with pytest.raises(AttributeError):
        setattr(args, "epochs", 4)  # noqa: B010
    for copied in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert copied == args and type(copied) is config.Args and copied.epochs == 3
        with pytest.raises(AttributeError):
            copied.epochs = 4
    assert parsed("-epochs 3") == args != parsed("-epochs 4")


def test_every_flag_has_one_name_and_says_which_values_it_takes():
    for name, action in shared().items():
        assert action.option_strings == [f"-{name}"] and action.dest == name
        assert action.metavar or action.choices or action.type is types.yes_no
    plain = argparse.ArgumentParser(add_help=False)
    flags.add_shared(plain)
    assert {action.dest for action in plain._actions if action.help != argparse.SUPPRESS} == {*shared(), "h"}
