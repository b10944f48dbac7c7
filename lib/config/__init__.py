"""The command line and -cfg files.

A new shared flag goes into flags.py; a flag of a model, dataset or trainer goes into its own file, by
add_args(parser). Then `python scripts/flags_page.py` writes docs/flags.md and the stub.
"""

from lib.config.args import new_parser, parse_args, to_yaml
from lib.config.namespace import Args
from lib.config.plugins import BUILDERS, ROOT

__all__ = ["BUILDERS", "ROOT", "Args", "new_parser", "parse_args", "to_yaml"]
