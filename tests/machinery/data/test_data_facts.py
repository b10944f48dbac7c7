"""A run knows its data, and what its first start settled, also if it is killed before its first save."""

import dataclasses
import datetime
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import parsed, usage_error
from items import Items
from PIL import Image
from runs import few, plugins, run, same_tensors, weights
from saves import SMALL, log_of, names, refused, run_until
from torch.utils.data import ConcatDataset, Subset, default_collate, get_worker_info

from lib.trainer import trainer
from lib.utils.checkpoint import resume
from lib.utils.data import fingerprint, plan
from lib.utils.data.tensors import Tensors
from lib.utils.distributed import World

pytestmark = pytest.mark.usefixtures("small_plugins")
ODD = SMALL.replace("-dataset few", "-dataset odd")


def describe(part, flags=""):
    return fingerprint.describe({"train": part}, parsed(f"-cpu 1 {flags}"), World())


def changed(part, other):
    before, now = describe(part), describe(other)
    return [name for name in now if before[name] != now[name]]


@dataclasses.dataclass(slots=True)
class Slots:
    """A sample without attributes in a dict."""

    value: torch.Tensor


class Graph:
    """A sample of a library of its own, with a way back to itself."""

    def __init__(self, value):
        self.names, self.edges, self.whole = {"a", "b", "c"}, torch.tensor(value), self


ROWS = torch.arange(50.0)
KINDS = {
    "tensors": lambda number: (ROWS[:3] + number, number),
    "half": lambda number: (ROWS[:3].bfloat16() + number, torch.tensor(number)),
    "strides": lambda number: (ROWS.view(5, 10)[number % 5 : number % 5 + 1, number], ROWS[number].expand(1)),
    "dicts": lambda number: {"image": np.full((2, 2), number, np.uint8), "labels": number},
    "images": lambda number: (Image.new("L", (4, 4), number), number),
    "texts": lambda number: (f"text {number}", b"1" * number),
    "objects": lambda number: (np.array([number, "a"], object), [number, None]),
    "nested": lambda number: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), number + 0.5)]),
    "sparse": lambda number: (torch.full((2, 2), number + 1).to_sparse(), number),
    "objects of a library": Graph,
    "sets": lambda number: {f"{number}", "b"},
    "slots": lambda number: Slots(torch.tensor(number)),
    "times": lambda number: (datetime.datetime(2026, 1, 1 + number), number),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_another_first_middle_or_last_sample_is_other_data(kind):
    items = [kind(number) for number in range(9)]
    assert changed(Items(items), Items([kind(number) for number in range(9)])) == []
    for place in (0, 4, 8):
        other = [kind(7) if number == place else one for number, one in enumerate(items)]
        assert changed(Items(items), Items(other)) == ["train digest"]
    assert changed(Items(items), Items([*items, kind(8)])) == ["train digest", "samples"]


@pytest.mark.parametrize("names", [["b", "a"], ["b"], ["a", "b", "c"]])
def test_classes_that_another_split_numbers_otherwise_are_refused(names):
    parts = {name: Tensors(ROWS, classes=["a", "b"]) for name in ("train", "val")}
    parts["val_few"] = Tensors(ROWS, classes=["a"])
    fingerprint.describe(parts, parsed("-cpu 1"), World())
    parts["val"].classes = names
    for some in (parts, {name: Items([1], of=[part]) for name, part in parts.items()}):
        assert "the classes of val are " in usage_error(fingerprint.describe, some, parsed("-cpu 1"), World())


def test_a_fingerprint_of_its_own_counts_in_place_of_samples():
    one, same, other = (Items([1, None, 3], fingerprint=name) for name in ("a", "a", "b"))
    same.items = ["never read"] * 3
    assert changed(one, same) == changed(Subset(one, [0, 2]), Subset(same, [0, 2])) == []
    assert changed(one, other) == ["train digest"]
    for classes, wanted in (("ab", ["a", "b"]), (np.array(["a", "b"]), ["a", "b"]), (5, [])):
        assert describe(Subset(Items([1], classes=classes), [0]))["classes"] == wanted
        joined = ConcatDataset([Items([1], classes=classes), Items([2], classes=tuple(wanted)), Items([3])])
        assert describe(Subset(joined, [0, 1]))["classes"] == wanted
    assert "different classes" in usage_error(describe, ConcatDataset([Items([1], classes=c) for c in ("ab", "ba")]))
    assert changed(Items([1, 2], fingerprint=len), Items([1, 2], fingerprint=len)) == [], "a method is none"


