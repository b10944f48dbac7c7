"""Sums over ranks, F1, speed and metrics.jsonl: exact, correct after a resume, and safe on a full disk."""

import json
import math
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from sklearn.metrics import f1_score
from torch import nn
from truth import measured

from lib.core.loss import CrossEntropy
from lib.utils.checkpoint.state import State
from lib.utils.compat.metrics_tracker import MetricsTracker
from lib.utils.monitoring import metrics, throughput


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


def test_a_tensor_counts_with_its_value_when_it_comes_and_a_sum_that_overflows_or_is_nan_is_no_error():
    sums, value = metrics.Sums(), torch.ones(())
    assert [sums.update({"scale": value}) and value.add_(1).item() for _ in range(3)] == [2.0, 3.0, 4.0]
    sums.update({"large": 1e308, "opposite": math.inf, "nan": math.nan})
    sums.update({"large": 1e308, "opposite": -math.inf, "nan": 1.0})
    totals = sums.reduce()
    assert (
        totals["scale"] == 6.0
        and totals["large"] == math.inf
        and math.isnan(totals["opposite"])
        and math.isnan(totals["nan"])
    )


def test_two_ranks_with_different_names_and_counts_have_the_same_exact_sums(tmp_path):
    on_0, on_1 = {"loss": torch.tensor(1.0), "samples": 1, "only on 0": 1}, {"loss": 2.0, "samples": 1}
    sums = {"loss": 7.0, "nobody's\nbut 1's": 9.0, "only on 0": 1.0, "samples": 4.0}
    intervals = [  # the updates of each rank, and the sums
        ([on_0], [on_1, on_1, on_1, {"nobody's\nbut 1's": 9}], sums),
        ([], [], {}),
        ([], [{"loss": torch.tensor(1.0)}], {"loss": 1.0}),
        ([{"loss": math.inf}], [{"loss": 0.1}], {"loss": math.inf}),
    ]

    def run(rank):
        tracker = MetricsTracker()
        for *updates, wanted in intervals:
            for update in updates[rank]:
                tracker.update(update)
            assert tracker.reduce().local == wanted
        assert math.isnan(MetricsTracker().update({"loss": math.nan if rank else 1.0}).reduce().local["loss"])
        assert tracker.end_epoch().epoch_reports[0]["samples"] == 4.0

    on_ranks(2, run, tmp_path)


def test_a_line_of_metrics_jsonl_is_written_at_once_and_valid_json_even_with_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    figures = {"step": 1, "loss": math.nan, "rate": -math.inf, "name": "é", "on": True}
    metrics.write_line(path.open("a", buffering=1), figures)
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "rate": None, "name": "é", "on": True}


def test_a_resumed_run_truncates_metrics_jsonl_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.truncate_lines(path, 3) == set() and path.read_bytes() == b""
    steps = [b'{"samples": %d, "a": 1}\n' % step for step in range(1, 6)]
    whole = b"".join(steps)
    for text, step, kept in (
        (whole + b'{"samples": 6, "lo', 3, 3),
        (whole + b'{"samples": 6, "lo', 9, 5),  # cut short by a kill
        (whole[:-1], 9, 4),
        (whole + b"\0\0\0", 9, 5),  # after a power failure
        (whole, 0, 0),
    ):
        path.write_bytes(text)
        names = metrics.truncate_lines(path, step)
        assert path.read_bytes() == b"".join(steps[:kept])
        assert names == ({"samples", "a"} if step == 3 else set())


def test_a_full_disk_gives_a_warning_and_leaves_no_incomplete_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = path.open("a", buffering=1)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))  # later writes are cut short, as on a full disk
    try:
        for step in range(20):
            metrics.write_line(file, {"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    metrics.write_line(file, {"step": 20})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 20 and f"cannot write {path}" in caplog.text


def test_long_sums_keep_few_terms_and_a_ratio_of_vectors_is_the_mean_of_what_is_counted(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_TERMS", 3)
    sums, values, parts = metrics.Sums(), [1e16, 0.1, -1e16, 0.3] * 5, torch.randint(9, (20, 2, 5))
    parts[:, :, 3] = 0  # a class that does not occur
    for value, part in zip(values, parts, strict=True):
        sums.update({"mean": metrics.Ratio(value, 0.5), "recall": metrics.Ratio(*part)})
        assert len(sums.terms["mean"]) <= 3 >= len(sums.terms.get("recall", []))
    hits, counts = parts.sum(0).double()
    recall = (hits[counts > 0] / counts[counts > 0]).mean().item()
    assert metrics.means(sums.reduce()) == {"mean": math.fsum(values) / 10, "recall": pytest.approx(recall)}
    assert all(metrics.new_best(None, {one: 2.0}, one, 1)["score"] == -2.0 for one in ("RMSE", "brier", "val/kl_div"))
    none = metrics.Sums().update({"mean": metrics.Ratio(0, 0), "recall": metrics.Ratio(*torch.zeros(2, 3))})
    assert all(math.isnan(value) for value in metrics.means(none.reduce()).values())


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("classes", [12, 17, 100])
def test_f1_is_that_of_scikit_learn_for_labels_of_any_type(kind, classes):
    targets = torch.randint(classes - 1, (3 * classes,))  # no sample is of the last class
    outputs = torch.randn(len(targets), classes) + 3 * nn.functional.one_hot(targets, classes)
    parts = [(outputs[part], targets[part].to(kind)) for part in (slice(0, 7), slice(7, None))]
    assert measured(CrossEntropy(), (torch.rand(3, 1), torch.rand(3))) == {}, "a regression's"
    for loss, counted in ((CrossEntropy(), targets >= 0), (CrossEntropy(ignore_index=2), targets != 2)):
        truth = f1_score(targets[counted], outputs[counted].argmax(1), average="macro")
        assert measured(loss, *parts)["f1"] == pytest.approx(truth)


def test_speed_data_share_and_time_left_are_computed_from_the_clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])
    state = State(step=4, samples=36)
    rate = throughput.Throughput(24, state, torch.device("cpu"))
    for samples, left_s in ((36, 16 * 8 / 4), (32, 12 * 19 / 8)):  # of two epochs
        for _ in rate.time_data_loading(clock.append(clock.pop() + 0.5) for _ in range(4)):
            clock[0] += 1.5
            state.step += 1
        state.samples += samples
        figures = {"samples_per_s": samples / 8, "data_share": 0.25, "left_s": left_s}
        assert rate.interval(state).items() >= figures.items()
        clock[0] += 3  # an evaluation
