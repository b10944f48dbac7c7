"""Batches: an error while one is fetched names the sample, and a batch keeps its form."""

import collections
import contextlib
import functools
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from command_line import usage_error
from items import Items
from processes import ROOT
from torch.utils.data import ConcatDataset, Subset

from lib.utils.data import fetch, tensors
from lib.utils.data.fetch import Fetcher
from lib.utils.data.plan import MicroBatch
from lib.utils.errors import UsageError


def micro_batch(indices):
    return MicroBatch(0, 0, indices, len(indices), step_samples=8, step_parts=1, first=True, last=True)


FAULTS = {  # samples that fail
    5: lambda: 1 // 0,
    13: lambda: None,
    17: Path("nowhere").read_text,
    21: lambda: next(iter([])),  # this StopIteration would end the epoch like the end of the samples
    22: b"\xff".decode,  # an error with five arguments, and a text of its own
    24: lambda: {}["label"],
}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample_that_cannot_be_fetched(workers):
    for indices, message in (
        ([3, 5, 4], r"\(while fetching sample 5\)"),
        ([12, 13], r"NoneType: give the dataset a collate_fn that .*sample \[12, 13\]\)"),
        ([*range(14, 5, -1)], r"sample \[14, 13, 12, 11, 10, 9, \.\.\.\]\)"),
        ([17], r"No such file or directory: .nowhere. \(while fetching sample 17\)"),
        ([21], r"StopIteration.*\(while fetching sample 21\)"),
        ([22], r"UnicodeDecodeError: .*invalid start byte.* \(while fetching sample 22"),
        ([24], r"label.* \(while fetching sample 24"),
    ):
        kind = UsageError if r"sample \[" in message else RuntimeError  # samples that make no batch
        fetcher = Fetcher(Items([FAULTS.get(index, index) for index in range(40)]), 0, workers, pin=False)
        with contextlib.closing(fetcher), pytest.raises(kind, match=f"(?s){message}"):
            next(iter(fetcher(0, [micro_batch(indices)])))


def test_loader_processes_share_no_place_in_a_file_that_was_open_before(tmp_path):
    def read(index):
        file.seek(index)
        time.sleep(0.02)
        return file.read(1)[0]

    (tmp_path / "records").write_bytes(bytes(range(8)))
    with (tmp_path / "records").open("r+b", buffering=0) as file:
        fetcher = Fetcher(Items([functools.partial(read, row) for row in range(8)]), 0, 2, pin=False, collate_fn=list)
        with contextlib.closing(fetcher):
            rows = [batch for _, batch in fetcher(0, [micro_batch([row]) for row in range(8)])]
        assert rows == [[row] for row in range(8)]


def test_answers_in_another_order_and_a_number_of_samples_that_set_epoch_changes_are_refused():
    part = Items([*range(8)])
    fetcher = Fetcher(part, 0, 0, pin=False)
    fetcher.loader = type("Mixed", (list,), {"num_workers": 2})([(micro_batch([1]), 1)])
    assert "answer in another order" in usage_error(next, fetcher(0, [micro_batch([0])]))
    part.set_epoch = lambda epoch: part.items.extend([8] * epoch)
    fetcher = Fetcher(Items(part.items, parts={"a": part}), 0, 0, pin=False)  # in which it is found
    next(fetcher(0, [micro_batch([1])]))
    assert "set_epoch(2) changes the number of samples, 8 before" in usage_error(next, fetcher(2, [micro_batch([1])]))
    assert "a dataset of 8 samples has 10 now" in usage_error(next, fetcher(0, [micro_batch([1])])), "by a trainer"


def test_tensors_in_a_batch_of_any_form_go_to_the_device():
    Pair, Own = collections.namedtuple("Pair", "image label"), type("Own", (dict,), {})
    one, graph = torch.ones(2), types.SimpleNamespace(to=str)
    assert tensors.to_device([graph], torch.device("meta")) == ["meta"]
    batch = {"pair": Pair(one, [one, (one, "name")]), "own": Own(x=one), "mapping": collections.UserDict(x=one)}
    now = tensors.to_device(batch, torch.device("meta"))
    moved = [name for name, tensor in tensors.named_tensors(now) if tensor.is_meta]
    assert moved == ["pair.0", "pair.1.0", "pair.1.1.0", "own.x", "mapping.x"]
    assert type(now["pair"]) is Pair and type(now["pair"].label) is list and now["pair"].label[1][1] == "name"


def test_the_page_lists_all_optional_attributes_of_a_dataset():
    page = (ROOT / "docs" / "extending.md").read_text()
    attributes = page.partition("These attributes are optional")[2].partition("`draws`, ")[0]
    listed = set(re.findall(r"^- `(\w+)", attributes, re.M))
    code = "".join(file.read_text() for file in Path(fetch.__file__).parent.glob("*.py"))
    assert listed >= set(re.findall(r'option\(.*, "(\w+)"', code)) >= {"on_device", "classes", "log_lines"}


def test_a_part_of_a_dataset_has_the_attributes_of_the_whole_and_its_own():
    part = Subset(Subset(tensors.Tensors(torch.zeros(4), on_device=len, classes="ab"), [0, 1]), [1])
    assert fetch.gives_batches(part) and fetch.option(part, "on_device") is len
    part.on_device, part.set_epoch = max, len
    assert fetch.option(part, "on_device") is max and fetch.option(part, "classes") == "ab"
    assert not fetch.gives_batches(Subset([1, 2], [0])) and not fetch.option([1], "classes", False)
    own = type("Own", (tensors.Tensors,), {"__getitem__": lambda self, index: index})(torch.zeros(2))
    assert next(Fetcher(Subset(own, [1]), 0, 0, pin=False)(0, [micro_batch([0])]))[1] == 1, "its own is called"
    assert fetch.option(ConcatDataset([part, part]), "on_device") is max
    assert "different on_device" in usage_error(fetch.option, ConcatDataset([part, own]), "on_device")
    for around in (Items([1], inner=(part,)), Items([1], inner=part)):
        assert "wraps a Subset, whose on_device would not" in usage_error(fetch.option, around, "on_device")
    around.on_device = None
    whole = type("Whole", (tensors.Tensors,), {"collate_fn": staticmethod(len)})(torch.zeros(2))
    assert next(Fetcher(whole, 0, 0, pin=False)(0, [micro_batch([0, 1])]))[1] == 2
    assert fetch.option(around, "on_device") is None and fetch.Fetch(around, 0).by_epoch == [part]


KILLED_AS_ITS_WORKER_STARTS = """
import os, torch
from lib.utils.data import fetch
def kill_parent(*_, parent=os.getpid()):  # in place of what torch calls first in a worker, and `begin_worker` last
    os.kill(parent, 9)
    while os.getppid() == parent: pass
    return {}
PLACE = kill_parent
fetch.Fetcher(torch.zeros(2), 0, workers=1, pin=False)
"""


@pytest.mark.parametrize("place", ["torch.set_num_threads", "fetch.files_to_read"])
def test_a_worker_whose_parent_is_killed_while_it_starts_ends(place):
    command = [sys.executable, "-c", KILLED_AS_ITS_WORKER_STARTS.replace("PLACE", place)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == -9, "else pipes stay open"
