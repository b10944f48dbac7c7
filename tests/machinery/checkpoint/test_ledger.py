"""The ledger of a run: its content, the samples that led to the present state, and where two runs first differ."""

import json
import math

import pytest
import saves
from runs import few, plugins, run

from lib.trainer import trainer
from lib.utils.data import plan
from scripts import ledger

SAMPLES, BATCH, MICRO, STEPS = 50, 16, 4, 4  # an epoch has 16 + 16 + 16 + 2 samples


def at(step, micro, indices, loss=1.0, rows=None):
    """The line of a micro-batch."""
    return {"at": [0, step, micro], "indices": indices, "rows": rows or indices, "loss": float(loss).hex()}


def after(step, weights, place="rank 0"):
    """The line of a finished step."""
    return {"step": step, "place": place, "weights": [7, weights]}


@pytest.fixture
def book(tmp_path):
    """A function that writes a ledger and returns its starts. Each is a list of lines, or a dict of lists by rank."""

    def write(name, *starts):
        for number, start in enumerate(starts):
            for rank, lines in (start if isinstance(start, dict) else {0: start}).items():
                (tmp_path / name).mkdir(exist_ok=True)
                head = {"session": number + 100, "time": number, "size": 1, "names": ["bias", "head.weight"]}
                with (tmp_path / name / f"rank_{rank}.jsonl").open("a") as file:
                    file.write("".join(f"\n{json.dumps(line)}" for line in [head, *lines]))
        return ledger.read(tmp_path / name)

    return write


# The samples that led to the present state


def test_of_a_repeated_step_the_last_one_counts(book):
    first = [at(0, 0, [7]), at(0, 1, [3]), after(0, 1), at(1, 0, [5]), at(1, 1, [9]), after(1, 2), at(2, 0, [1])]
    starts = book("run", first, [at(1, 0, [6]), at(1, 1, [8]), after(1, 3)])
    assert ledger.trained_on(starts) == {(0, 0): [7, 3], (0, 1): [6, 8]}, "step 2 does not count either"
    assert [start.first_step for start in starts] == [0, 1]


def test_a_line_that_a_kill_cut_short_is_ignored(book, tmp_path):
    book("run", [at(0, 0, [7])])
    with (tmp_path / "run" / "rank_0.jsonl").open("a") as file:
        file.write('\n{"at": [0, 1')
    starts = book("run", [at(1, 0, [5])])
    assert ledger.trained_on(starts) == {(0, 0): [7], (0, 1): [5]}


# Where two runs first differ

TRUTH = [at(0, 0, [7, 8]), after(0, 1), at(1, 0, [5, 6]), after(1, 2), at(2, 0, [3, 4], loss=math.nan), after(2, 3)]
OTHERS = {  # what a start did: its lines, and where it differs
    "the same": (TRUTH, None),
    "another order": ([at(1, 0, [6, 5])], (1, 6, "other samples")),
    "more steps": ([at(3, 0, [1, 2])], (3, 1, "other samples")),
    "drawn otherwise": ([at(1, 0, [5, 6], rows=[5, 0])], (1, 6, "drawn otherwise")),
    "another loss": ([at(1, 0, [5, 6], loss=1 + 1e-6)], (1, 5, "another loss")),
    "a loss that is a number": ([at(2, 0, [3, 4])], (2, 3, "another loss")),
    "other weights": ([at(1, 0, [5, 6]), after(1, 0)], (1, None, "another head.weight after it (1 of 2 tensors)")),
    "a shard, which the truth has not": ([at(1, 0, [5, 6]), after(1, 0, "shard 0 of 2")], None),
    "two of them": ([at(2, 0, [4]), at(1, 0, [6]), after(0, 0)], (0, None, "another head.weight")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference_is_found_and_described(book, name):
    lines, place = OTHERS[name]
    found = ledger.first_difference(book("truth", TRUTH), book("other", TRUTH[:2], lines))
    assert (found is None) == (place is None)
    assert found is None or (found[:2] == place[:2] and place[2] in found.why)


# The content of a ledger


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The ledger of a run of two epochs on two ranks."""
    out = tmp_path_factory.mktemp("kept")
    made = {"keeper": ledger.recording_trainer(trainer.Trainer, out / "ledger")}
    with plugins(trainer=made, **saves.PLUGINS):
        run(out, f"{saves.SMALL} -trainer keeper -cpu 2 -epochs 2")
    return ledger.read(out / "ledger")


def test_a_run_records_every_micro_batch_once_and_its_weights_after_every_step(kept):
    (start,) = kept
    assert start.facts | {"size": 2, "batch": BATCH, "micro": MICRO} == start.facts
    wanted = {
        (epoch, epoch * STEPS + step): plan.order(SAMPLES, 0, epoch)[step * BATCH : (step + 1) * BATCH]
        for epoch in range(2)
        for step in range(STEPS)
    }
    assert ledger.trained_on(kept) == {place: order.tolist() for place, order in wanted.items()}
    assert len(start.records) == 2 * (3 * 4 + 1)
    assert start.weights.keys() == {(step, f"rank {rank}") for step in range(2 * STEPS) for rank in range(2)}
    assert {len(values) for values in start.weights.values()} == {len(start.facts["names"])}
    assert len({str(values) for values in start.weights.values()}) == 2 * STEPS, (
        "equal on both ranks, new in each step"
    )


def test_a_recorded_sample_is_identified_by_the_checksum_of_its_values(kept):
    rows = {}
    for record in kept[0].records.values():
        rows.setdefault(record.epoch, {}).update(zip(record.indices, record.rows, strict=True))
    data = few(None)["train"]
    assert rows[0] == rows[1] == {i: ledger.checksum([t[i] for t in data.tensors]) for i in range(SAMPLES)}
