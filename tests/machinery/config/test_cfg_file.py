"""The -cfg file: its syntax, the flags that override it, and config.yaml, which every run writes."""

import contextlib

import pytest
import yaml
from command_line import cfg_file, other_value, parsed, plugin_file, read_back, refusal, saved_args, shared
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lib import config
from lib.config import flags, types
from lib.utils.errors import UsageError

NOT_DRAWN = "cfg gpus steps bf16 micro_batch lr_end batch_per_gpu trainer ngrok mirror weights".split()
ODD_TEXT = st.text(st.sampled_from("epochs: \n-[]{}&*!|>'\"#%@,?0\t\r"), max_size=60)
UNCHECKED = [HealthCheck.function_scoped_fixture]
RELAXED = settings(deadline=None, derandomize=True, max_examples=50, suppress_health_check=UNCHECKED)


def test_the_command_line_overrides_the_file_the_plugin_and_the_shared_default_in_this_order(tmp_path):
    epochs = {action.dest: action.default for action in config.new_parser()._actions}["epochs"]
    assert parsed("-dataset fake -arch mlp").epochs == epochs != parsed("").epochs == 30
    file = cfg_file(tmp_path, "epochs: 4\nlr_start: 0.5\n")
    assert parsed(["-cfg", file]).epochs == 4
    assert parsed(["-cfg", file, "-epochs", "5"]).epochs == 5 == parsed(["-epochs", "5", "-cfg", file]).epochs
    assert parsed(["-cfg", file, "--epochs=5"]).lr_start == 0.5
    assert parsed(["-cfg", file, "-seed", "3"]).cfg == file
    (tmp_path / "outcome.json").touch()
    moved = ["-cfg", cfg_file(tmp_path, "epochs: 4\n", "config.yaml")]
    assert f"-out {tmp_path.parent} -model {tmp_path.name} continues it" in refusal(moved)
    assert parsed([*moved, "-model", "again"]).epochs == parsed(["-cfg", file]).epochs == 4
    cfg_file(tmp_path, f"epochs: 5\nout: {tmp_path.parent}\nmodel: {tmp_path.name}\n", "config.yaml")
    assert parsed(moved).epochs == 5, "where it is"


def test_defaults_of_a_plugin_are_checked_and_the_values_of_a_file_replace_a_list(tmp_path, monkeypatch):
    text = "def add_args(parser): parser.{}\nget_model = print\n"
    plugin_file(monkeypatch, tmp_path, "arch", "odd", text.format("set_defaults(epochs=0)"))
    assert "argument -epochs: '0' is not a whole number of at least 1" in refusal("-arch odd")
    more = "add_argument('-x', action='append', default=['a']), parser.add_argument('-y', type=chr, default=5)"
    plugin_file(monkeypatch, tmp_path, "arch", "more", text.replace("{}", more))
    assert parsed("-arch more").x == ["a"] and parsed("-arch more").y == 5
    assert parsed(["-cfg", cfg_file(tmp_path, "arch: more\nx: [b, c]\n")]).x == ["b", "c"]


def test_flags_of_a_replaced_plugin_are_refused_and_what_another_dataset_set_is_dropped(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(parsed("-arch resnet -resnet_depth 34 -epochs 7"), {}))
    args = parsed(["-cfg", str(file), "-arch", "resnet"])
    assert (args.arch, args.dataset, args.epochs, args.image_size) == ("resnet", "digits", 7, 8)
    assert refusal(["-cfg", str(file), "-arch", "mlp"]).startswith(f"{file}: unknown flag -resnet_depth")
    args = parsed(["-cfg", str(file), "-dataset", "fake", "-channels", "1"])
    assert (args.dataset, args.arch, args.resnet_depth, args.epochs) == ("fake", "resnet", 34, 7)
    assert (args.channels, args.image_size) == (1, 224), "the data sets the size, the command line the channels"
    args = parsed(["-cfg", cfg_file(tmp_path, "num_classes: 4\n"), "-dataset", "fake"])
    assert args.num_classes == 4, "the file names no other dataset"
    written = cfg_file(tmp_path, "dataset: digits\nimage_size: 64\n")
    assert parsed(["-cfg", written, "-dataset", "fake"]).image_size == 64, "it is of no run"
    assert "-cfg is there twice" in refusal(["-cfg", written, f"--cfg={file}"])
    assert "unknown flag -mlp_width" in refusal(["-cfg", cfg_file(tmp_path, "arch: resnet\nmlp_width: 3\n")])


