"""The benchmarks run: what they measure is the trainer as it is."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import compare
import contenders
import peers
import save
import seeding
import starts
import ways

from lib.utils.distributed import World

SMALL = "-dataset random -random_samples 320 -image_size 4 -num_classes 3 -arch mlp -mlp_width 8 -batch_size 32"


def test_the_loops_of_the_benchmark_train(tmp_path):
    case = contenders.Case(SMALL, str(tmp_path), World())
    assert all(contender(case)() > 0 for contender in (contenders.ours, contenders.bare, contenders.template))


def test_every_loop_of_the_comparison_has_a_process_of_its_own_and_one_that_fails_ends_it():
    names = ["Baton", compare.BASE]
    found = peers.measured(SMALL, 1, 1, names)
    assert list(found) == names and all(len(values) == 1 and values[0] > 0 for values in found.values())
    with pytest.raises((EOFError, OSError)):
        peers.measured("-dataset none", 1, 1, names)


@pytest.mark.parametrize("kind", range(3))
def test_the_cost_of_seeds_is_that_of_one_for_each_sample_or_batch_that_is_drawn(kind, monkeypatch):
    counts = {"for_sample": 0, "for_micro_batch": 0}

    def counted(name, real):
        def call(*words):
            counts[name] += 1
            real(*words)

        return call

    for name in counts:
        monkeypatch.setattr(seeding.seeding, name, counted(name, getattr(seeding.seeding, name)))
    change = list(seeding.CASES.values())[kind][1]
    row = seeding.measure(SMALL, change, rounds=1)
    assert row["step_us"] > 0 and math.isfinite(row["share"])
    assert counts == {"for_sample": [0, 20, 640][kind], "for_micro_batch": 20}, "two epochs of 10 steps are seeded"


def test_all_ways_to_save_are_measured(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        rows = save.measure(300_000, 1, tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    assert list(rows) == compare.installed(ways.WAYS)
    assert all(row["total"] > 0 < row["stall"] for row in rows.values())


def test_the_start_of_a_run_and_of_one_that_goes_on_is_timed_beside_the_bare_script(tmp_path):
    starts.main(["-rounds", "1", "-procs", "1", "-only", "Baton", "-json", str(tmp_path / "found.json")])
    tables = [table for title, table in json.loads((tmp_path / "found.json").read_text()).items() if table]
    assert len(tables) == 2 and all(table.keys() == {"Baton", compare.BASE} for table in tables)
    assert all(row["s"] > 0 and row["ratio"] > 0 for table in tables for row in table.values())


@pytest.mark.parametrize("name", [name for name in starts.SCRIPTS if name not in ("Baton", compare.BASE)])
def test_the_script_of_a_peer_goes_on_from_its_own_checkpoint(name, tmp_path):
    if not compare.installed([name]):
        pytest.skip(f"{compare.NEEDS[name]} is not installed")
    assert starts.started(name, 1, tmp_path, last=2, first=1) > 0
    assert starts.started(name, 1, tmp_path, last=3, first=3) > 0, "the first step that it tells of"
