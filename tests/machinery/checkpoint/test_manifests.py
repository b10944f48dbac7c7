"""Manifests of other versions of the code or of an attacker are refused, and nothing in them is executed."""

import re

import pytest
import saves
import torch
from runs import run
from safetensors.torch import load_file, save_file
from saves import SMALL, names

from lib.core import optimizer as optimizers
from lib.utils.checkpoint import shards, state

pytestmark = pytest.mark.usefixtures("small_plugins")


# Formats


def test_a_newer_format_is_refused_with_its_version_and_stays_in_place(copy, refused):
    before = names(copy)
    saves.change_manifest(copy / "checkpoints" / before[0], lambda manifest: {**manifest, "format": 9})
    line = refused(f"{SMALL} -cpu 2 -model few_norm_net", out=copy.parent)
    assert "is of format 9" in line and f"reads format {state.FORMAT}" in line
    assert names(copy) == before


def test_checkpoints_with_values_that_are_not_finite_are_refused_unless_allowed(copy, refused):
    newest = copy / "checkpoints" / names(copy)[0]
    for shard in newest.glob("shard_*"):
        tensors = load_file(shard)
        if "model.5.bias" in tensors:
            tensors["model.5.bias"][2] = float("inf")
            save_file(tensors, shard)
            facts = {"bytes": shard.stat().st_size, "crc32": shards.zlib.crc32(shard.read_bytes())}
            saves.change_manifest(newest, lambda m, f=facts, s=shard: {**m, "shards": {**m["shards"], s.name: f}})
    for cpu in (1, 2):
        line = refused(f"{SMALL} -cpu {cpu} -model few_norm_net", out=copy.parent)
        assert "5.bias" in line and "not finite" in line and "-allow_change nan" in line
    run(copy.parent, f"{SMALL} -cpu 2 -model few_norm_net -allow_change nan")


class Odd(torch.optim.SGD):
    """Has a number in a group that no file can hold."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.param_groups[0]["odd"] = object()


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(refused, monkeypatch):
    monkeypatch.setitem(optimizers.BY_NAME, "odd", Odd)
    assert "optim.groups.0.odd is a object" in refused(f"{SMALL} -optimizer odd")


# Manipulated files


FILE = "shard_0000.safetensors"


def test_files_with_a_valid_checksum_and_wrong_content_are_passed_over_and_no_code_is_executed(copy, tmp_path):
    newest, before = (copy / "checkpoints" / name for name in names(copy)[:2])
    mark, shard = tmp_path / "mark", newest / FILE
    for write in (
        lambda: saves.payload(shard, mark),
        lambda: torch.save({"model.1.weight": saves.Payload(mark)}, shard),
        lambda: save_file({"other": torch.ones(3)}, shard),
        lambda: shard.write_bytes((2**60).to_bytes(8, "little") + b"{}"),
    ):
        write()
        facts = {"bytes": shard.stat().st_size, "crc32": shards.zlib.crc32(shard.read_bytes())}
        saves.change_manifest(newest, lambda m, f=facts: {**m, "shards": {**m["shards"], FILE: f}})
        past = saves.found(copy)
        assert past.folder == before and re.search("header|its files lack a part of model", past.damaged[0])
    assert not mark.exists()
