"""Runs that are refused once their parts are built: data sets, models, folders, other runs, checkpoints to resume."""

import multiprocessing
import socket

import pytest
import runs
import torch
from command_line import tree
from processes import until
from torch.utils.data import Dataset, IterableDataset, Subset

import train
from lib import config
from lib.trainer.trainer import Trainer
from lib.utils.checkpoint import run_folder
from lib.utils.data.tensors import Tensors

FAST = ["-cpu", "1", "-epochs", "1"]
STREAM = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(range(9))})()
WHOLE, EMPTY = Tensors(torch.zeros(4, 1, 8, 8), torch.zeros(4).long()), Tensors(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (STREAM, ["train split is a Stream", "len()"]),
        (Dataset(), ["train split is a Dataset", "len()"]),
        (Subset(WHOLE, torch.arange(4) > 1), ["train split has a Subset of True and False"]),
        (None, ["train split is a NoneType"]),
        ({"train": (WHOLE, WHOLE)}, ["train split is a tuple, not"]),
        ({"training": WHOLE}, ["training", "train is required"]),
        ({"train": WHOLE, "dev": WHOLE}, ["dev", "val, val_NAME and test may be there"]),
        ({"train": WHOLE, "val": EMPTY}, ["val split is empty"]),
    ],
)
def test_a_dataset_of_the_wrong_type_or_size_is_refused(given, parts, error_of):
    with runs.plugins(dataset={"odd": lambda args: given}):
        line = error_of([*FAST, "-dataset", "odd"])
    assert line.startswith("-dataset odd: ") and all(part in line for part in parts)


def test_an_out_of_memory_error_suggests_flags_that_need_less(tmp_path):
    class Hungry(Trainer):
        def training_step(self, batch):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB")

    with runs.plugins(trainer={"hungry": Hungry}), pytest.raises(torch.OutOfMemoryError, match="a smaller -micro"):
        train.main([*FAST, "-trainer", "hungry", "-model", "big", "-out", str(tmp_path)])
    assert "a smaller -micro_batch" in runs.outcome(tmp_path / "big")["reason"]


def test_a_batch_larger_than_the_data_is_refused_with_drop_last(refused):
    said = refused(f"-cpu 1 -batch_size 5000 -drop_last -data {config.ROOT / 'data'}")
    assert "-batch_size 5000 with -drop_last leaves nothing of 1259 training" in said


def test_an_output_folder_that_cannot_be_written_is_refused(error_of, tmp_path):
    file, taken, locked = tmp_path / "file", tmp_path / "taken", tmp_path / "locked"
    file.touch()
    taken.mkdir()
    (taken / "digits_convnet").touch()
    (locked / "digits_convnet" / ".lock").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (file, file / "below" / "it", taken, locked, tmp_path / "loop", tmp_path / ("x" * 300)):
        before = tree(tmp_path)
        line = error_of([*FAST, "-out", str(out)])
        assert line.startswith(f"-out {out} -model digits_convnet: cannot be written (")
        assert tree(tmp_path) == before


def test_a_refused_start_does_not_change_an_existing_run(error_of, tmp_path):
    folder = runs.run(tmp_path / "out", "-cpu 1 -epochs 1 -model old")
    for flags in ("-lr_start 0.5", "-cpu 1 -seed 4", "-arch mlp", "-batch_size 0", "-reset -data nowhere"):
        assert "-" in error_of([*FAST, "-model", "old", *flags.split()])  # which compares all files
    before = [(folder / name).read_bytes() for name in ("config.yaml", "start.json")]
    others = ["-optimizer", "sgd", "-allow_change", "optimizer"]  # which its checkpoint does not fit
    assert train.main([*FAST, "-model", "old", "-out", str(tmp_path / "out"), *others]) == 2
    assert before == [(folder / name).read_bytes() for name in ("config.yaml", "start.json")]


@pytest.fixture
def other(tmp_path):
    flags = f"-cpu 1 -epochs 100000 -save_every 100000epochs -model same -out {tmp_path / 'out'}"
    process = multiprocessing.get_context("fork").Process(target=train.main, args=(flags.split(),))
    process.start()
    until((tmp_path / "out" / "same" / "outcome.json").is_file)
    yield process
    process.kill()
    process.join(60)


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(other, tmp_path, capsys, monkeypatch, caplog):
    out = tmp_path / "out"
    before = runs.outcome(out / "same")
    assert before["state"] == "running" and before["pid"] == other.pid
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    for more in ([], ["-reset"], ["-lr_start", "0.5"], ["-epochs", "3"]):
        assert train.main([*FAST, "-out", str(out), "-model", "same", "-grace_s", "0.1", *more]) == 2
        captured = capsys.readouterr()
        assert len(captured.err.splitlines()) == 1 and not captured.out
        owner = f"{out / 'same'} is in use by host {socket.gethostname()}, "
        assert captured.err.startswith(f"train.py: -model same: {owner}")
        assert f"pid {other.pid}" in captured.err and other.is_alive()
    assert runs.outcome(out / "same") == before and not (out / ".old").exists()

    assert caplog.text.count("waiting up to") == 4
    monkeypatch.setattr(run_folder, "WAIT_S", 60)
    other.kill()  # it ends a little later
    runs.run(out, "-cpu 1 -epochs 1 -model same -reset")
    assert [path.name.partition("-")[0] for path in (out / ".old").iterdir()] == ["same"]
