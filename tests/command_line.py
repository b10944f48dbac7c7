"""Command lines, -cfg files and plugin files for tests."""

import argparse
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import train
from lib import config
from lib.config import flags, plugins, types
from lib.utils.errors import UsageError

OTHERS = {"loss": "mse", "optimizer": "sgd", "gpus": "0,1", "class_weights": "1,2", "mirror": "file:///mnt"}
OTHERS |= {"dataset": "fake", "arch": "mlp", "trainer": "ema", "micro_batch": "16", "lr_end": "1e-5"}


def parsed(command) -> config.Args:
    """Parse a command line, given as text or as a list."""
    return config.parse_args(command.split() if isinstance(command, str) else command)


def refusal(command) -> str:
    """The error message of a command line; it must be one line."""
    return usage_error(parsed, command)


def usage_error(function, *args) -> str:
    """The error message with which a function refuses its arguments; it must be one line."""
    with pytest.raises(UsageError, match=r"\A.*\Z") as caught:
        function(*args)
    return str(caught.value)


def error_of(command, out: Path, capsys) -> str:
    """The one-line error of train.py for this command line: exit code 2, no other output, nothing written."""
    command, before = command.split() if isinstance(command, str) else list(command), tree(out)
    capsys.readouterr()  # drop earlier output
    code = train.main(command if "-out" in command else [*command, "-out", str(out)])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert not captured.out and captured.err.startswith("train.py: ") and captured.err.endswith("\n")
    assert len(captured.err.splitlines()) == 1
    assert tree(out) == before, "something was written"
    return captured.err.removeprefix("train.py: ").removesuffix("\n")


def tree(folder: Path) -> dict:
    """All files and folders below a folder: the path and, of files, the content (but not of .lock)."""
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() and path.name != ".lock" else None for path in paths}


def help_of(command, capsys) -> str:
    """The output of a command line with -h."""
    with pytest.raises(SystemExit) as end:
        parsed(command)
    printed = capsys.readouterr()
    assert end.value.code == 0 and not printed.err
    return printed.out


def shared() -> dict:
    """The flags that every run has, by name; without those of parts that a project left out."""
    actions = [action for action in config.new_parser()._actions if action.dest not in ("h", "list")]
    return {action.dest: action for action in actions if action.help != argparse.SUPPRESS}


def other_value(action) -> str:
    """A value of the flag other than its default."""
    if action.type is types.yes_no:
        return "no" if action.default else "yes"
    for text in filter(None, [OTHERS.get(action.dest), *(action.choices or ()), "7", "0.5", "some"]):
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if (action.type or str)(text) != action.default:
                return text
    raise LookupError(action.dest)


ALONE = sorted(set(shared()) - {"cfg"})  # flags whose other_value needs no further file


def cfg_file(folder, content, name="run.yaml") -> str:
    """Write a -cfg file and return its path."""
    file = folder / name
    file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content, encoding="utf-8")
    return str(file)


def plugin_file(monkeypatch, folder, kind, name, text):
    """Make lib/KIND/NAME.py with this text for one test, and import it."""
    names, file = plugins.names, folder / f"{kind}_{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"lib.{kind}.{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugins, "names", lambda of: sorted(names(of) + [name] * (of == kind)))


def plugin_folder(monkeypatch, folder, kind, name, text):
    """Make lib/KIND/NAME.py with this text for one test, without importing it."""
    package, names = importlib.import_module(f"lib.{kind}"), plugins.names
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, f"lib.{kind}.{name}", raising=False)
    monkeypatch.setattr(plugins, "names", lambda of: sorted(names(of) + [name] * (of == kind)))


def read_back(args, folder, **settled) -> dict:
    """The args of a run that is started from the config.yaml of these args, without the flags of one start."""
    file = folder / "config.yaml"
    file.write_text(config.to_yaml(args, {"command": "python train.py 'x: y'\n- z", "git": None}, settled))
    again = vars(parsed(["-cfg", str(file)]))
    return {name: value for name, value in again.items() if name not in flags.rules().forgotten}


def saved_args(args) -> dict:
    """The args that config.yaml holds: all but the flags of one start."""
    return {name: value for name, value in vars(args).items() if name not in flags.rules().forgotten}
