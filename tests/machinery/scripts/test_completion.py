"""bash completes flags and plugin names with the TAB key."""

import contextlib
import subprocess
import sys

import pytest

from lib.config import plugins
from scripts import completion


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The completion script of bash."""
    pytest.importorskip("shtab", reason="needs uv pip install -r pyproject.toml --group completion")
    file = tmp_path_factory.mktemp("completion") / "train.bash"
    with file.open("w") as stream, contextlib.redirect_stdout(stream):
        assert completion.main(["bash"]) == 0
    return file


def completions(script, words: list[str]) -> list[str]:
    """The completions that bash offers at the TAB key after these words of a command line."""
    quoted = " ".join(f'"{word}"' for word in words)
    ask = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _python_train_py; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=240).stdout.split()


def test_bash_completes_flags_and_plugin_names(script):
    rates = ["-lr_schedule", "-lr_start", "-lr_end", "-lr_warmup", "-lr_batch"]
    assert completions(script, ["python", "train.py", "-lr_"]) == rates
    assert set(completions(script, ["python", "train.py", "-arch", ""])) == set(plugins.names("arch"))
    assert completions(script, ["python3", "./train.py", "-cpu", "2", "-trainer", "em"]) == ["ema"]
    assert completions(script, ["python", "train.py", "-lr_schedule", "c"]) == ["cosine", "constant"]
    assert completions(script, ["python", "train.py", "-resnet_d"]) == ["-resnet_depth"], "a plugin's own flag"
    assert completions(script, ["python", "other.py", "-lr_"]) == [] == completions(script, ["python", "-"])


def test_an_unknown_shell_or_a_missing_package_is_reported_in_one_line(capsys, monkeypatch):
    assert completion.main(["fish"]) == 2
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert completion.main(["bash"]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 2 and "bash or zsh" in message[0] and "needs shtab: uv pip" in message[1]
