"""-list shows the plugins, and bash and zsh complete flags and plugin names at the TAB key."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import needed
from processes import until

import train
from lib import config
from lib.config import plugins
from scripts import completion

ROOT = Path(__file__).resolve().parents[2]
# At TAB the line goes to a file, completed, and is gone before zsh could run it.
ZSH = """autoload -U compinit; compinit -u; eval "$(<{script})"; unsetopt beep
tell() {{ zle expand-or-complete; print -r -- "$BUFFER" >> {message}; BUFFER= }}; zle -N tell; bindkey '^I' tell
print ready >> {message}
"""


def written(folder: Path, shell: str) -> Path:
    """What a shell is to evaluate, in a file."""
    pytest.importorskip("shtab", reason="needs uv pip install -r pyproject.toml --group completion")
    file = folder / f"train.{shell}"
    with file.open("w") as stream, contextlib.redirect_stdout(stream):
        assert completion.main([shell]) == 0
    return file


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What bash is to evaluate."""
    return written(tmp_path_factory.mktemp("completion"), "bash")


def offered(script, words: list[str]) -> list[str]:
    """What bash offers at the TAB key behind these words."""
    quoted = " ".join(f'"{word}"' for word in words)
    ask = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _python_train_py; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=240).stdout.split()


def typed(folder: Path, lines: list[str]) -> list[str]:
    """What a zsh at a terminal makes of these lines, each with TAB at its end."""
    message, script = folder / "typed", written(folder, "zsh")
    (folder / "setup").write_text(ZSH.format(script=script, message=message))
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "vt100", "ZDOTDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env, start_new_session=True
    )
    try:
        os.write(ours, b"source " + str(folder / "setup").encode() + b"\n")
        for number, line in enumerate(lines, start=1):
            until(lambda: len(_lines(message)) == number)  # noqa: B023
            os.write(ours, line.encode() + b"\t")
        return until(lambda: _lines(message)[1:] if len(_lines(message)) > len(lines) else None)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def _lines(file):
    return file.read_text().splitlines() if file.exists() else []


def test_list_shows_every_plugin_with_what_it_says_of_itself(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["-list"])
    message = capsys.readouterr().out
    assert end.value.code == 0
    shown = dict(re.findall(r"^  (\w+) +(\S.*)$", message, re.M))
    assert set(shown) == {name for kind in config.BUILDERS for name in plugins.names(kind)}
    assert shown["mlp"] == "A multilayer perceptron over flattened inputs."
    assert [line.split()[0] for line in message.splitlines() if not line.startswith(" ")] == [
        "-arch",
        "-dataset",
        "-trainer",
    ]


def test_list_says_which_plugin_cannot_be_read(monkeypatch, tmp_path):
    (tmp_path / "lib" / "arch").mkdir(parents=True)
    (tmp_path / "lib" / "arch" / "half.py").write_text("def get_model(args) return")
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    assert plugins.summary("arch", "half").startswith("cannot be read: ")


def test_flags_and_plugin_names_are_completed(script):
    assert offered(script, ["python", "train.py", "-lr_"]) == [
        *("-lr_schedule", "-lr_start", "-lr_end", "-lr_warmup", "-lr_batch")
    ]
    assert set(offered(script, ["python", "train.py", "-arch", ""])) == set(plugins.names("arch"))
    assert offered(script, ["python3", "./train.py", "-cpu", "2", "-trainer", "em"]) == ["ema"]
    assert offered(script, ["python", "train.py", "-lr_schedule", "c"]) == ["cosine", "constant"]
    assert offered(script, ["python", "train.py", "-resnet_d"]) == ["-resnet_depth"], "a plugin's own"


def test_other_scripts_of_python_are_left_alone(script):
    assert offered(script, ["python", "other.py", "-lr_"]) == [] == offered(script, ["python", "-"])


@needed("" if shutil.which("zsh") else "needs zsh")
def test_zsh_completes_them_too(tmp_path):
    found = {
        "python train.py -resnet_d": "python train.py -resnet_depth ",
        "python3 ./train.py -cpu 2 -trainer em": "python3 ./train.py -cpu 2 -trainer ema ",
        "./train.py -lr_schedule w": "./train.py -lr_schedule wsd ",
        "python other.py -resnet_d": "python other.py -resnet_d",
    }
    assert typed(tmp_path, [*found]) == [*found.values()]


def test_what_is_missing_or_wrong_is_one_line(capsys, monkeypatch):
    assert completion.main(["fish"]) == 2
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert completion.main(["bash"]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 2 and "bash or zsh" in message[0] and "needs shtab: uv pip" in message[1]
