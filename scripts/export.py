"""A run's weights as one file for others: python scripts/export.py out/NAME [-format onnx] [-from final] [-o FILE].

Takes the best weights, the final ones or any checkpoint, in however many shards, on one process and without a GPU.
Of a checkpoint only the model is read, not what the optimizer remembers.
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
from lib.utils.checkpoint import atomic, manager, run_folder, shards, state, weights
from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="out/NAME", help="a run's folder")
    parser.add_argument("-o", type=Path, metavar="FILE", help="(out/NAME/NAME.*)")
    parser.add_argument("-format", choices=FORMATS, default="safetensors", help="(safetensors)")
    parser.add_argument("-from", dest="source", metavar="WHAT", help="best, final, or the path of a checkpoint "
                        "(best, where there is none final, where there is none the newest checkpoint)")  # fmt: skip
    parser.add_argument(
        "-shape", type=numbers, metavar="C,H,W", help="of one input, for onnx and torchexport (a sample's)"
    )
    asked = parser.parse_args(argv)
    ending, write = FORMATS[asked.format]
    file = asked.o or asked.run / f"{asked.run.resolve().name}{ending}"
    try:
        source = place(asked.run, asked.source)
        tensors = read(source)
        with atomic.staged(file) as partial:
            write(asked, tensors, partial)
    except (UsageError, shards.Damaged, OSError) as error:
        parser.exit(2, f"export.py: {error}\n")
    print(f"{file}: {len(tensors)} tensors, {shards.total_bytes(tensors):,} bytes, from {source}")
    return 0


def place(run: Path, asked: str | None) -> Path:
    """The weights file or checkpoint that is meant. Raises UsageError where it is not there."""
    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is no run's folder: it has no config.yaml")
    files = {name: run / name / "weights.safetensors" for name in ("best", "final")}
    newest = run_folder.listed(run / "checkpoints")[:1]
    wanted = [files.get(asked, Path(asked))] if asked else [*files.values(), *newest]
    found = next((path for path in wanted if path.is_file() or (path / "manifest.json").is_file()), None)
    if found is None:
        raise UsageError(
            f"-from {asked or 'best'}: {', '.join(map(str, wanted))}: no weights and no checkpoint there"
        )
    return found


def read(source: Path) -> dict[str, Tensor]:
    """The model's tensors by name. Raises shards.Damaged for a checkpoint that is not what was written."""
    if source.is_file():
        return weights.read(source)
    manifest = manager.read_manifest(source)
    for file, facts in manifest["shards"].items():
        shards.verify(source / file, facts)
    tensors = shards.whole(source, manifest, "model.")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def to_safetensors(asked, tensors: dict, file: Path):
    shards.write(file, list(tensors.items()))


def to_torch(asked, tensors: dict, file: Path):
    torch.save(tensors, file)


def to_torchexport(asked, tensors: dict, file: Path):
    model, inputs = built(asked, tensors)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with file.open("wb") as stream:
        torch.export.save(program, stream)


def to_onnx(asked, tensors: dict, file: Path):
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"-format onnx needs {' and '.join(missing)}: uv pip install -r pyproject.toml --group export"
        )
    model, inputs = built(asked, tensors)
    names = {"input_names": ["input"], "output_names": ["output"]}
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(model, (inputs,), file, dynamic_shapes=shapes, external_data=False, verbose=False, **names)


def built(asked, tensors: dict) -> tuple[nn.Module, Tensor]:
    """The run's model with these weights, for evaluation, and two inputs. Raises UsageError where they do not fit."""
    args = config.parse_args(["-cfg", str(asked.run / "config.yaml")])
    model = plugins.load("arch", args.arch).get_model(args).eval().requires_grad_(False)
    mine = state.model_tensors(model)
    odd = [name for name in {**mine, **tensors} if not alike(mine.get(name), tensors.get(name))]
    if odd:
        raise UsageError(f"-arch {args.arch}: {odd[0]} and {len(odd) - 1} more are other tensors than the run's: "
                         f"take the code that it was trained with")  # fmt: skip
    for name, tensor in mine.items():
        tensor.copy_(tensors[name])
    return model, torch.zeros(2, *asked.shape) if asked.shape else samples(args)


def samples(args) -> Tensor:
    """The inputs of two training samples, of the shape and type that the run's model gets. Raises UsageError."""
    try:
        part = loader.splits(plugins.load("dataset", args.dataset).get_dataset(args), args.dataset)["train"]
    except UsageError as error:
        raise UsageError(f"{error}; -shape tells what one input is, where the data is not at hand") from None
    return loader.first_batch(part, Plan(len(part), 2, 2), World(), args)[0]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


FORMATS = {
    "safetensors": (".safetensors", to_safetensors),
    "torch": (".pt", to_torch),
    "onnx": (".onnx", to_onnx),
    "torchexport": (".pt2", to_torchexport),
}


if __name__ == "__main__":
    sys.exit(main())
