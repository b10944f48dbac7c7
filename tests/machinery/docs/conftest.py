"""Shared by the tests of the pages: a fork with their files."""

import shutil
import subprocess

import pages
import pytest
from processes import ROOT


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the tracked files, with the files of the pages and with photos in class folders."""
    folder = tmp_path_factory.mktemp("fork")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name, text in pages.FILES.items():
        (folder / name).write_text(text)
    pages.make_photos(folder / "data" / "photos")
    return folder
