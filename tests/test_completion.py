"""-list shows the plugins, and bash completes flags and plugin names at the TAB key."""

import contextlib
import re
import subprocess
import sys

import pytest

import train
from lib import config
from scripts import completion


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What bash is to evaluate."""
    pytest.importorskip("shtab", reason="needs uv pip install -r pyproject.toml --group completion")
    file = tmp_path_factory.mktemp("completion") / "train.bash"
    with file.open("w") as stream, contextlib.redirect_stdout(stream):
        assert completion.main(["bash"]) == 0
    return file


def offered(script, words: list[str]) -> list[str]:
    """What bash offers at the TAB key behind these words."""
    quoted = " ".join(f'"{word}"' for word in words)
    ask = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _python_train_py; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=240).stdout.split()


def test_list_shows_every_plugin_with_what_it_says_of_itself(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["-list"])
    told = capsys.readouterr().out
    assert end.value.code == 0
    shown = dict(re.findall(r"^  (\w+) +(\S.*)$", told, re.M))
    assert set(shown) == {name for kind in config.BUILDERS for name in config.plugins(kind)}
    assert shown["mlp"] == "A multilayer perceptron over flattened inputs."
    assert [line.split()[0] for line in told.splitlines() if not line.startswith(" ")] == [
        "-arch",
        "-dataset",
        "-trainer",
    ]


def test_flags_and_plugin_names_are_completed(script):
    assert offered(script, ["python", "train.py", "-lr_"]) == ["-lr_start", "-lr_end", "-lr_warmup", "-lr_batch"]
    assert set(offered(script, ["python", "train.py", "-arch", ""])) == set(config.plugins("arch"))
    assert offered(script, ["python3", "./train.py", "-cpu", "2", "-trainer", "con"]) == ["contrastive"]
    assert offered(script, ["python", "train.py", "-scale_lr", "s"]) == ["sqrt"]
    assert offered(script, ["python", "train.py", "-resnet_d"]) == ["-resnet_depth"], "a plugin's own"


def test_other_scripts_of_python_are_left_alone(script):
    assert offered(script, ["python", "other.py", "-lr_"]) == [] == offered(script, ["python", "-"])


def test_what_is_missing_or_wrong_is_one_line(capsys, monkeypatch):
    assert completion.main(["fish"]) == 2
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert completion.main(["bash"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "bash or zsh" in told[0] and "needs shtab: uv pip" in told[1]
