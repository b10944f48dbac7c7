"""scripts/set_up.sh with fakes of python3 and uv: what it says, and which .venv it makes anew."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import copy_tracked, fake_program

PYTHON = f"""
echo "python $*" >> calls
case "$*" in
    -c*version_info*) {sys.executable} "$@" ;;
    "-m venv"*)
        if [ "$3" = --clear ]; then rm -rf .venv; fi
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        rm -f .venv/broken
        ;;
    "-m pip --version") [ ! -e .venv/broken ] ;;
    *install*uv) cp bin/fake_uv .venv/bin/uv ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A folder with set_up.sh, and with all programs that it needs in `bin`."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "cp", "mkdir", "rm", "uname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    for name, text in (("python3", PYTHON), ("fake_uv", 'echo "uv $*" >> calls')):
        fake_program(tmp_path, name, text)
    copy_tracked(tmp_path, lambda name: str(name) in ("scripts/set_up.sh", "pyproject.toml"))
    return tmp_path


def set_up(folder: Path, code: int = 0, **variables) -> tuple[list[str], list[str]]:
    """Run it with the group dev. Returns the lines that it prints and the calls of python and uv."""
    (folder / "calls").write_text("")
    command = ["bash", "-euc", ". scripts/set_up.sh dev"]
    env = {"PATH": str(folder / "bin"), **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and not done.stdout, done.stderr
    return done.stderr.splitlines(), (folder / "calls").read_text().splitlines()


def test_it_says_what_it_installs_and_is_silent_the_second_time(project):
    lines, calls = set_up(project)
    wanted = ["uv into .venv (about 25 MB)", "the packages of pyproject.toml and its group dev into .venv"]
    assert lines[:2] == [f"baton: installing {what}" for what in wanted]
    install = "uv pip install --python .venv/bin/python --compile-bytecode -r pyproject.toml --group dev"
    assert calls[-1] == install, "uv shows its progress"
    assert set_up(project) == ([], [])
    assert set_up(project, UV_TORCH_BACKEND="cpu")[1][-1:] == [install], "it has uv"


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux the package index's own build is the one for CUDA")
def test_the_small_build_of_torch_is_proposed_once_where_there_is_no_gpu(project):
    none = not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))

    def proposed(**variables) -> bool:
        shutil.rmtree(project / ".venv", ignore_errors=True)
        return "export UV_TORCH_BACKEND=cpu" in "\n".join(set_up(project, **variables)[0])

    assert not proposed(UV_TORCH_BACKEND="cpu") and not proposed(UV_TORCH_BACKEND="auto")
    assert proposed() == none and proposed(UV_TORCH_BACKEND="") == none
    (project / ".venv" / ".installed_dev").write_text("an older one")
    assert len(set_up(project)[0]) == 1, "torch is there"
    fake_program(project, "nvidia-smi", "")
    assert not proposed()
