"""The logger of a run and the one that does nothing: a wrong name is an error on every rank alike."""

import inspect

from lib.utils.monitoring.logger import Logger, NoLogger


def methods(kind):
    return {name: inspect.signature(each) for name, each in vars(kind).items() if not name.startswith("_")}


def test_what_does_nothing_has_the_methods_of_the_real_one():
    assert methods(NoLogger) == methods(Logger) != {}
