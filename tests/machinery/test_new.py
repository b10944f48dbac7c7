"""What scripts/new.py begins runs at once, and the tests find it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import CLEAN

ROOT = Path(__file__).resolve().parents[2]
OLD = re.search(r'^name = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def said(folder, *words, code=0) -> str:
    run = subprocess.run([sys.executable, *words], cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=240)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A project begun from this one, with one new plugin of each kind."""
    folder = tmp_path_factory.mktemp("begun") / "my-net"
    said(ROOT, "scripts/new.py", "project", str(folder))
    for kind in ("arch", "dataset", "trainer"):
        told = said(folder, "scripts/new.py", kind, f"own_{kind}")
        assert f"try: python train.py -{kind} own_{kind}" in told
    return folder


def test_a_project_has_its_own_name_everywhere_and_no_history(fork):
    listed = subprocess.run(["git", "ls-files"], cwd=fork, capture_output=True, text=True, check=True).stdout.split()
    assert {"train.py", "lib/config/args.py", "tests/machinery/test_house.py", "LICENSE"} <= set(listed)
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(known) <= {*listed, *(name for name in known if not (ROOT / name).exists())}
    assert subprocess.run(["git", "rev-parse", "HEAD"], cwd=fork, capture_output=True).returncode, (
        "there is a history"
    )
    named = [name for name in listed if OLD in f"{name} {(fork / name).read_bytes()!r}".lower()]
    assert named == ["LICENSE"], "whose terms ask for it"
    assert 'name = "my-net"' in (fork / "pyproject.toml").read_text()
    assert (fork / "scripts" / "train.sh").stat().st_mode & 0o111


def test_a_projects_readme_has_what_it_needs_and_no_more(fork):
    ours, theirs = ((folder / "README.md").read_text() for folder in (ROOT, fork))
    titles = [re.findall("^## (.*)", text, re.M) for text in (ours, theirs)]
    assert [title for title in titles[0] if title not in titles[1]] == ["Why not Lightning?", "Status"]
    assert theirs.startswith("# my-net\n") and "./scripts/test.sh" in theirs


def test_new_plugins_are_short_run_at_once_and_are_found_by_the_tests(fork):
    words = "train.py -arch own_arch -dataset own_dataset -trainer own_trainer -epochs 1 -cpu 1"
    assert "finished:" in said(fork, *words.split())
    found = said(
        fork, "-m", "pytest", "tests/test_plugins.py", "-k", "own_ and (digits or flags or trainer or splits or step)"
    )
    passed = int(re.search(r"(\d+) passed", found)[1])
    assert passed >= 6 and "skipped" not in found and "failed" not in found
    for kind in ("arch", "dataset", "trainer"):
        assert len((fork / "lib" / kind / f"own_{kind}.py").read_text().splitlines()) < 30
    formed = subprocess.run([Path(sys.executable).with_name("ruff"), "format", "--check", "."], cwd=fork)
    assert formed.returncode == 0


def test_the_tests_of_a_project_are_collected_and_hold_its_own_rules_and_readme(fork):
    theirs = said(fork, "-m", "pytest", "--collect-only", "tests")
    assert int(re.search(r"(\d+) tests collected", theirs)[1]) > 500
    chosen = "rule or every_command or every_flag or every_path or plugins_that or project"
    assert "failed" not in said(
        fork, "-m", "pytest", "tests/machinery/test_house.py", "tests/machinery/test_readme.py", "-k", chosen
    )


def test_what_cannot_be_begun_is_refused_in_words(fork, tmp_path):
    assert "File exists" in said(fork, "scripts/new.py", "arch", "own_arch", code=2)
    assert "not a plugin's name" in said(fork, "scripts/new.py", "arch", "../x", code=2)
    assert "letters, digits and dashes" in said(fork, "scripts/new.py", "project", str(tmp_path / "a b"), code=2)
    assert "File exists" in said(fork, "scripts/new.py", "project", str(fork), code=2)
    assert not list(tmp_path.iterdir())
