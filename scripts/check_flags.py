"""Reads the flags as config.yaml will have them: by it runs are resumed, and their models built again."""

import sys

import yaml

from lib.config import BUILDERS, Args, new_parser, plugins, to_yaml
from lib.utils.errors import UsageError


def check_slurm(args: Args) -> None:
    """Raise UsageError for options of sbatch that the rest of the script would not know; name a short warning."""
    for word in args.slurm_arg:
        if flag := {"signal": "-slurm_signal_s", "cpus-per-task": "-slurm_cpus"}.get(word.partition("=")[0]):
            raise UsageError(f"-slurm_arg {word}: take {flag}")
    if args.slurm_signal_s < args.grace_s:
        both = f"-slurm_signal_s {args.slurm_signal_s} is less than -grace_s {args.grace_s:g}"
        print(f"{both}: at its time limit Slurm may end the run before its state is saved", file=sys.stderr)


def check(args: Args) -> None:
    """Raise UsageError for a flag that config.yaml would give another value, or could not keep."""
    parser = new_parser()
    skipped = {"help", "model", *args.flag_rules.forgotten, *(["epochs"] if args.steps else [])}
    for kind in BUILDERS:
        parser.add_plugin_flags(plugins.load_flags(kind, getattr(args, kind)), kind)
    try:
        kept = yaml.load(to_yaml(args, {}), yaml.BaseLoader)
        if "about" in vars(args):
            raise UsageError("-about is the name of an entry for people, take another")
        kept = {action.dest: kept[action.dest] for action in parser._actions if action.dest in kept}
        kept.pop("model", None)  # by default the plugins' names, of any length
        words = {name: one if isinstance(one, list) else [one] for name, one in kept.items()}
        again = vars(parser.parse_args(parser.to_arguments(words, "config.yaml")))
    except Exception as error:  # noqa: BLE001  # whatever the type of a flag raises
        fault = f"{type(error).__name__}: {error}"
        raise UsageError(f"config.yaml cannot keep a flag, or a default of one: {fault}") from None
    for name in sorted({action.dest for action in parser._actions} - skipped):
        both = vars(args).get(name), again.get(name)  # config.yaml keeps no None, which gives the default back
        before, now = (list(one) if isinstance(one, tuple) else one for one in both)
        if before != now and repr(before) != repr(now):  # NaN is no NaN
            hint = "give it a type whose values read as themselves, as type=int or type=bool, and such a default"
            if before is None:
                hint = "config.yaml keeps no None: make it the default, or let the type give another value"
            raise UsageError(f"-{name} is {before!r:.40}, and {now!r:.40} when config.yaml is read again: {hint}")
