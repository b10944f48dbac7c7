"""The command line: machinery, you need not read it.

    args.py          parse_args: the command line over a -cfg file over the plugins' defaults
    flags.py         every shared flag: its help text, its default, and whether a resumed run may change it
    namespace.py     Args, the class of `args`, and its stub for editors
    parser.py        the ArgumentParser, and the layout of -h
    plugins.py       the files in lib/arch, lib/dataset and lib/trainer: found, read for their flags, imported
    types.py         argparse types: positive numbers, names, lists of GPUs

A new shared flag goes into flags.py; a flag of a model, dataset or trainer goes into its own file, by
add_args(parser). Then `python scripts/flags_page.py` writes docs/flags.md and the stub.
"""

from lib.config.args import new_parser, parse_args, to_yaml
from lib.config.namespace import Args
from lib.config.plugins import BUILDERS, ROOT

__all__ = ["BUILDERS", "ROOT", "Args", "new_parser", "parse_args", "to_yaml"]
