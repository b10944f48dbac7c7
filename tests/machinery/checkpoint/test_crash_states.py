"""A save of a real checkpoint is cut short at every file-system call. The newest readable checkpoint is the old or
the new one, and the next start and the next save work."""

import itertools
import shutil

import crash
import disk
import pytest
import saves
from safetensors import SafetensorError

from lib.utils.checkpoint import shards

pytestmark = pytest.mark.usefixtures("no_fsync")
OLD, NEW, NEWER = 8, 9, 10  # sorted as strings, the last is the first


class Case:
    """A save, and the state before it."""

    def __init__(self, old=OLD, new=NEW, keep_last=1, keep=False):
        self.old, self.new, self.options, self.keep = old, new, {"keep_last": keep_last}, keep

    def prepare(self, tmp_path):
        """Make the run's folder with the old state."""
        folder = tmp_path / "run"
        folder.mkdir()
        if self.old is not None:
            self.save(folder, self.old)
        return folder

    def save(self, folder, step):
        checkpoints = saves.new_checkpoints(folder, **self.options)
        checkpoints.save(saves.state(step), saves.facts(step), step=step % 5, keep=self.keep)
        checkpoints.close()

    def wrong_after(self, cut, folder):
        """What is wrong after a cut, or None."""
        try:
            found = saves.newest(folder)
            assert found == self.new if cut.finished else found in (self.old, self.new), f"{found} found"
            for name in saves.names(folder):
                saves.tensors(folder / "checkpoints" / name)
            self.save(folder, NEWER)
            assert saves.newest(folder) == NEWER
            saves.new_checkpoints(folder)
            left = [name for name in disk.read_tree(folder) if name.endswith(".partial")]
            assert not left, left
        except (AssertionError, OSError, RuntimeError, SafetensorError, shards.Damaged) as error:
            return f"{cut.what}: {type(error).__name__} {error}"


CASES = {
    "the old one of the same step is removed": Case(OLD, OLD + 5),
    "the first save": Case(None),
    "a milestone next to the old one": Case(keep_last=2, keep=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_save_that_is_killed_fails_or_loses_power_leaves_the_old_or_the_new_checkpoint(name, tmp_path):
    case = CASES[name]
    folder = case.prepare(tmp_path)
    ways = (crash.kills, crash.failures, crash.power_loss_states)
    cuts = itertools.chain.from_iterable(way(lambda: case.save(folder, case.new), folder) for way in ways)
    outcomes = [case.wrong_after(cut, folder) for cut in cuts]
    assert not [wrong for wrong in outcomes if wrong]
    assert len(outcomes) >= 55


def test_a_disk_that_fails_for_good_keeps_the_old_checkpoint(tmp_path):
    case = Case()
    folder = case.prepare(tmp_path)
    for cut in crash.failures(lambda: case.save(folder, NEW), folder, lasting=True):
        assert not case.wrong_after(cut, folder)


def test_after_starts_that_are_killed_during_their_cleanup_a_later_start_completes_it(tmp_path):
    case = Case()
    folder = case.prepare(tmp_path)
    save = lambda: case.save(folder, NEW)  # noqa: E731
    crash.kill_at(save, folder, number=len(crash.points(save, folder)) - 1)
    for name in ("000099_step_99.partial", "000001_step_1.partial"):
        shutil.copytree(folder / "checkpoints" / saves.names(folder)[0], folder / "checkpoints" / name)
    for cut in crash.kills(lambda: saves.new_checkpoints(folder), folder):
        assert not case.wrong_after(cut, folder)
