"""The command line: machinery, you need not read it.

    args.py      parse_args: the command line over a -cfg file over the plugins' defaults
    cfg_file.py  reads a -cfg file
    flags.py     every shared flag, marked with what a resume makes of a change
    parser.py    the ArgumentParser
    types.py     argparse types: positive numbers, lists of GPUs, ...

A new shared flag goes into flags.py; a flag of a model, dataset or trainer goes into its own file, by
add_args(parser).
"""

from lib.config.args import BUILDERS, ROOT, Args, early, load_plugin, new_parser, parse_args, plugins, to_yaml

__all__ = [
    "BUILDERS",
    "ROOT",
    "Args",
    "early",
    "load_plugin",
    "new_parser",
    "parse_args",
    "plugins",
    "to_yaml",
]
