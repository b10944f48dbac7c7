"""Makes `args`: the command line over a -cfg file over the defaults of the plugins and the shared flags."""

import argparse
import functools
import math
import sys
from collections import Counter
from pathlib import Path

import yaml

from lib.config import flags, plugins, types
from lib.config.namespace import Args
from lib.config.parser import Help, Parser
from lib.config.plugins import BUILDERS
from lib.utils import files
from lib.utils.errors import UsageError, load_optional, no_exit

DATA_FLAGS = ("num_classes", "channels", "image_size")  # set by a dataset, and not those of an old run with another
EITHER_OR = (("batch_size", "batch_per_gpu"), ("gpus", "cpu"), ("epochs", "steps"), ("resume", "weights"))
TITLE = "Trains a model. A flag may also be written --x v or -x=v; none may be shortened."


def parse_args(argv: list[str] | None = None, describe: bool = True) -> Args:
    """Return the values of all flags. Those of -cfg FILE are read first, so that the command line wins.

    Without `describe` no plugin looks at its data: a run's config.yaml, as -cfg, has all flags. Raises UsageError,
    with the flag, its value and what would be right; SystemExit once -h has printed the help.
    """
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    cfg = last_value("cfg", argv)
    entries = read_cfg(cfg, last_value("dataset", argv)) if cfg else {}
    parser, modules = new_parser(), []
    for kind in BUILDERS:
        name = last_value(kind, argv) or ",".join(entries.get(kind, [])) or parser.get_default(kind)
        modules.append(plugins.load_flags(kind, name))
        parser.add_plugin_flags(modules[-1], f"{kind} {name}")

    command_line = [parser.full_name(word) for word in argv]
    given = {word.partition("=")[0][1:] for word in command_line if word.startswith("-")}
    if sum(word.partition("=")[0] == "-cfg" for word in command_line) > 1:
        raise UsageError("-cfg is there twice: only one file is read")
    replaced = {name for pair in EITHER_OR if given & {*pair} for name in pair}  # by another flag of the command line
    replaced |= {"weights"} if "eval" in given else set()  # -eval then takes the run's own
    entries = {key: values for key, values in entries.items() if key not in replaced}
    words = parser.to_arguments(entries, cfg) + command_line
    for module in modules:
        if describe and hasattr(module, "describe"):  # defaults that follow from a dataset's files
            found = _parse(parser, words)  # which -h ends
            with no_exit():
                parser.set_plugin_defaults(plugins.mixed(module, found.data).describe(found), module)
    named = given | {*entries}
    parser.set_defaults(**{two: None for one, two in EITHER_OR[:3] if {one, two} & named == {one}})  # a plugin's
    args = _parse(parser, words)
    own, file = Path(args.out, args.model, "config.yaml"), Path(args.cfg or "").absolute()
    run, is_run = file.parent, describe and file.name == own.name and (file.parent / "outcome.json").is_file()
    if is_run and not given & {"model", "out", "resume", "weights"} and not (own.exists() and own.samefile(file)):
        hint = f"-out {run.parent} -model {run.name} continues it, -model NEW repeats it"
        raise UsageError(f"-cfg {cfg} is of a moved or copied run: {hint}")
    check_combinations(args, named)
    return args


def check_combinations(args: Args, given: set[str]) -> None:
    """Raise UsageError for flags that are right alone and wrong together. `given`: those of command line and -cfg."""
    for one, other in (*EITHER_OR, ("fp16", "bf16")):
        if (one == "fp16" or {one, other} <= given) and getattr(args, one) and getattr(args, other):
            raise UsageError(f"-{one} and -{other} exclude each other: give one of them")
    for name in ("eval_every", "save_every"):
        if args.steps and (number := getattr(args, name)).isdigit():
            raise UsageError(f"-{name} {number} with -steps: say {number}steps or {number}epochs")
    if args.mirror:
        load_optional("scripts.mirror", "-mirror").check(args.mirror, args.out)
    if args.lr_end > args.lr_start:
        raise UsageError(f"-lr_end {args.lr_end} is above -lr_start {args.lr_start}: the learning rate falls")


def last_value(flag: str, argv: list[str]) -> str:
    """Return the last value that the command line gives a flag, before it is parsed; "" for none."""
    for word, following in reversed([*zip(argv, [*argv[1:], ""])]):
        name, equals, value = word.partition("=")
        if name in (f"-{flag}", f"--{flag}"):
            return value if equals else following
    return ""


def read_cfg(path: str, dataset: str = "") -> dict[str, list[str]]:
    """Return each flag's values in a YAML file, as text; not those of the data of a run with another `dataset`."""
    try:
        text = files.read_bytes(Path(types.path(path)), most=1 << 22, follow=True).decode()
        entries = yaml.load(text, yaml.BaseLoader)
    except (OSError, ValueError, argparse.ArgumentTypeError, yaml.YAMLError) as error:
        raise UsageError(f"-cfg {path!r}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(entries, dict):
        raise UsageError(f"-cfg {path}: {'no mapping' if entries else 'empty'}; it must have lines `flag: value`")
    for name, times in Counter(key.value for key, _ in yaml.compose(text, yaml.BaseLoader).value).items():
        if times > 1:
            raise UsageError(f"-cfg {path}: {name} is there {times} times")
    is_of_run = entries.pop("about", None) is not None  # facts for people
    if is_of_run and dataset and entries.get("dataset") != dataset:
        entries = {name: value for name, value in entries.items() if name not in DATA_FLAGS}
    found = {name: value if isinstance(value, list) else [value] for name, value in entries.items()}
    for name, values in found.items():
        if name == "cfg" or not name.isidentifier() or not all(isinstance(one, str) for one in values):
            raise UsageError(f"-cfg {path}: {name}: write a flag with underscores (not cfg), and one value or a list")
    return found


def new_parser() -> Parser:
    """Return the parser of the shared flags."""
    form = functools.partial(Help, max_help_position=34)
    parser = Parser(prog="train.py", usage="%(prog)s [-flag value ...]", description=TITLE, formatter_class=form)
    flags.add_shared(parser)
    return parser


def to_yaml(args: Args, about: dict, effective: dict | None = None) -> str:
    """Return the flags as a -cfg file that repeats the run, with facts for people (`about`) at its end."""
    values = {**vars(args), **(effective or {})}
    forgotten = args.flag_rules.forgotten | ({"epochs"} if args.steps else set())
    kept = {name: _plain(value) for name, value in values.items() if name not in forgotten and value is not None}
    return yaml.safe_dump({**kept, "about": about}, sort_keys=False, width=118, default_flow_style=None)


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def _parse(parser: Parser, words: list[str]) -> Args:
    found = parser.parse_args(words)
    values = vars(found)
    values["model"] = values["model"] or f"{found.dataset}_{found.arch}{'_overfit' if found.overfit else ''}"
    return Args(**values)