def test_numbers_booleans_and_lists_of_a_file_are_read_as_written(tmp_path):
    def read(text, *flags):
        return parsed(["-cfg", cfg_file(tmp_path, text), *flags])

    args = read("lr_start: 3e-4\nlr_end: 1e-9\nshuffle: false\nreset: true\nmodel: 007\nseed: 010\n")
    assert (args.lr_start, args.lr_end, args.shuffle, args.reset) == (3e-4, 1e-9, False, True)
    assert args.model == "007" and args.seed == 10
    assert read("allow_change: [epochs, seed]\n", "-allow_change", "loss").allow_change == ["epochs", "seed", "loss"]
    assert read("allow_change:\n- epochs\n- seed").allow_change == ["epochs", "seed"]
    assert read("allow_change: []\nabout: {git: abc, x: [1, 2]}\n").allow_change == []
    assert read("class_weights: [1, 2.5]\n").class_weights == "1,2.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr_strat: 3", "unknown flag -lr_strat (do you mean -lr_start"),
        ("batch-size: 3", "batch-size: write a flag with underscores (not cfg)"),
        ("cfg: other.yaml", "cfg: write a flag with underscores (not cfg)"),
        ("[1, 2]: 3", "cannot be read"),
        ("epochs: 0", "-epochs: '0' is not a whole number of at least 1"),
        ("arch: nope", "-arch 'nope': no such file in lib/arch; there are convnet"),
        ("epochs: [3, 4]", "-epochs: '3,4' is not a whole number"),
        ("epochs: {a: 3}", "epochs: write a flag with underscores (not cfg), and one value or a list"),
        ("epochs:", "-epochs: '' is not a whole number"),
        ('out: "a\\0b"', "-out: 'a\\x00b' is not a line of text in UTF-8"),
        ("", "empty"),
        ("epochs: 1\nseed: 2\nepochs: 3", "epochs is there 2 times"),
        ("- epochs: 3", "no mapping"),
        (b"\xff\xfe\x00e", "cannot be read"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_a_wrong_file_is_refused_with_the_reason(text, message, tmp_path):
    assert message in refusal(["-cfg", cfg_file(tmp_path, text)])


@RELAXED
@given(st.binary(max_size=60) | ODD_TEXT.map(str.encode))
@example(b"? [a]\n: b")
@example(b"'epochs': 3")
def test_no_file_ends_in_a_traceback(tmp_path, content):
    with contextlib.suppress(UsageError):
        parsed(["-cfg", cfg_file(tmp_path, content)])


@RELAXED
@given(st.data())
def test_config_yaml_repeats_any_command_line(tmp_path, data):
    line = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=30)
    text = line | st.sampled_from(["null", "~", "yes", "1e3", "- a", "a: b", "'", '"', "#x", " x ", "!t", "*a", "%"])
    numbers = {"X": st.floats(1e-300, 1, exclude_max=True, allow_subnormal=False).map(repr)}
    numbers["N"] = st.integers(1, 10**18 - 1).map(str)
    drawn = {name: action for name, action in shared().items() if name not in NOT_DRAWN}
    strategies = {name: numbers.get(one.metavar, st.just(other_value(one))) for name, one in drawn.items()}
    strategies |= {name: text for name, one in drawn.items() if one.type is types.text}
    chosen = data.draw(st.fixed_dictionaries({}, optional=strategies))
    flags_of_all = ["-parallel=fsdp", "-deterministic=no", "-lr_end=0"]
    args = parsed([*flags_of_all, *(f"-{name}={value}" for name, value in chosen.items())])
    assert read_back(args, tmp_path) == saved_args(args)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert not flags.rules().forgotten & set(saved) and list(saved)[-1] == "about"
    settled = read_back(args, tmp_path, batch_size=96, micro_batch=48)
    assert settled == {**saved_args(args), "batch_size": 96, "micro_batch": 48}


@pytest.mark.parametrize("flag", ["out", "data", "cache_dir", "slurm_dir", "resume", "weights"])
def test_home_and_variables_in_paths_are_replaced(tmp_path, monkeypatch, flag):
    """A shell does so only for a word that begins with ~, and not in a file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SOME", "thing")
    for word, wanted in (("~/a", f"{tmp_path}/a"), ("$HOME/a b", f"{tmp_path}/a b"), ("x/${SOME}", "x/thing")):
        path = cfg_file(tmp_path, f"{flag}: {word}\n")
        for command in ([f"-{flag}={word}"], [f"-{flag}", word], ["-cfg", path], ["-cfg=~/run.yaml"]):
            assert getattr(parsed(command), flag) == wanted
    unknown_in = {"$NOWHERE/a": "$NOWHERE", "a/${NOWHERE}": "${NOWHERE}", "~nobody_here/a": "~nobody_here"}
    for word, unknown in unknown_in.items():
        for command in ([f"-{flag}={word}"], ["-cfg", cfg_file(tmp_path, f"{flag}: {word}\n")]):
            assert f"{unknown} is no variable and no home here" in refusal(command)
    assert "$NOWHERE is no variable" in refusal(["-cfg=$NOWHERE/run.yaml"])
