"""Sums over ranks and metrics.jsonl: exact, correct after a resume, and safe on a full disk."""

import json
import math
import multiprocessing
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from disks import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from lib.utils.compat.metrics_tracker import MetricsTracker
from lib.utils.monitoring import metrics


def test_sums_are_exact_for_numbers_and_tensors_of_any_dtype():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    tracker = MetricsTracker()
    for value in values:
        tracker.update({"loss": value, "samples": 3, "correct": (value > 0.5).sum(), "share": float(value)})
    exact = math.fsum(values.tolist())
    assert tracker.local["loss"] == pytest.approx(exact, rel=1e-14)
    totals = tracker.reduce().local
    assert totals["loss"] == pytest.approx(exact, rel=1e-14) == totals["share"]
    assert totals["samples"] == 3000 and totals["correct"] == (values > 0.5).sum()
    assert {type(total) for total in totals.values()} == {float}
    assert metrics.mean(totals, "loss") == pytest.approx(exact / 3000, rel=1e-14)
    assert math.isnan(metrics.mean({}, "loss"))


def test_intervals_add_up_to_epochs_and_nothing_is_counted_twice():
    tracker = MetricsTracker()
    tracker.update({"loss": 1.0}).update({"loss": torch.tensor(2.0)})
    assert tracker.reduce().local == {"loss": 3.0} and tracker.local["never counted"] == 0
    assert tracker.reduce().local == {} and tracker.agg == {"loss": 3.0}
    tracker.update({"loss": 4.0})
    assert tracker.local == {"loss": 4.0} and tracker.reduce().reset_local().local == {}
    assert tracker.agg == {"loss": 7.0}
    tracker.update({"loss": 100.0}).reset_local()
    assert tracker.local == {} and tracker.end_epoch().epoch_reports == [{"loss": 7.0}]
    tracker.update({"loss": 1.0}).reduce()
    other = MetricsTracker().load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert MetricsTracker().load_state_dict({"agg": dict(tracker.agg)}).agg == other.agg == {"loss": 1.0}
    other.update({"loss": 1.0}).reduce()
    assert other.end_epoch().epoch_reports == [{"loss": 7.0}, {"loss": 2.0}] and tracker.agg == {"loss": 1.0}


def test_update_does_not_read_the_value_of_a_tensor_and_keeps_no_graph():
    tracker, weight = MetricsTracker(), torch.ones((), requires_grad=True)
    for _ in range(3):
        tracker.update({"loss": torch.empty((), device="meta")})  # a meta tensor raises as soon as it is read
    tracker.reset_local().update({"loss": weight * 2})
    assert not tracker._local["loss"][0].requires_grad and tracker.reduce().local == {"loss": 2.0}


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e30, 1e30), max_size=30), st.integers(1, 5), st.randoms())
def test_a_sum_has_the_same_bits_in_any_order_and_any_grouping(values, parts, draw):
    shuffled, total = draw.sample(values, len(values)), metrics.Sums()
    for number in range(parts):
        part = metrics.Sums()
        for value in shuffled[number::parts]:
            part.update({"loss": value})
        total.add(json.loads(json.dumps(part.pending())))  # as saved in a checkpoint
    assert total.reduce() == ({"loss": math.fsum(values)} if values else {})


