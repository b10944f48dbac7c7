"""Makes `args`: the command line over a -cfg file over the defaults of the plugins and the shared flags."""

import importlib
import logging
import math
import sys
from pathlib import Path

import yaml

from lib.config import combinations, flags, types
from lib.config.namespace import Args
from lib.config.parser import NEGATIVE, Help, Parser, Switch
from lib.utils.errors import UsageError, close, no_exit

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
BUILDERS = {"dataset": "get_dataset", "arch": "get_model", "trainer": "Trainer"}  # in the order they are loaded
DATA_FLAGS = ("num_classes", "channels", "image_size")  # set by a dataset
EITHER_OR = (("batch_size", "batch_per_gpu"), ("gpus", "cpu"))  # one on the command line replaces the other of -cfg
TITLE = "Trains a model. A flag may also be written --x v or -x=v; none may be shortened."


def parse_args(argv: list[str] | None = None, describe: bool = True) -> Args:
    """Return the values of all flags. Those of -cfg FILE are read first, so that the command line wins.

    Without `describe` no plugin looks at its data: a run's config.yaml, as -cfg, has all flags.

    Raises:
        UsageError: names the flag, the value and what would be right.
        SystemExit: after -h has printed the help.
    """
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    cfg = value_of("cfg", argv) or ""
    entries = read_cfg(cfg) if cfg else {}
    parser = new_parser()
    modules = {kind: load_plugin(parser, kind, argv, entries) for kind in BUILDERS}

    command_line = [parser.exact(word) for word in argv]
    given = {word.partition("=")[0][1:] for word in command_line if word.startswith("-")}
    entries = without_replaced(entries, given, modules)
    words = parser.words_of(entries, cfg) + command_line
    for module in modules.values():
        if describe and hasattr(module, "describe"):  # a dataset sets defaults that only its files can tell
            parser.set_known(module.describe(_parse(parser, words)), module)
    args = _parse(parser, words)
    for kind, module in modules.items():
        if _name(module) != getattr(args, kind):
            raise UsageError(
                f"-{kind} {getattr(args, kind)} is a default that a plugin set too late: name it yourself"
            )
    combinations.check(args, given | set(entries))
    return args


def early(argv: list[str] | None) -> tuple[str | None, bool]:
    """Return -cache_dir and -debug_dist before the plugins import torch, which reads them when it is imported."""
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    cfg = value_of("cfg", argv)
    entries = read_cfg(cfg) if cfg else {}
    debug = value_of("debug_dist", argv, entries)
    return value_of("cache_dir", argv, entries), debug is not None and debug.lower() not in ("no", "false", "0")


def value_of(flag: str, argv: list[str], entries: dict[str, list[str]] | None = None) -> str | None:
    """Return the last value that the command line, else the -cfg file, gives a flag; "" for a flag without one."""
    found = ",".join(entries[flag]) if entries and flag in entries else None
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name in (f"-{flag}", f"--{flag}"):
            found = value if equals else following
    return found


