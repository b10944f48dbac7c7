"""kill -9 and SIGTERM at random instants, of ranks and parents: every run ends as an undisturbed one does."""

import sys

import pytest

from scripts import chaos

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of its runs in /proc")


@pytest.mark.timeout(900)
def test_twelve_kills_with_changing_numbers_of_ranks_and_loaders_change_no_bit_and_no_sample(tmp_path):
    tally = chaos.Tally()
    switch = ("-parallel ddp -workers 1", "-parallel fsdp -workers 0")
    chaos.storm(tmp_path, tally, 12, [1, 2, 3, 5], switch=switch, seed=1, base=f"{chaos.RUN} -epochs 2")
    message = "\n".join(tally.lines())
    assert tally.faults == 0, f"{message}\nthe differing runs are in {tmp_path}, named bad_N"
    assert tally.total == 12, message
    targets, signals = (set(kinds) for kinds in zip(*tally.kills))
    assert len(targets) == 3 and len(signals) == 2 and tally.switches > 2
    assert tally.early + tally.late < 10, "many kills must hit a run during training, even on a busy machine"


@pytest.mark.timeout(600)
def test_ten_kills_of_one_process_of_several_cost_no_step(tmp_path):
    tally = chaos.Tally()
    chaos.storm(tmp_path, tally, 10, [2, 3], seed=2, base=f"{chaos.RUN} -epochs 2", lost=True)
    assert tally.faults == 0 and tally.survived > 2, "\n".join(tally.lines())
