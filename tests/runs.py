"""Run training in this process (ranks are forked from it) and read the results."""

import contextlib
import json
import sys
import types
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn

import train
from lib import config
from lib.config import plugins as plugin_files
from lib.launch import local
from lib.utils.checkpoint import run_folder
from lib.utils.data.tensors import Tensors


def run(out: Path, flags: str, wanted: int = 0) -> Path:
    """Run train.py with these flags and -out and return the run's folder. The exit code must be `wanted`."""
    argv = [*flags.split(), "-out", str(out)]
    code, folder = train.main(argv), run_folder.path_of(config.parse_args(argv))
    assert code == wanted, f"exit code {code} instead of {wanted}: {run_folder.read_json(folder / 'outcome.json')}"
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "weights.safetensors")


def distance(one: Path, other: Path) -> float:
    """The largest difference between the final weights of two runs."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def same_tensors(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def outcome(folder: Path) -> dict:
    return json.loads((folder / "outcome.json").read_text())


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def plugins(**files):
    """Add plugins: plugins(arch={"tiny": get_model}, dataset={"few": get_dataset}, trainer={"odd": Trainer})."""
    names = {"arch": "get_model", "dataset": "get_dataset", "trainer": "Trainer"}
    names_before, before = plugin_files.names, dict(sys.modules)
    for kind, made in files.items():
        for name, builder in made.items():
            module = types.ModuleType(f"lib.{kind}.{name}")
            setattr(module, names[kind], builder)
            sys.modules[module.__name__] = module
    plugin_files.names = lambda kind: names_before(kind) + list(files.get(kind, {}))
    try:
        # Only forked processes have them, and a library may have left a thread here.
        with mock.patch.object(local, "fork_is_safe", lambda: sys.platform == "linux"):
            yield
    finally:
        plugin_files.names = names_before
        for name in set(sys.modules) - set(before):
            if name.startswith("lib."):
                del sys.modules[name]


def norm_net(args) -> nn.Module:
    """A small network with BatchNorm and dropout for 64 inputs in 4 classes."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 24, bias=False),  # no bias: BatchNorm would remove it
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(24, args.num_classes),
    )


def few(args, count: int = 50) -> dict[str, Tensors]:
    """A small dataset of 4 classes that can be learned; `val` and `test` have odd sizes."""
    generator = torch.Generator().manual_seed(7)

    def part(number):
        labels = torch.randint(4, (number,), generator=generator)
        return Tensors(torch.randn(number, 64, generator=generator) + labels[:, None], labels)

    return {"train": part(count), "val": part(13), "test": part(7)}
