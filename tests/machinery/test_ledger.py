"""The ledger of a run: its content, the samples that led to the present state, and where two runs first differ."""

import json
import math

import pytest
import saves
import torch
from runs import few, plugins, run

from lib.trainer import trainer
from lib.utils.data import plan
from scripts import ledger
from scripts.ledger import Difference

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


def test_a_start_without_steps_undoes_nothing(book):
    starts = book("run", [at(0, 0, [7])], [], [at(1, 0, [5])])
    assert ledger.trained_on(starts) == {(0, 0): [7], (0, 1): [5]}
    assert starts[1].first_step == math.inf


def test_the_samples_of_a_step_are_in_the_order_of_its_micro_batches_on_any_ranks(book):
    starts = book("run", {0: [at(0, 2, [3]), at(0, 0, [1])], 1: [at(0, 1, [2]), at(0, 3, [4])]})
    assert ledger.trained_on(starts) == {(0, 0): [1, 2, 3, 4]}


def test_a_line_that_a_kill_cut_short_is_ignored(book, tmp_path):
    book("run", [at(0, 0, [7])])
    with (tmp_path / "run" / "rank_0.jsonl").open("a") as file:
        file.write('\n{"at": [0, 1')
    starts = book("run", [at(1, 0, [5])])
    assert ledger.trained_on(starts) == {(0, 0): [7], (0, 1): [5]}


def test_progress_counts_the_steps_of_one_start(book, tmp_path):
    assert ledger.progress(tmp_path / "run", 100) is None
    book("run", [at(0, 0, [7]), after(0, 1), at(1, 0, [5]), after(1, 1)], [], [at(1, 0, [5])], [after(1, 1)])
    assert [ledger.progress(tmp_path / "run", session) for session in range(99, 104)] == [None, 2, None, 0, 2]


# Where two runs first differ

TRUTH = [at(0, 0, [7, 8]), after(0, 1), at(1, 0, [5, 6]), after(1, 2), at(2, 0, [3, 4], loss=math.nan), after(2, 3)]
OTHERS = {  # what a start did: its lines, and where it differs
    "the same": (TRUTH, None),
    "the end of it": (TRUTH[2:], None),
    "another order": ([at(1, 0, [6, 5])], (1, 6, "other samples")),
    "another sample": ([at(1, 0, [5, 9])], (1, 5, "other samples")),
    "more steps": ([at(3, 0, [1, 2])], (3, 1, "other samples")),
    "drawn otherwise": ([at(1, 0, [5, 6], rows=[5, 0])], (1, 6, "drawn otherwise")),
    "another loss": ([at(1, 0, [5, 6], loss=1.1)], (1, 5, "another loss")),
    "a rounded loss": ([at(1, 0, [5, 6], loss=1 + 1e-6)], (1, 5, "another loss")),
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


def test_a_difference_is_printed_with_step_and_sample():
    assert str(Difference(3, 7, "drawn otherwise")) == "step 3, sample 7: drawn otherwise"
    assert str(Difference(3, None, "other weights")) == "step 3: other weights"


# The distance of two runs


def test_a_checksum_depends_on_every_bit_of_every_dtype():
    for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        one, other = torch.zeros(3, 4, dtype=kind), torch.zeros(3, 4, dtype=kind)
        other[1, 3] = 1
        assert ledger.checksum([one]) == ledger.checksum([one.clone()]) != ledger.checksum([other])
    assert ledger.checksum([torch.tensor(-0.0)]) != ledger.checksum([torch.tensor(0.0)])
    assert ledger.checksum([other.T]) == ledger.checksum([other.T.contiguous()]) != ledger.checksum([other])
    assert ledger.checksum([torch.empty(0), torch.ones(2)]) == ledger.checksum([torch.ones(2)])


def test_the_distance_of_two_runs_is_that_of_their_newest_checkpoints(tmp_path):
    def distance(change):
        here = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for name, how in (("one", dict), ("other", change)):
            checkpoints = saves.new_checkpoints(here / name)
            for step, state in ((3, saves.state(3)), (4, how(saves.state(4)))):
                checkpoints.save(state, {}, step=step)
            checkpoints.close()
        return ledger.distance(here / "one" / "checkpoints", here / "other" / "checkpoints")

    weight, memory = "model.weight", "optim.weight.exp_avg"
    assert distance(dict) == (0.0, [])
    assert distance(lambda state: state | {weight: torch.full((3, 5), 5.0)}) == (0.25, [weight])
    assert distance(lambda state: state | {memory: torch.zeros(3, 5)}) == (0.0, [memory])
    assert distance(lambda state: state | {weight: torch.full((3, 5), math.nan)}) == (math.inf, [weight])
    assert distance(lambda state: state | {weight: torch.zeros(2, 5)}) == (math.inf, [weight])
    assert distance(lambda state: state | {"model.more": torch.zeros(2)}) == (math.inf, ["model.more"])


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
