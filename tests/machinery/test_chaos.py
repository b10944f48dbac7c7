"""kill -9 and SIGTERM at random instants, of ranks and parents: only steps since the last save are lost, and every
run ends as an uninterrupted one. scripts/chaos.py does the same for longer."""

import sys

import pytest

from scripts import chaos

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of its runs in /proc")
DDP_OR_FSDP = ("-parallel ddp", "-parallel fsdp")


@pytest.fixture
def storm(tmp_path):
    """A function that kills a run so many times, checks that no harm was done, and returns the tally."""

    def run_storm(kills, sizes, **options):
        tally = chaos.Tally()
        chaos.storm(tmp_path, tally, kills, sizes, base=f"{chaos.RUN} -epochs 2", **options)
        message = "\n".join(tally.lines())
        assert tally.faults == 0, f"{message}\nthe differing runs are in {tmp_path}, named bad_N"
        assert tally.total == kills, message
        return tally

    return run_storm


@pytest.mark.timeout(600)
def test_fifty_kills_with_changing_numbers_of_ranks_change_no_bit_and_no_sample(storm):
    tally = storm(50, [1, 2, 3], switch=DDP_OR_FSDP, seed=1)
    assert set(tally.kills) == set(chaos.SIGNALS) and tally.switches > 25
    assert tally.early + tally.late < 40, "many kills must hit a run during training, even on a busy machine"


@pytest.mark.timeout(600)
def test_kills_with_more_ranks_change_no_bit_and_no_sample(storm):
    assert storm(10, [1, 4, 5], switch=DDP_OR_FSDP, seed=2).switches > 5


@pytest.mark.timeout(600)
def test_kills_with_and_without_loader_processes_change_nothing(storm):
    assert storm(10, [2], switch=("-workers 0", "-workers 1"), seed=3).switches > 2
