"""The class of `args`. Its stub, namespace.pyi, lists the flags for editors; scripts/flags_page.py writes it."""

import argparse

from lib.config import flags


class Args(argparse.Namespace):
    """The values of all flags, by name. Read-only: values that follow from them live elsewhere."""

    def __init__(self, **values):
        vars(self).update(values)

    def __setattr__(self, name: str, value: object):
        raise AttributeError(f"args is read-only: args.{name} cannot be set to {value!r} after parse_args")

    @property
    def flag_rules(self) -> flags.Rules:
        """Return which flags may change in a run, or differ between its machines, for modules below lib.config."""
        return flags.rules()
