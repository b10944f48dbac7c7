"""Exports a run's weights as one file: python scripts/export.py out/NAME [-format onnx] [-from final] [-o FILE].

Takes the best weights, the final ones or any checkpoint, in however many shards, on one process and without a GPU.
Of a checkpoint only the model is read, not the optimizer's state.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config
from lib.config import plugins
from lib.core import loss
from lib.utils.checkpoint import atomic, run_folder, shards, state, weights
from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError, printable
from scripts import other_weights


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="out/NAME", help="a run's folder")
    parser.add_argument("-o", type=Path, metavar="FILE", help="(out/NAME/NAME.*)")
    parser.add_argument("-format", choices=FORMATS, default="safetensors", help="(safetensors)")
    parser.add_argument(
        "-from",
        dest="source",
        metavar="WHAT",
        help="best, final, or the path of a checkpoint "
        "(best, where there is none final, where there is none the newest checkpoint)",
    )
    parser.add_argument(
        "-shape", type=numbers, metavar="C,H,W", help="of one input, for onnx and torchexport (a sample's)"
    )
    options = parser.parse_args(argv)
    ending, write = FORMATS[options.format]
    file = options.o or options.run / f"{options.run.resolve().name}{ending}"
    try:
        source = place(options.run, options.source)
        tensors = read(source)
        with atomic.new_version(file) as partial:
            write(options, tensors, partial)
    except (UsageError, shards.Damaged, OSError) as error:
        parser.exit(2, printable(f"export.py: {error}\n"))
    size = sum(one.nbytes for one in tensors.values())
    print(printable(f"{file}: {len(tensors)} tensors, {size:,} bytes, from {source}"))
    return 0


def place(run: Path, source: str | None) -> Path:
    """The weights file or checkpoint to export. Raises UsageError if it does not exist."""
    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is no run's folder: it has no config.yaml")
    files = {name: run / name / "weights.safetensors" for name in ("best", "final")}
    if not source:
        weights.find(run)  # UsageError if the best ones are lost
    newest = run_folder.list_checkpoints(run / "checkpoints")[:1]
    wanted = [files.get(source, Path(source))] if source else [*files.values(), *newest]
    found = next((path for path in wanted if path.is_file() or (path / "manifest.json").is_file()), None)
    if found is None:
        raise UsageError(
            f"-from {source or 'best'}: {', '.join(map(str, wanted))}: no weights and no checkpoint there"
        )
    return found


def read(source: Path) -> dict[str, Tensor]:
    """The model's tensors by name. Raises shards.Damaged for a damaged checkpoint."""
    if source.is_file():
        return other_weights.read(source)
    manifest = state.read_manifest(source)
    for file, facts in manifest["shards"].items():
        shards.verify(source / file, facts)
    tensors = shards.make_empty({name: one for name, one in manifest["tensors"].items() if name.startswith("model.")})
    shards.read(source, [*manifest["shards"]], tensors)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def to_safetensors(options, tensors: dict, file: Path):
    shards.write_weights(file, tensors)


def to_torch(options, tensors: dict, file: Path):
    """Write the model's state_dict, which has tied tensors under each of their names: strict loading takes it."""
    torch.save(built(options, tensors).state_dict(), file)


def to_torchexport(options, tensors: dict, file: Path):
    model, inputs = built(options, tensors), example(options)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with file.open("wb") as stream:
        torch.export.save(program, stream)


def to_onnx(options, tensors: dict, file: Path):
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"-format onnx needs {' and '.join(missing)}: uv pip install -r pyproject.toml --group export"
        )
    model, inputs = built(options, tensors), example(options)
    names = {"input_names": ["input"], "output_names": ["output"]}
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(model, (inputs,), file, dynamic_shapes=shapes, external_data=False, verbose=False, **names)


def built(options, tensors: dict) -> nn.Module:
    """The run's model with these weights, for evaluation. Raises UsageError if they do not fit."""
    args = config.parse_args(["-cfg", str(options.run / "config.yaml")], describe=False)
    model = plugins.load("arch", args.arch).get_model(args).eval().requires_grad_(False)
    mine = state.model_tensors(model)
    odd = [name for name in {**mine, **tensors} if not same_form(mine.get(name), tensors.get(name))]
    if odd:
        raise UsageError(
            f"-arch {args.arch}: {odd[0]} and {len(odd) - 1} more are other tensors than the run's: "
            f"take the code that it was trained with"
        )
    for name, tensor in mine.items():
        tensor.copy_(tensors[name])
    return model


def example(options) -> Tensor:
    """Two inputs of the shape and type that the run's model gets: zeros of -shape, or of two training samples.

    Raises UsageError where there are none, or where the model takes more than one tensor.
    """
    if options.shape:
        return torch.zeros(2, *options.shape)
    args = config.parse_args(["-cfg", str(options.run / "config.yaml")], describe=False)
    try:
        part = loader.splits(plugins.load("dataset", args.dataset).get_dataset(args), args.dataset)["train"]
    except UsageError as error:
        raise UsageError(f"{error}; -shape gives the shape of one input without the data") from None
    samples = loader.Loader(part, Plan(len(part), 2, 2), World(), seed=args.seed, shuffle=False, workers=0)
    _, batch = next(samples.epoch(0))
    inputs = loss.split_batch(batch)[0]
    if isinstance(inputs, dict) and len(inputs) == 1:
        inputs = next(iter(inputs.values()))
    if not isinstance(inputs, Tensor):
        given = f"a dict of {', '.join(inputs)}" if isinstance(inputs, dict) else f"a {type(inputs).__name__}"
        raise UsageError(
            f"-format {options.format} is for models of one tensor, and -dataset {args.dataset} gives "
            f"{given}: give get_model a wrapper that takes one, or use -format torch"
        )
    return inputs


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def same_form(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


FORMATS = {
    "safetensors": (".safetensors", to_safetensors),
    "torch": (".pt", to_torch),
    "onnx": (".onnx", to_onnx),
    "torchexport": (".pt2", to_torchexport),
}


if __name__ == "__main__":
    sys.exit(main())
