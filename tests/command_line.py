"""Command lines, -cfg files and plugin files for tests."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import train
from lib import config
from lib.config import flags, plugins, types
from lib.utils.errors import UsageError

OTHERS = {
    "loss": "mse",
    "optimizer": "sgd",
    "lr_schedule": "linear",
    "save_every": "5steps",
    "gpus": "0,1",
    "track": "mlflow",
}
OTHERS |= {"compile": "model", "parallel": "fsdp", "reduction": "allreduce"}
OTHERS |= {"dataset": "fake", "arch": "mlp", "micro_batch": "16", "lr_end": "1e-5", "momentum": "0.5"}
OTHERS |= {"label_smoothing": "0.5", "class_weights": "1,2", "trainer": "ema"}


def parsed(words) -> config.Args:
    """The args of a command line, given as text or as a list."""
    return config.parse_args(words.split() if isinstance(words, str) else words)


def refusal(words) -> str:
    """What is said against a command line: one line."""
    with pytest.raises(UsageError) as caught:
        parsed(words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_of(words, out: Path, capsys) -> str:
    """The one line that train.py refuses a command line with: exit code 2, nothing else said, nothing written."""
    words, before = words.split() if isinstance(words, str) else list(words), tree(out)
    capsys.readouterr()  # what was said before
    code = train.main(words if "-out" in words else [*words, "-out", str(out)])
    heard = capsys.readouterr()
    assert code == 2, heard
    assert not heard.out and heard.err.startswith("train.py: ") and heard.err.endswith("\n")
    assert len(heard.err.splitlines()) == 1
    assert tree(out) == before, "something was written"
    return heard.err.removeprefix("train.py: ").removesuffix("\n")


def tree(folder: Path) -> dict:
    """Everything below a folder, by path, files with what is in them; of a lock, not who held it last."""
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() and path.name != ".lock" else None for path in paths}


def help_of(words, capsys) -> str:
    """What is printed for a command line with -h."""
    with pytest.raises(SystemExit) as end:
        parsed(words)
    printed = capsys.readouterr()
    assert end.value.code == 0 and not printed.err
    return printed.out


def shared() -> dict:
    """The flags of every run, by name."""
    return {action.dest: action for action in config.new_parser()._actions if action.dest not in ("h", "list")}


def other_value(action) -> str:
    """A value that the flag takes and that is not its default."""
    if action.type is types.yes_no:
        return "no" if action.default else "yes"
    return OTHERS.get(action.dest, "7" if action.metavar in ("N", "X") else "some")


# Flags with an other_value that stand alone: -cfg needs a file.
ALONE = sorted(set(shared()) - {"cfg"})


def cfg_file(folder, content, name="run.yaml") -> str:
    """The path of a -cfg file with this content."""
    file = folder / name
    file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content, encoding="utf-8")
    return str(file)


def plugin_file(monkeypatch, folder, kind, name, text):
    """Makes lib/KIND/NAME.py with this text for one test."""
    there, file = plugins.names, folder / f"{kind}_{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"lib.{kind}.{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugins, "names", lambda of: sorted(there(of) + [name] * (of == kind)))


def plugin_folder(monkeypatch, folder, kind, name, text):
    """Makes lib/KIND/NAME.py with this text for one test, not imported yet."""
    package, there = importlib.import_module(f"lib.{kind}"), plugins.names
    (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, f"lib.{kind}.{name}", raising=False)
    monkeypatch.setattr(plugins, "names", lambda of: sorted(there(of) + [name] * (of == kind)))


def repeated(args, folder, **settled) -> dict:
    """The args of a run that is started from the config.yaml of these args, but for the words of one start."""
    file = folder / "config.yaml"
    file.write_text(config.to_yaml(args, {"command": "python train.py 'x: y'\n- z", "git": None}, settled))
    again = vars(parsed(["-cfg", str(file)]))
    return {name: value for name, value in again.items() if name not in flags.rules().forgotten}


def lasting(args) -> dict:
    """What config.yaml holds of these args: all but the words of one start."""
    return {name: value for name, value in vars(args).items() if name not in flags.rules().forgotten}
