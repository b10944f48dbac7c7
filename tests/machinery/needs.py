"""Marks for tests that need a program or a package which a machine may lack."""

import importlib.util
import os

import pytest


def require(missing: str) -> pytest.MarkDecorator:
    """Skip tests and say what would enable them. On CI nothing may be missing: the tests fail instead."""
    return pytest.mark.skipif(bool(missing) and not os.environ.get("CI"), reason=missing)


def require_package(name: str, group: str) -> pytest.MarkDecorator:
    """Skip tests if an optional package of this group of pyproject.toml is missing. On CI they fail instead."""
    installed = importlib.util.find_spec(name) is not None
    return require("" if installed else f"needs uv pip install -r pyproject.toml --group {group}")
