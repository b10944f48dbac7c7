"""Compares two runs, checkpoints or weights files, tensor by tensor: python scripts/compare.py out/A out/B.

Of runs it says which flags differ, at which step the logged figures differ first, and at which step that both have
saved the tensors do; whether one goes further, and whether their best and final weights differ. Exit code 0: all
tensors are the same, to the bit, and no run goes further; 1: something differs.
"""

import argparse
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils.checkpoint import run_folder, shards, state, weights
from lib.utils.errors import FINISHED, USAGE, UsageError
from scripts import other_weights, reading

MOST = 20  # rows of the table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("A", "B"):
        parser.add_argument(name, type=Path, help="a run, a checkpoint, a weights file, or a folder with one")
    parser.add_argument("-all", action="store_true", help=f"show all tensors that differ, not {MOST}")
    options = parser.parse_args(argv)
    ends = []
    try:
        pair = options.A, options.B
        if all((one / "config.yaml").is_file() for one in pair):
            ends = compare_ends(*pair)
            print("\n".join([*compare_logs(*pair), *(end.text for end in ends)]))
            pair = first_pair(*pair)
        a, b = read(*pair)
    except (UsageError, shards.Damaged, OSError, ValueError, yaml.YAMLError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return USAGE
    rows = {name: text for name in {**a, **b} if (text := describe(a.get(name), b.get(name)))}
    print(f"{len({**a, **b}) - len(rows)} tensors are the same, {len(rows)} differ, in {pair[0]} and {pair[1]}")
    shown = [*rows.items()] if options.all else [*rows.items()][:MOST]
    for name, text in shown:
        print(f"  {name:40} {text}")
    if len(shown) < len(rows):
        print(f"  and {len(rows) - len(shown)} more: -all shows them")
    return 1 if rows or any(end.differs for end in ends) else FINISHED


def compare_logs(one: Path, other: Path) -> list[str]:
    """Return lines on how the flags and the logged figures of two runs differ."""
    flags = [yaml.safe_load((run / "config.yaml").read_text()) or {} for run in (one, other)]
    names = sorted({*flags[0], *flags[1]} - {"about", "model", "out"})
    values = [(name, flags[0].get(name), flags[1].get(name)) for name in names]
    odd = [
        f"-{name} {one_value} and {other_value}"
        for name, one_value, other_value in values
        if one_value != other_value
    ]
    lines = [f"flags that differ: {', '.join(odd) or 'none'}"]
    lines += [f"{run}/{fault}" for run in (one, other) if (fault := reading.metrics(run).fault)]
    logs = [dict(figures(run)) for run in (one, other)]
    both = [figure for figure in logs[0] if figure in logs[1]]
    first = next((figure for figure in both if logs[0][figure] != logs[1][figure]), None)
    if first:
        step, name = first
        lines.append(f"figures differ from step {step} on: {name} {logs[0][first]} and {logs[1][first]}")
    else:
        lines.append(f"{len(both)} logged figures of both are the same")
    return lines


def figures(run: Path) -> list[tuple[tuple[int, str], Any]]:
    """Return the figures in metrics.jsonl that do not measure speed, each with its step and name."""
    skipped = ("step", "epoch", "samples")
    return [
        ((line["step"], name), value)
        for line in reading.lines(run)
        for name, value in line.items()
        if name not in skipped and not name.startswith("perf/")
    ]


@dataclass
class End:
    """A line on the ends of two runs."""

    text: str
    differs: bool = True


def compare_ends(one: Path, other: Path) -> list[End]:
    """Return lines on how far two runs go, if not equally far, and on their best and final weights."""
    ends = []
    steps = [max([0, *checkpoints(run), *(line["step"] for line in reading.lines(run))]) for run in (one, other)]
    if steps[0] != steps[1]:
        states = [run_folder.read_json(run / "outcome.json").get("state", "unknown") for run in (one, other)]
        further = f"{one} goes to step {steps[0]} ({states[0]}), {other} to step {steps[1]} ({states[1]})"
        ends.append(End(further))
    for kind in ("best", "final"):
        name = f"{kind}/{weights.FILE}"
        there = [(run / name).exists() for run in (one, other)]
        if all(there):
            ends.append(compare_weights(name, *read(one / name, other / name)))
        elif any(there):
            ends.append(End(f"{name}: only in {'A' if there[0] else 'B'}"))
    return ends


def compare_weights(name: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> End:
    """Return a line that says which tensor of two weights files differs first, if any does."""
    for tensor in {**one, **other}:
        if text := describe(one.get(tensor), other.get(tensor)):
            return End(f"{name}: {tensor} differs first: {text}")
    return End(f"{name}: the same", differs=False)


def checkpoints(run: Path) -> dict[int, Path]:
    """Return a run's checkpoints by their steps."""
    folders = run_folder.list_checkpoints(run / "checkpoints")
    return {int(folder.name.rpartition("_")[2]): folder for folder in folders}


def first_pair(one: Path, other: Path) -> tuple[Path, Path]:
    """Return the checkpoints of the first step that both runs have and whose tensors differ; else the newest ones.

    Of runs without checkpoints, these are the files of the final weights, or of the best ones. Raises UsageError if
    there are none of these, either.
    """
    saved = [checkpoints(run) for run in (one, other)]
    pairs = [(saved[0][step], saved[1][step]) for step in sorted(saved[0].keys() & saved[1].keys())]
    for pair in pairs:
        a, b = read(*pair)
        if any(describe(a.get(name), b.get(name)) for name in {**a, **b}):
            return pair
    if pairs:
        return pairs[-1]
    ends = [(one / kind / weights.FILE, other / kind / weights.FILE) for kind in ("final", "best")]
    if not any(saved) and not any(file.is_file() for pair in ends for file in pair):
        raise UsageError(f"no tensors to compare: neither {one} nor {other} has saved any")
    whole = [pair for pair in ends if all(file.is_file() for file in pair)]
    return whole[0] if whole and not all(saved) else (one, other)


def read(*paths: Path) -> list[dict[str, Tensor]]:
    """Return the tensors of checkpoints, of runs' newest ones or best weights, or of files: then only the model's."""
    found, has_weights = [], False
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such run, checkpoint or file")
        newest = run_folder.list_checkpoints(path / "checkpoints")[:1]
        folder = newest[0] if newest else path
        file = folder / weights.FILE if folder.is_dir() else folder
        if not file.is_file() and not (folder / "manifest.json").exists():
            file = weights.find(path) or file  # of a run without checkpoints
        if file.is_file():
            has_weights = True
            found.append({f"model.{name}": one for name, one in other_weights.read(file).items()})
            continue
        if not (folder / "manifest.json").exists():
            raise UsageError(f"{path}: in this folder are no checkpoints, no manifest.json and no {weights.FILE}")
        manifest = state.read_manifest(folder)
        found.append(shards.make_empty(manifest["tensors"]))
        shards.read(folder, [*manifest["shards"]], found[-1])
    if has_weights:
        found = [{name: one for name, one in each.items() if name.startswith("model.")} for each in found]
    return found


def describe(one: Tensor | None, other: Tensor | None) -> str:
    """Return how two tensors differ, "" if they have the same bits."""
    if one is None or other is None:
        return f"only in {'B' if one is None else 'A'}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if shards.as_bytes(one) == shards.as_bytes(other):
        return ""
    wide = torch.complex128 if one.is_complex() else torch.float64
    gaps = (one.to(wide) - other.to(wide)).abs()
    most, largest = torch.nan_to_num(gaps, nan=torch.inf).max().item(), one.to(wide).abs().max().item()
    count = int((gaps != 0).sum())
    return f"{count:,} of {one.numel():,} values, by {most:.3g} at most; the largest is {largest:.3g}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other programs do where `| head` has read enough
    sys.exit(main())
