"""The logger of a run and the one that does nothing: a wrong name is an error on every rank alike."""

import inspect

import pytest

from lib.utils.monitoring.logger import Logger, NoLogger


def methods(kind):
    return {name: inspect.signature(each) for name, each in vars(kind).items() if not name.startswith("_")}


def test_what_does_nothing_has_the_methods_of_the_real_one():
    assert methods(NoLogger) == methods(Logger) != {}


def test_a_rank_without_files_takes_the_same_calls_and_refuses_the_same_names():
    logger = NoLogger()
    assert logger.step() is None is logger.close()
    with pytest.raises(AttributeError, match="log_scalar"):
        logger.log_scalar("mine", 0.5)
    with pytest.raises(TypeError):
        logger.step(1)
