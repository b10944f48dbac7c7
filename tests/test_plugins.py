"""Checks the contract of every plugin, that is of each file in lib/arch, lib/dataset and lib/trainer."""

import argparse
import importlib
import inspect
import pickle
import sys

import numpy as np
import pytest
import runs
import tiny_data
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

import train
from lib import config
from lib.config import flags, plugins
from lib.core import loss
from lib.trainer.trainer import Trainer
from lib.utils import seeding
from lib.utils.checkpoint import run_folder
from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError

ARCHS, DATASETS = plugins.names("arch"), plugins.names("dataset")
# The template's plugins follow its conventions, and each arch works with each dataset. Your own need not: a dataset
# is tried with the arch and trainer that it sets, an arch and a trainer with the digits.
WITH_THE_TEMPLATE = {
    "arch": ["convnet", "gpt", "mlp", "resnet"],
    "dataset": ["digits", "fake", "folder", "tar", "tokens"],
    "trainer": ["ema", "trainer"],
}
PLUGINS = [(kind, name) for kind in config.BUILDERS for name in plugins.names(kind)]
SHIPPED = {kind: [name for name in names if (kind, name) in PLUGINS] for kind, names in WITH_THE_TEMPLATE.items()}
SMALL = {  # flags that make a shipped dataset small
    "fake": ["-fake_samples", "3", "-image_size", "32", "-num_classes", "5"],
    **{name: ["-image_size", "32"] for name in ("folder", "tar")},
    "tokens": ["-tokens_length", "16", "-tokens_samples", "40"],
}


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_a_plugin_has_its_builder_and_sets_defaults_of_existing_flags_only(kind, name):
    module, builder = module_of(name, kind), config.BUILDERS[kind]
    inspect.signature(getattr(module, builder)).bind(*range(7 if kind == "trainer" else 1))

    parser = argparse.ArgumentParser(add_help=False)
    getattr(module, "add_args", lambda _: None)(parser)
    for action in parser._actions if name in SHIPPED[kind] else ():
        assert all(flag.startswith(f"-{name}_") for flag in action.option_strings), "-NAME_... cannot clash"
        assert action.help and action.dest == action.option_strings[0][1:]

    shared = argparse.ArgumentParser(add_help=False)
    flags.add_shared(shared)
    assert {*parser._defaults} <= {action.dest for one in (parser, shared) for action in one._actions}, "no flags"


@pytest.mark.parametrize("name", SHIPPED["dataset"])
def test_the_splits_and_items_of_a_shipped_dataset_are_consistent(name, tmp_path, monkeypatch):
    args, parts = make_splits(name, tmp_path, monkeypatch)
    torch.manual_seed(1)
    again = loader.splits(module_of(name).get_dataset(args), name)
    for split, part in parts.items():
        assert len(part) == len(again[split]) > 0
        first, last = seeded_item(part, 0), seeded_item(part, len(part) - 1)
        check_item(first, last, args)
        assert same(first, seeded_item(part, 0)), "an item may draw from the global generators only"
        assert same(first, seeded_item(again[split], 0)), "another process builds the same dataset"
        copy = pickle.loads(pickle.dumps(part))  # as loader processes receive it if there is no fork
        assert len(copy) == len(part) and same(first, seeded_item(copy, 0))
        if hasattr(part, "__getitems__"):
            check_batch(part.__getitems__([len(part) - 1, 0]), default_collate([last, first]))


def check_item(first, last, args):
    """Check an item of a shipped dataset: a tensor and a class, or classes, as the flags say."""
    assert len(first) == 2 and torch.is_tensor(first[0]) and first[0].shape == last[0].shape
    assert first[0].ndim != 3 or first[0].shape == (args.channels, args.image_size, args.image_size)
    classes = torch.as_tensor(first[1])
    assert args.loss != "cross_entropy" or (classes.min() >= 0 and classes.max() < args.num_classes)


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_trains_a_step_with_the_plugins_that_it_sets(name, tmp_path, monkeypatch):
    make_splits(name, tmp_path, monkeypatch)
    flags = [*flags_for(name, tmp_path), *"-cpu 1 -limit_steps 1 -batch_size 2 -out".split(), str(tmp_path / "out")]
    if name not in SHIPPED["dataset"]:
        try_run(flags)
    assert train.main(flags) in (0, 75)


@pytest.mark.parametrize("arch", [name for name in ARCHS if name not in SHIPPED["arch"]])
def test_an_arch_of_a_fork_trains_a_step_on_digits_or_is_skipped(arch, tmp_path):
    try_run(f"-arch {arch} -cpu 1 -limit_steps 1 -out {tmp_path}".split())


