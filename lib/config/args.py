"""What was asked: the shared flags, the plugins' own, the -cfg file. The only place that makes `args`."""

import argparse
import importlib
import logging
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import yaml

from lib.config import cfg_file, flags, types
from lib.config.parser import NEGATIVE, Help, Parser, Switch
from lib.utils.errors import UsageError, close, no_exit

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
BUILDERS = {"dataset": "get_dataset", "arch": "get_model", "trainer": "Trainer"}  # in the order they are loaded
DICTATED = ("num_classes", "channels", "image_size")  # by the data
ONE_OF = (("batch_size", "batch_per_gpu"), ("gpus", "cpu"))  # two ways to say it: the command line's wins
TITLE = "Trains a model. A flag may also be written --x v or -x=v; none may be shortened."


class Args(argparse.Namespace):
    """What was asked, by flag name. Read-only: what is derived from it lives elsewhere."""

    def __setattr__(self, name, value):
        raise AttributeError(f"args is read-only: args.{name} cannot be set to {value!r} after parse_args")

    def __delattr__(self, name):
        raise AttributeError(f"args is read-only: args.{name} cannot be deleted")

    @property
    def flag_rules(self) -> flags.Rules:
        """Which flags may change in a run, and which may differ between its machines: for modules that
        do not know of the flags."""
        return flags.rules()


def parse_args(argv: list[str] | None = None) -> Args:
    """All flags of this command line; those of -cfg FILE stand in front of it, so the command line wins.

    Raises UsageError naming the flag, the value and what would be right. `-h` prints the help and exits.
    """
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = new_parser()
    cfg = value_of(argv, "cfg")
    entries = cfg_file.read(cfg) if cfg is not None else {}
    modules = {kind: load_plugin(parser, kind, argv, entries, cfg) for kind in BUILDERS}
    for kind in BUILDERS:
        entries = without_replaced(entries, kind, modules[kind], cfg)

    words = [parser.exact(word) for word in argv]
    given = {word.partition("=")[0][1:] for word in words if word.startswith("-")}
    rivals = {mine: other for pair in ONE_OF for mine, other in (pair, pair[::-1])}
    entries = {key: values for key, values in entries.items() if rivals.get(key) not in given}
    words = parser.words_of(entries, cfg), words
    for module in modules.values():
        if hasattr(module, "describe"):
            parser.set_known(module.describe(_parse(parser, *words, cfg)), module)
    args = _parse(parser, *words, cfg)
    check(args, given | set(entries), modules)
    return args


def new_parser() -> Parser:
    """The parser of the shared flags. In a plugin's flags type=bool reads yes and no, store_true takes them too, and
    numbers are plain ones."""
    parser = Parser(
        prog="train.py",
        usage="%(prog)s [-flag value ...]",
        description=TITLE,
        add_help=False,
        formatter_class=Help,
        allow_abbrev=False,
    )
    for kind, read in ((bool, types.yes_no), (int, types.integer), (float, types.number)):
        parser.register("type", kind, read)
    parser.register("action", "store_true", Switch)
    parser._negative_number_matcher = NEGATIVE
    flags.add_shared(parser)
    return parser


def load_plugin(parser, kind: str, argv: list[str], entries: dict, cfg: str | None):
    """The module lib/KIND/NAME.py that was asked for, or is the default; its own flags join the parser in a group."""
    name, source = value_of(argv, kind), ""
    if name is None and kind in entries:
        name, source = ",".join(entries[kind]), f"{cfg}: "
    name = name or parser.get_default(kind)
    there = plugins(kind)
    if name not in there:
        names = f"there are {', '.join(there)}{close(name, there)}"
        raise UsageError(f"{source}-{kind} {name!r}: no such file in lib/{kind}; {names}")
    file = f"lib/{kind}/{name}.py"
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


def without_replaced(entries: dict, kind: str, module, cfg: str) -> dict:
    """The entries of a -cfg file without those of a plugin that the command line replaced: its own flags, and what a
    data set dictates. What is left out is told."""
    name = module.__name__.rpartition(".")[2]
    old = ",".join(entries.get(kind, [name]))
    if name == old or old not in plugins(kind):
        return entries
    before, parser = {action.dest for action in new_parser()._actions}, new_parser()
    load_plugin(parser, kind, [f"-{kind}", old], {}, cfg)
    own = {action.dest for action in parser._actions} - before
    odd = sorted({*entries} & (own | {*DICTATED} if kind == "dataset" else own))
    if odd:
        log.warning("%s: -%s is %s and not %s: left out %s", cfg, kind, name, old, ", ".join(odd))
    return {key: values for key, values in entries.items() if key not in odd}


def plugins(kind: str) -> list[str]:
    """The names of all plugins of a kind: the files in lib/KIND."""
    return sorted(file.stem for file in (ROOT / "lib" / kind).glob("*.py") if not file.stem.startswith("_"))


def to_yaml(args: Args, about: dict, **settled) -> str:
    """The flags as a -cfg file that repeats the run: `settled` numbers in their place, `about`, for people, at the
    end."""
    asked = {**vars(args), **settled}
    kept = {
        name: _plain(value)
        for name, value in asked.items()
        if name not in args.flag_rules.forgotten and value is not None
    }
    return yaml.safe_dump({**kept, "about": about}, sort_keys=False, width=118)