def test_a_long_sum_keeps_few_terms(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_TERMS", 10)
    sums, values = metrics.Sums(), [1e16, 0.1, -1e16, 0.3] * 25
    for value in values:
        sums.update({"loss": torch.tensor(value, dtype=torch.float64)})
        assert len(sums._local["loss"]) <= 10
    assert sums.reduce() == {"loss": math.fsum(values)}


def test_a_sum_that_overflows_or_is_nan_is_no_error():
    sums = metrics.Sums()
    sums.update({"large": 1e308, "opposite": math.inf, "nan": math.nan})
    sums.update({"large": 1e308, "opposite": -math.inf, "nan": 1.0})
    totals = sums.reduce()
    assert totals["large"] == math.inf and math.isnan(totals["opposite"]) and math.isnan(totals["nan"])


def test_a_metric_that_is_not_a_scalar_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'logits'.*\(3,\)"):
        MetricsTracker().update({"logits": torch.ones(3)}).reduce()


def test_two_ranks_with_different_names_and_counts_have_the_same_exact_sums(tmp_path):
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    values = [value for rank in range(2) for value in _values(rank)]
    expected = [
        {"loss": 0.5, "only on 0": 1.0, "samples": 2.0},
        {"loss": 7.0, "nobody's\nbut 1's": 9.0, "samples": 4.0},
        {},
        {"loss": 1.0},
        {"loss": math.inf},
        {"loss": pytest.approx(math.fsum(values), rel=1e-14), "samples": float(len(values))},
    ]
    assert first["intervals"] == expected
    assert first["epoch"]["samples"] == 6.0 + len(values)


def _values(rank):
    return torch.rand(61 + 76 * rank, generator=torch.Generator().manual_seed(rank)).tolist()


def _run_rank(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    tracker, intervals = MetricsTracker(), []
    updates = [
        ([{"loss": torch.tensor(0.5), "samples": 2, "only on 0": 1}], []),
        ([{"loss": 1.0, "samples": 1}], [{"loss": 2.0, "samples": 1}] * 3 + [{"nobody's\nbut 1's": 9}]),
        ([], []),
        ([], [{"loss": torch.tensor(1.0)}]),
        ([{"loss": math.inf}], [{"loss": 0.1}]),
        [[{"loss": torch.tensor(value), "samples": 1} for value in _values(one)] for one in range(2)],
    ]
    for ours in updates:
        for update in ours[rank]:
            tracker.update(update)
        intervals.append(tracker.reduce().local)
    assert math.isnan(MetricsTracker().update({"loss": math.nan if rank else 1.0}).reduce().local["loss"])
    report = {"intervals": intervals, "epoch": tracker.end_epoch().epoch_reports[0]}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


FLOATS = st.one_of(st.floats(-1e30, 1e30), st.sampled_from([1e16, -1e16, 0.1, 2.0**-1074]))
OF_RANKS = st.lists(st.dictionaries(st.sampled_from("abc"), st.lists(FLOATS, max_size=5)), min_size=1, max_size=9)


@settings(deadline=None, derandomize=True)
@given(OF_RANKS)
def test_sums_added_in_pairs_along_a_tree_are_exact(ranks):
    merged = [metrics.Sums() for _ in ranks]
    for sums, values in zip(merged, ranks, strict=True):
        sums.add(values)
    merged, distance = [sums.pending() for sums in merged], 1
    while distance < len(merged):
        for rank in range(0, len(merged) - distance, 2 * distance):
            merged[rank] = metrics.merge(*json.loads(json.dumps([merged[rank], merged[rank + distance]])))
        distance *= 2
    total = metrics.Sums()
    total.add(merged[0])
    names = {name for values in ranks for name in values}
    assert total.reduce() == {name: math.fsum(v for one in ranks for v in one.get(name, [])) for name in names}


def test_five_ranks_have_the_exact_sum_of_each_name(tmp_path):
    draw, size = random.Random(5), 5
    values = [
        {
            f"name {draw.randrange(40)}": [draw.uniform(-1, 1) * 10.0 ** draw.randrange(-20, 20) for _ in range(9)]
            for _ in range(20)
        }
        for _ in range(size)
    ]
    wanted = {}
    for name in {name for one in values for name in one}:
        wanted[name] = math.fsum(value for one in values for value in one.get(name, []))

    def run(rank):
        sums = metrics.Sums()
        sums.add(values[rank])
        pending = sums.pending()
        assert pending == sums.pending()
        assert sums.reduce() == wanted and sums.reduce() == {}

    torch.set_num_threads(1)
    on_ranks(size, run, tmp_path)


def test_a_line_of_metrics_jsonl_is_written_at_once_and_valid_json_even_with_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    figures = {"step": 1, "loss": math.nan, "rate": -math.inf, "name": "é", "on": True}
    metrics.write_line(path.open("a", buffering=1), figures)
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "rate": None, "name": "é", "on": True}


def test_a_resumed_run_truncates_metrics_jsonl_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.truncate_lines(path, 3) == set() and path.read_bytes() == b""
    steps = [b'{"step": %d, "a": 1}\n' % step for step in range(1, 6)]
    whole = b"".join(steps)
    for text, step, kept in (
        (whole + b'{"step": 6, "lo', 3, 3),
        (whole + b'{"step": 6, "lo', 9, 5),  # cut short by a kill
        (whole[:-1], 9, 4),
        (whole + b"\0\0\0", 9, 5),  # after a power failure
        (whole, 0, 0),
    ):
        path.write_bytes(text)
        names = metrics.truncate_lines(path, step)
        assert path.read_bytes() == b"".join(steps[:kept])
        assert names == ({"step", "a"} if step == 3 else set())


def test_a_full_disk_gives_a_warning_and_leaves_no_incomplete_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = path.open("a", buffering=1)
    with full_disk(100):
        for step in range(20):
            metrics.write_line(file, {"step": step})
    metrics.write_line(file, {"step": 20})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 20
    assert f"cannot write {path}" in caplog.text