@pytest.mark.parametrize("name", SHIPPED["dataset"])
@pytest.mark.parametrize("arch", SHIPPED["arch"])
def test_a_shipped_arch_learns_from_a_dataset_or_refuses_it_in_one_line(arch, name, tmp_path, monkeypatch):
    args, parts = make_splits(name, tmp_path, monkeypatch)
    samples = loader.Loader(
        parts["train"], Plan(len(parts["train"]), 2, 2), World(), seed=args.seed, shuffle=args.shuffle, workers=0
    )
    _, (inputs, targets) = next(samples.epoch(0))
    if inputs.ndim != 4 and arch != args.arch:
        return  # data that are no images only work with the dataset's own arch
    own, args = args.arch, config.parse_args([*flags_for(name, tmp_path), "-arch", arch])
    try:
        model = module_of(arch, "arch").get_model(args)
        outputs = model(inputs)
    except (UsageError, RuntimeError) as error:  # or torch's own line: other channels, or no numbers of tokens
        assert "\n" not in str(error) and arch != own
        return
    assert outputs.shape == (2, *(targets.shape[1:] if targets.dtype == torch.int64 else ()), args.num_classes)
    loss.get_loss(args)(outputs, targets).backward()
    for parameter, values in model.named_parameters():
        assert not values.requires_grad or (values.grad is not None and values.grad.isfinite().all()), parameter


@pytest.mark.parametrize("name", plugins.names("trainer"))
def test_a_trainer_resumes_after_a_stop_with_the_same_bits(name, tmp_path):
    command = f"-cpu 1 -trainer {name} -epochs 2 -batch_size 256 -micro_batch 128 -model"
    if name not in SHIPPED["trainer"]:
        try_run(f"{command} trial -out {tmp_path}".split())
    runs.run(tmp_path, f"{command} parts -limit_steps 3", wanted=75)
    assert runs.distance(*[runs.run(tmp_path, f"{command} {model}") for model in ("parts", "whole")]) == 0


def try_run(flags):
    """Skip the test if this run of a fork's own file fails, which no test of the template judges."""
    try:
        code = train.main(flags)
    except Exception as error:  # code for other data may raise anything
        code = error
    if code not in (0, 75):
        pytest.skip(f"it is for other data: {code}")


def module_of(name, kind="dataset"):
    return importlib.import_module(f"lib.{kind}.{name}")


def make_splits(name, folder, monkeypatch):
    """The args and splits of a dataset, over data made for it; skips the test if it needs other data."""
    getattr(tiny_data, f"make_{name}", lambda *_: None)(folder, monkeypatch)
    try:
        args = config.parse_args(flags_for(name, folder))
        return args, loader.splits(module_of(name).get_dataset(args), name)
    except Exception as error:
        if name in SHIPPED["dataset"]:
            raise
        pytest.skip(f"needs data of its own: {error}")


def flags_for(name, path):
    return ["-dataset", name, "-data", str(config.ROOT / "data" if name == "digits" else path), *SMALL.get(name, [])]


def check_batch(batch, items):
    batch = default_collate(batch) if isinstance(batch, list) else batch
    assert [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in items]
    assert same(batch, items)


def seeded_item(dataset, index, seed=0):
    seeding.seed(seeding.SAMPLE, seed, 0, index)
    return dataset[index]


def same(items, others):
    pairs = zip(tree_leaves(items), tree_leaves(others), strict=True)
    return all(torch.equal(x, torch.as_tensor(y)) if torch.is_tensor(x) else np.array_equal(x, y) for x, y in pairs)


class QuitsInAStep(Trainer):
    def training_step(self, batch):
        if self.world.is_main:
            sys.exit(0)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("kind", "quits", "flags", "call"),
    [
        ("dataset", lambda args: argparse.ArgumentParser().parse_args(["of others"]), "-cpu 2", "sys.exit(2)"),
        ("arch", lambda args: sys.exit(0), "-cpu 1", "sys.exit(0)"),
        ("trainer", QuitsInAStep, "-cpu 2", "sys.exit(0)"),
    ],
    ids=["dataset", "arch", "trainer"],
)
def test_a_plugin_that_calls_sys_exit_fails_the_run(kind, quits, flags, call, tmp_path, capfd):
    with runs.plugins(**{kind: {"quits": quits}}):
        try:
            code = train.main(f"-{kind} quits {flags} -model run -out {tmp_path}".split())
            message = capfd.readouterr().err
        except RuntimeError as error:  # with one process the error is raised here
            code, message = 1, str(error)
    assert code == 1 and f"{call} was called" in message
    if kind == "trainer":  # the run had begun
        outcome = run_folder.read_json(tmp_path / "run" / "outcome.json")
        assert outcome["state"] == "failed" and outcome["reason"].startswith("rank 0: ") and call in outcome["reason"]


def test_random_numbers_are_uniform_and_depend_only_on_the_sample():
    draws = seeding.uniform(3, 5, list(range(20_000)))
    assert draws.shape == (20_000, 8) and draws.dtype == torch.float32 and draws.min() >= 0 and draws.max() < 1
    for column in draws.T:
        assert (torch.histc(column, 20, 0, 1) - 1000).abs().max() < 150  # five standard deviations
    assert np.abs(np.corrcoef(np.concatenate([draws.T, draws.roll(1, 0).T])) - np.eye(16)).max() < 0.04
    some = [7, 19_999, 0, 7]
    assert torch.equal(seeding.uniform(3, 5, some), draws[some])
    for other in ((4, 5), (3, 6)):
        assert (seeding.uniform(*other, some) != draws[some]).all()
    assert torch.equal(seeding.uniform(0, 0, [2**62]), seeding.uniform(0, 0, [2**62]))