def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def check(args: Args, given: set[str], modules: dict):
    """Raises UsageError for flags that are right alone and wrong together."""
    for kind, module in modules.items():
        if module.__name__.rpartition(".")[2] != getattr(args, kind):
            raise UsageError(
                f"-{kind} {getattr(args, kind)} is a default that a plugin set too late: name it yourself"
            )
    if {"batch_size", "batch_per_gpu"} <= given:
        raise UsageError("-batch_size is the global batch and -batch_per_gpu its share: give one of them")
    if args.fp16 and args.bf16:
        raise UsageError("-fp16 and -bf16 exclude each other: give one of them")
    if args.gpus and args.cpu:
        raise UsageError(f"-gpus {args.gpus} and -cpu {args.cpu} exclude each other: give one of them")
    if args.parallel != "fsdp" and (args.offload or args.fsdp_replicas > 1):
        flag = "-offload" if args.offload else f"-fsdp_replicas {args.fsdp_replicas}"
        raise UsageError(f"{flag} is for sharded models: add -parallel fsdp")
    if args.offload and args.fp16:
        raise UsageError("-offload and -fp16 exclude each other, as torch's gradient scaler does not wait for copies "
                         "to the CPU: take -bf16")  # fmt: skip
    if args.compile:
        check_compiler()
    check_nodes(args)
    if args.micro_batch and not args.batch_per_gpu and args.batch_size % args.micro_batch:
        near = max(args.micro_batch, args.batch_size - args.batch_size % args.micro_batch)
        fits = math.gcd(args.batch_size, args.micro_batch)
        raise UsageError(f"-batch_size {args.batch_size} cannot be cut into micro-batches of -micro_batch "
                         f"{args.micro_batch}: try -batch_size {near} or -micro_batch {fits}")  # fmt: skip
    if args.lr_end > args.lr_start:
        raise UsageError(f"-lr_end {args.lr_end} is above -lr_start {args.lr_start}: the learning rate falls")


def check_compiler():
    """Raises UsageError where torch.compile would end in pages of a compiler's words."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UsageError("-compile needs a C++ compiler, and there is no c++, g++ or clang++ here: install one")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise UsageError(f"-compile needs Python's header files, and there is no {header}: install python3-dev (or "
                         f"python3-devel)")  # fmt: skip


def check_nodes(args: Args):
    """Raises UsageError for flags of several machines that do not make a run."""
    named = {name: getattr(args, name) for name in ("node_rank", "master_addr")}
    missing = [name for name, value in named.items() if value is None]
    if args.nnodes == 1 and len(missing) < 2:
        raise UsageError("-node_rank and -master_addr without -nnodes: say how many machines take part")
    if args.nnodes > 1 and missing:
        raise UsageError(f"-nnodes {args.nnodes} needs -{missing[0]}: -node_rank counts from 0, and "
                         "-master_addr is where the others reach the machine with -node_rank 0")  # fmt: skip
    if args.nnodes > 1 and args.node_rank >= args.nnodes:
        raise UsageError(
            f"-node_rank {args.node_rank} of -nnodes {args.nnodes}: they count from 0 to {args.nnodes - 1}"
        )
    if args.nnodes > 1 and (args.slurm or args.slurm_dry):
        raise UsageError(f"-nnodes {args.nnodes} with -slurm: there it is -slurm_nnodes")


def value_of(words: list[str], flag: str) -> str | None:
    """The last value these raw words give a flag, before the parser that knows all flags is there."""
    found = None
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in (f"-{flag}", f"--{flag}"):
            found = value if equals else next(iter(words[i + 1 :]), None)
    return found


def early(argv: list[str] | None) -> tuple[str | None, bool]:
    """-cache_dir and -debug_dist, as far as they can be told before torch is imported, which reads them just then."""
    words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    cfg = value_of(words, "cfg")
    entries = cfg_file.read(cfg) if cfg is not None else {}
    given = {word.partition("=")[0].lstrip("-") for word in words if word.startswith("-")}
    asked = {name: [value_of(words, name) or ""] for name in given}
    both = {**entries, **asked}
    debug = (both.get("debug_dist") or ["no"])[-1].lower() not in ("no", "false", "0")
    return (both.get("cache_dir") or [None])[-1], debug


def _parse(parser, from_file, words, cfg):
    for word in from_file + words:
        flag, _, value = word.partition("=")
        if flag.startswith("-") and value == "--":  # argparse of Python 3.10 to 3.12 takes "--" for the flags' end
            raise UsageError(f"argument {flag}: '--' is no value")
    try:
        asked, rest = parser.parse_known_args(from_file + words)
    except UsageError as error:
        raise UsageError(f"{_source(parser, from_file, cfg, error)}{error}") from None
    if rest:
        known = parser._option_string_actions
        raise UsageError(f"{rest[0]!r} belongs to no flag{close(f'-{rest[0]}', known)}")
    asked = vars(asked)
    asked["model"] = asked["model"] or f"{asked['dataset']}_{asked['arch']}{'_overfit' if asked['overfit'] else ''}"
    args = Args()
    vars(args).update(asked)
    return args


def _source(parser, from_file, cfg, error):
    try:
        parser.parse_known_args(from_file)
    except UsageError as own:
        return f"{cfg}: " if from_file and str(own) == str(error) else ""
    return ""