def test_each_row_in_memory_the_listing_of_files_and_how_an_epoch_is_cut_are_known_again(monkeypatch):
    """Next to three samples."""
    for kind in (lambda row: Tensors(ROWS[:, None], row == ROWS), lambda row: Items([1, 2], listing=row)):
        one, same, other = map(kind, (3, 3, 4))
        assert changed(one, other) == ["train files digest"] and changed(one, same) == []
        assert changed(ConcatDataset([one, one]), ConcatDataset([one, other])) == ["train files digest"]
    before = describe(one)["steps digest"]
    monkeypatch.setattr(plan.Plan, "steps", property(lambda self: min(10, -(-self.samples // self.batch))))
    assert describe(one)["steps digest"] != before


def draw():
    """A sample that the usual generators draw."""
    return random.random(), np.random.random(), torch.rand(300, 300).sum()


PARTS = {"draws": Items([draw] * 7), "whole": Tensors(ROWS, ROWS), "items": Items([(1, 2)] * 5)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_facts_are_the_same_with_any_number_of_loader_processes_and_do_not_depend_on_generators(part):
    wanted = describe(part, "-workers 0")
    torch.manual_seed(5)
    random.seed(5)
    assert wanted == describe(part, "-workers 2") == describe(part, "-workers 0 -val_workers 1")
    assert wanted == describe(part, "-workers 0 -threads 2")


def test_samples_that_differ_each_time_they_are_read_are_named_at_the_start(tmp_path):
    own = torch.Generator()
    read = lambda *_: (torch.rand(64, generator=own), 1)  # noqa: E731
    val = Items([(torch.ones(64), 1)] * 20, collate_fn=lambda items: default_collate([*map(read, items)]))
    part = {"train": Items([read] * 20), "val": val}
    part["val_few"] = Items([lambda: (torch.full((64,), getattr(get_worker_info(), "id", 0.0) + 0.0), 1)] * 20)
    rows = torch.ones(20, 64)  # in which reading makes holes
    part["val_holes"] = Items([lambda row=row: (row.index_fill_(0, torch.randint(64, (9,)), 0), 1) for row in rows])
    with plugins(dataset={"own": lambda args: part}):
        folder = run(tmp_path, "-dataset own -arch mlp -epochs 1 -cpu 2 -workers 2")
    for split in part:
        assert f"what {split} gives differs each time it is read: no resume is exact" in log_of(folder)


def test_a_folder_of_the_data_that_moved_changes_nothing(tmp_path):
    def at(folder):
        paths = [{"file": str(folder / f"{number}.png"), "path": folder / "x"} for number in range(3)]
        return Items([{**one, "text": "the data is good data", "number": 0.25} for one in paths])

    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "b").mkdir()
    one = describe(at(tmp_path / "a"), f"-data {tmp_path / 'a'}")
    for place, given in (("b", "b"), ("b", "link"), ("link", "link")):
        for end in ("", "/"):
            assert one == describe(at(tmp_path / place), f"-data {tmp_path / given}{end}")


def other_labels(args):
    parts = few(args)
    inputs, labels = parts["train"].tensors
    return {**parts, "train": Tensors(inputs, (labels + 1) % 4)}


def named(*classes):
    return lambda args: {name: Tensors(*part.tensors, classes=classes) for name, part in few(args).items()}


CHANGES = {
    "labels": (few, other_labels, "train digest was "),
    "val": (few, lambda args: {**few(args), "val": few(args)["train"]}, "val samples was 13 and is 50"),
    "no val": (few, lambda args: {"train": few(args)["train"]}, "val digest was "),
    "classes": (named("a", "b"), named("b", "a"), "classes was ['a', 'b'] and is ['b', 'a']"),
}


@pytest.mark.parametrize(("first", "then", "message"), CHANGES.values(), ids=CHANGES)
def test_a_run_on_other_data_is_refused_like_a_changed_flag(first, then, message, tmp_path, capfd):
    with plugins(dataset={"odd": first}):
        folder = run(tmp_path, f"{ODD} -cpu 2 -limit_steps 4", wanted=75)
        before = (folder / "outcome.json").read_bytes()
    with plugins(dataset={"odd": then}):
        line = refused(tmp_path, f"{ODD} -cpu 1", capfd)
        assert message in line and "-allow_change data" in line and before == (folder / "outcome.json").read_bytes()
        run(tmp_path, f"{ODD} -cpu 1 -allow_change data")
        assert message in log_of(folder)
        run(tmp_path, f"{ODD} -cpu 2")  # the new data are the run's data from now on


def test_a_best_value_counts_no_more_once_the_validation_data_are_others():
    args, one, other = parsed("-allow_change data"), {"samples": 50, "val digest": "a"}, {"val_b digest": "b"}
    both, new = {**one, **other}, {**one, "val digest": "c"}
    stays, ends = [("loss", one, both), ("val/loss", both, one)], [("loss", one, new), ("loss", both, other)]
    for metric, before, after in stays + ends:
        past = resume.Past(Path("x"), {"state": {"best": {"metric": metric}}}, [], 0, {})
        then, now = (resume.plan(args, {"samples": 50, **data}, World(), {}) for data in (before, after))
        resume.check_flags(args, now, past, resume.config_to_save(args, then), {"val": []})
        assert bool(past.manifest["state"]["best"]) == ((metric, before, after) in stays)


def test_another_version_of_a_library_is_named_as_what_may_have_changed_the_samples(tmp_path, capfd, monkeypatch):
    with plugins(dataset={"odd": few}):
        folder = run(tmp_path, f"{ODD} -limit_steps 4", wanted=75)
    monkeypatch.setattr(resume.metadata, "version", lambda name: "99.0")
    with plugins(dataset={"odd": other_labels}):
        line = refused(tmp_path, ODD, capfd)
        assert "pillow was " in line and "train digest was " in line and "-allow_change pillow" not in line
    with plugins(dataset={"odd": few}):
        run(tmp_path, ODD)
        assert "and is 99.0" in log_of(folder), "the same pixels: said, and continued"


# A first start that is killed before its first save


def killed(out, flags):
    """Run until step 3 as if it was killed there: no checkpoint, no outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "save", lambda *_, **__: None)
        folder = run_until(out, flags, 3)
    assert not names(folder)
    (folder / "outcome.json").unlink()
    return folder


FREE = SMALL.replace("-batch_size 16 -micro_batch 4", "")


@pytest.mark.parametrize(("flags", "settled"), [("-batch_size 16", (16, 8)), ("-batch_per_gpu 6", (12, 6))])
def test_numbers_that_a_killed_first_start_settled_are_kept_but_not_of_a_failed_one(
    flags, settled, tmp_path, monkeypatch
):
    folder = killed(tmp_path, f"{FREE} {flags} -cpu 2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run(tmp_path, f"{FREE} {flags} -cpu 1")
    start = json.loads((folder / "start.json").read_text())
    assert (start["batch_size"], start["micro_batch"], start["threads"]) == (*settled, 1)
    whole = run(tmp_path, f"{FREE} -cpu 1 -threads 1 -batch_size {settled[0]} -micro_batch {settled[1]} -model whole")
    assert same_tensors(weights(folder), weights(whole))
    killed(tmp_path, f"{FREE} -batch_size 16 -cpu 1 -threads 1 -reset")
    assert json.loads((folder / "start.json").read_text())["micro_batch"] == 16
    (folder / "outcome.json").write_text('{"state": "failed"}')
    run(tmp_path, f"{FREE} -batch_size 32 -cpu 1 -limit_steps 1", wanted=75)
    assert json.loads((folder / "start.json").read_text())["micro_batch"] == 32, "one that failed settles nothing"


def test_other_data_before_the_first_save_are_said_and_taken_and_of_an_evaluation_said(tmp_path, capfd):
    changed_since = "changed since the run began: train digest was"
    with plugins(dataset={"odd": few}):
        folder = killed(tmp_path, ODD)
    with plugins(dataset={"odd": other_labels}):
        run(tmp_path, ODD)
        assert changed_since in log_of(folder) and changed_since in capfd.readouterr().out
        run(tmp_path, f"{ODD} -eval")
    with plugins(dataset={"odd": few}):
        assert changed_since not in capfd.readouterr().out
        run(tmp_path, f"{ODD} -eval")
        assert changed_since in capfd.readouterr().out
