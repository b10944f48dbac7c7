"""Shared by the tests of the pages: a fork with their files."""

import pages
import pytest
import tiny_data
from processes import copy_tracked


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of the tracked files, with the files of the pages and with photos in class folders."""
    folder = tmp_path_factory.mktemp("fork")
    copy_tracked(folder)
    for name, text in pages.FILES.items():
        (folder / name).write_text(text)
    tiny_data.make_folder(folder / "data" / "photos", train=12, val=4)
    return folder
