"""kill -9 and SIGTERM at random instants, of ranks and parents, again and again: nothing is lost but what was done
since the last save, and every run ends as the one that nothing disturbed. scripts/chaos.py does it at length."""

import sys

import pytest

from scripts import chaos

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of its runs through /proc")
DDP_OR_FSDP = ("-parallel ddp", "-parallel fsdp")


@pytest.fixture
def storm(tmp_path):
    """A storm of so many kills, and that it did no harm. Gives its tally."""

    def raise_one(kills, sizes, **words):
        tally = chaos.Tally()
        chaos.storm(tmp_path, tally, kills, sizes, **words)
        message = "\n".join(tally.lines())
        assert tally.faults == 0, f"{message}\nwhat differs lies in {tmp_path}, named bad_N"
        assert tally.total == kills, message
        return tally

    return raise_one


@pytest.mark.timeout(1200)
def test_two_hundred_kills_between_numbers_of_ranks_and_wrappers_change_no_bit_and_no_sample(storm):
    tally = storm(200, [1, 2, 3], switch=DDP_OR_FSDP, seed=1, words=f"{chaos.RUN} -epochs 2")
    assert set(tally.kills) == set(chaos.STRIKES) and tally.switches > 100
    assert tally.early + tally.late < 160, "many kills hit a run at work, on a busy machine too"


@pytest.mark.timeout(600)
def test_kills_between_more_ranks_change_no_bit_and_no_sample(storm):
    assert storm(10, [1, 4, 5], switch=DDP_OR_FSDP, seed=2).switches > 5


@pytest.mark.timeout(600)
def test_kills_between_runs_with_loader_processes_and_without_change_nothing(storm):
    assert storm(10, [2], switch=("-workers 0", "-workers 1"), seed=3).switches > 2
