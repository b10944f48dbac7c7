"""A save of a real checkpoint cut short at every file-system call: the newest that can be read is the old or the new
one, never neither, and the next start and the next save go on."""

import itertools
import shutil

import crash
import disk
import pytest
import saves
from safetensors import SafetensorError

from lib.utils.checkpoint import shards

pytestmark = pytest.mark.usefixtures("no_fsync")
OLD, NEW, NEWER = 8, 9, 10  # as strings, the last comes first


class Case:
    """A save and what is there before it."""

    def __init__(self, old=OLD, new=NEW, keep_last=1, keep=False, codes=crash.ERRORS[:1], least=60):
        self.old, self.new, self.words, self.keep = old, new, {"keep_last": keep_last}, keep
        self.codes, self.least = codes, least  # the errors to try, the states there are to be

    def begun(self, tmp_path):
        """The run's folder as it is before."""
        folder = tmp_path / "run"
        folder.mkdir()
        if self.old is not None:
            self.save(folder, self.old)
        return folder

    def save(self, folder, step):
        checkpoints = saves.saver(folder, **self.words)
        checkpoints.save(saves.state(step), saves.facts(step), step=step % 5, rank_dependent=set(), keep=self.keep)
        checkpoints.close()

    def wrong_after(self, cut, folder):
        """What is wrong after a cut, None if nothing is."""
        try:
            found = saves.newest(folder)
            assert found == self.new if cut.finished else found in (self.old, self.new), f"{found} found"
            for name in saves.names(folder):
                saves.tensors(folder / "checkpoints" / name)
            self.save(folder, NEWER)
            assert saves.newest(folder) == NEWER
            saves.saver(folder)
            left = [name for name in disk.read_tree(folder) if name.endswith((".partial", ".removed", ".corrupt"))]
            assert not left, left
        except (AssertionError, OSError, RuntimeError, SafetensorError, shards.Damaged) as error:
            return f"{cut.what}: {type(error).__name__} {error}"


CASES = {
    "the old one removed": Case(codes=crash.ERRORS, least=190),
    "the same step again": Case(OLD, OLD + 5),
    "the first of all": Case(None),
    "a milestone beside the old one": Case(keep_last=2, keep=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_save_killed_failed_or_without_power_leaves_the_old_state_or_the_new(name, tmp_path):
    case = CASES[name]
    folder = case.begun(tmp_path)
    cuts = itertools.chain(
        crash.kills(lambda: case.save(folder, case.new), folder),
        crash.failures(lambda: case.save(folder, case.new), folder, case.codes),
        crash.power_loss_states(lambda: case.save(folder, case.new), folder),
    )
    outcomes = [case.wrong_after(cut, folder) for cut in cuts]
    assert not [wrong for wrong in outcomes if wrong]
    assert len(outcomes) >= case.least


def test_a_disk_that_fails_for_good_keeps_the_old_state(tmp_path):
    case = Case()
    folder = case.begun(tmp_path)
    for cut in crash.failures(lambda: case.save(folder, NEW), folder, codes=crash.ERRORS[1:2], lasting=True):
        assert not case.wrong_after(cut, folder)


def test_starts_that_are_killed_while_sweeping_sweep_in_the_end(tmp_path):
    case = Case()
    folder = case.begun(tmp_path)
    crash.kill_at(
        lambda: case.save(folder, NEW), folder, len(crash.points(lambda: case.save(folder, NEW), folder)) - 1
    )
    for name in ("000099_step_99.partial", "000001_step_1.12.ab.removed"):
        shutil.copytree(folder / "checkpoints" / saves.names(folder)[0], folder / "checkpoints" / name)
    for cut in crash.kills(lambda: saves.saver(folder), folder):
        assert not case.wrong_after(cut, folder)