def read_cfg(path: str) -> dict[str, list[str]]:
    """Return the values of each flag in a YAML file, as text. Raises UsageError for what is not `flag: value` lines.

    The key `about`, which a run writes for people, is left out.
    """
    try:
        if not Path(path).is_file():  # a pipe could not be read twice
            raise UsageError(f"-cfg {path!r}: cannot be read (it is no regular file)")
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, ValueError) as error:
        raise UsageError(f"-cfg {path!r}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"-cfg {path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"-cfg {path}: {'empty' if root is None else 'no mapping'}; `flag: value` lines are wanted")
    entries = {}
    for key, node in root.value:
        where, name = f"-cfg {path}, line {key.start_mark.line + 1}", key.value
        if name == "about":
            continue
        values = node.value if isinstance(node, yaml.SequenceNode) else [node]
        plain = all(isinstance(scalar, yaml.ScalarNode) for scalar in (key, *values))
        if not plain or not name.isidentifier() or name == "cfg":
            raise UsageError(f"{where}: the name of a flag (not cfg) is wanted, and its value or a list of values")
        if any(scalar.style is None and scalar.value.lower() in ("", "~", "null") for scalar in values):
            raise UsageError(f"{where}: {name!r} has no value: give one, or leave the line out")
        if name in entries:
            raise UsageError(f"{where}: the key {name!r} stands there twice")
        entries[name] = [scalar.value for scalar in values]
    return entries


def new_parser() -> Parser:
    """Return the parser of the shared flags.

    In a plugin's flags, type=bool reads yes and no, and store_true may have yes or no behind it.
    """
    parser = Parser(
        prog="train.py",
        usage="%(prog)s [-flag value ...]",
        description=TITLE,
        add_help=False,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.register("type", bool, types.yes_no)
    parser.register("action", "store_true", Switch)
    parser._negative_number_matcher = NEGATIVE
    flags.add_shared(parser)
    return parser


def load_plugin(parser: Parser, kind: str, argv: list[str], entries: dict[str, list[str]]):
    """Return the module lib/KIND/NAME.py for the chosen or default NAME. Its own flags join the parser in a group."""
    name = value_of(kind, argv, entries) or parser.get_default(kind)
    file, there = f"lib/{kind}/{name}.py", plugins(kind)
    if name not in there:
        choices = f"there are {', '.join(there)}{close(name, there)}"
        raise UsageError(f"-{kind} {name!r}: no such file in lib/{kind}; {choices}")
    try:
        with no_exit():
            module = importlib.import_module(f"lib.{kind}.{name}")
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.lineno else file
        raise UsageError(f"-{kind} {name}: syntax error in {place}: {error.msg}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"-{kind} {name}: {file} needs what is not installed here: {error}") from None
    if not callable(getattr(module, BUILDERS[kind], None)):
        raise UsageError(f"-{kind} {name}: {file} has no {BUILDERS[kind]} that can be called")
    if hasattr(module, "add_args"):
        with no_exit():
            parser.add_own(module, f"{kind} {name}")
    return module


def plugins(kind: str) -> list[str]:
    """Return the names of all plugins of a kind: the files in lib/KIND."""
    return sorted(file.stem for file in (ROOT / "lib" / kind).glob("*.py") if not file.stem.startswith("_"))


def without_replaced(entries: dict[str, list[str]], given: set[str], modules: dict) -> dict[str, list[str]]:
    """Return the entries of a -cfg file that the command line leaves in force.

    A flag loses its entry if the command line has the other one of a pair. If it names another plugin, the old one's
    flags are left out, which begin with its name, and what a dataset sets.
    """
    replaced = {mine for pair in EITHER_OR for mine, other in (pair, pair[::-1]) if other in given}
    for kind, module in modules.items():
        old, new = ",".join(entries.get(kind, [])), _name(module)
        if old and old != new:
            own = {key for key in entries if key.startswith(f"{old}_") or (kind == "dataset" and key in DATA_FLAGS)}
            log.warning("-%s is %s and not %s as in the -cfg file: left out %s", kind, new, old, sorted(own))
            replaced |= own
    return {key: values for key, values in entries.items() if key not in replaced}


def to_yaml(args: Args, about: dict, **settled) -> str:
    """Return the flags as a -cfg file that repeats the run.

    Args:
        args: the flags of this start.
        about: facts for people, at the end of the file.
        **settled: values that replace those of args.
    """
    values = {**vars(args), **settled}
    forgotten = args.flag_rules.forgotten
    kept = {name: _plain(value) for name, value in values.items() if name not in forgotten and value is not None}
    return yaml.safe_dump({**kept, "about": about}, sort_keys=False, width=118, default_flow_style=None)


def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def _name(module) -> str:
    return module.__name__.rpartition(".")[2]


def _parse(parser: Parser, words: list[str]) -> Args:
    found, rest = parser.parse_known_args(words)
    if rest:
        raise UsageError(f"{rest[0]!r} belongs to no flag{close(f'-{rest[0]}', parser._option_string_actions)}")
    values = vars(found)
    values["model"] = values["model"] or f"{found.dataset}_{found.arch}{'_overfit' if found.overfit else ''}"
    return Args(**values)
