"""Exports a run's weights as one file: python scripts/export.py out/NAME [-format onnx] [-from final] [-o FILE].

Takes the best weights, the final ones or any checkpoint, in however many shards, on one process and without a GPU.
Of a checkpoint only the model is read, not the optimizer's state.

onnx and torchexport take batches of any size, and rows of tokens of any length. What was written is run on three
shapes, and must give the model's own outputs. Classes, image size, mean and deviation are in the file (ONNX: metadata
properties; torch.export: metadata.json among its extra files).
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import config
from lib.config import plugins
from lib.core import loss
from lib.utils.checkpoint import atomic, run_folder, shards, state, weights
from lib.utils.data import loader
from lib.utils.data.fetch import option
from lib.utils.data.plan import Plan
from lib.utils.data.transforms import Pixels
from lib.utils.distributed import World
from lib.utils.errors import UsageError, printable
from scripts import other_weights

BATCHES = (1, 3, 7)  # on which an exported model is compared with the run's
NEEDED = ("onnx", "onnxscript", "onnxruntime")


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
    parser.add_argument(
        "-pixels",
        action="store_true",
        help="the exported model takes bytes, as the dataset gives them, and normalizes",
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
    model, inputs, facts = prepared(options, tensors)
    program = exported(lambda shapes: torch.export.export(model, (inputs,), dynamic_shapes=shapes), inputs)
    with file.open("wb") as stream:
        torch.export.save(program, stream, extra_files={"metadata.json": json.dumps(facts)})
    check(model, inputs, torch.export.load(file).module())


def to_onnx(options, tensors: dict, file: Path):
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"-format onnx needs {' and '.join(missing)}: uv pip install -r pyproject.toml --group export"
        )
    import onnx
    import onnxruntime

    model, inputs, facts = prepared(options, tensors)
    names = {"input_names": ["input"], "output_names": ["output"], "verbose": False}
    program = exported(lambda shapes: torch.onnx.export(model, (inputs,), dynamic_shapes=shapes, **names), inputs)
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {name: json.dumps(fact) for name, fact in facts.items()})
    onnx.save(proto, file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    check(model, inputs, lambda values: [*map(torch.from_numpy, session.run(None, {"input": values.numpy()}))])


def prepared(options, tensors: dict) -> tuple[nn.Module, Tensor, dict]:
    """The model to export, two inputs of it, and the facts that go into the file."""
    model, args = built(options, tensors), config_of(options)
    inputs, pixels = example(options, model)
    about = yaml.safe_load((options.run / "config.yaml").read_text())["about"]
    facts = {"run": args.model, "arch": args.arch, "dataset": args.dataset, "classes": about.get("classes", [])}
    if inputs.ndim == 4:
        facts |= {"image_size": args.image_size, "channels": args.channels}
    if pixels:
        facts |= {"mean": pixels.mean, "deviation": pixels.deviation}  # of pixels from 0 to 1
    if options.pixels:
        if not pixels:
            raise UsageError(f"-pixels: -dataset {args.dataset} normalizes no bytes by a Pixels as its on_device")
        model, inputs = Normalizing(model, pixels), torch.zeros(inputs.shape, dtype=torch.uint8)
    return model, inputs, facts


class Normalizing(nn.Module):
    """A model that takes images of bytes."""

    def __init__(self, model: nn.Module, pixels: Pixels):
        super().__init__()
        self.model, self.pixels = model, pixels

    def forward(self, images):
        return self.model(self.pixels.normalize(images))


def exported(export: Callable, inputs: Tensor):
    """Return what `export` makes, for any batch size, and for any length of rows of tokens. Raises UsageError."""
    any_size = torch.export.Dim.AUTO
    shapes = {0: any_size, 1: any_size} if is_rows(inputs) else {0: any_size}
    try:
        return export((shapes,))
    except Exception as error:  # noqa: BLE001  # whatever torch's compiler does not take
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(
            f"the model cannot be exported ({type(error).__name__}: {reason}); -format torch can"
        ) from None


def check(model: nn.Module, inputs: Tensor, program: Callable):
    """Raise UsageError unless a program gives the model's outputs, for batches and lengths of three sizes."""
    for count in BATCHES:
        values = inputs[:1].expand(count, *inputs.shape[1:])
        if is_rows(inputs):
            values = values[:, : max(2, inputs.shape[1] // count)]
        if values.is_floating_point():
            values = torch.randn(values.shape)
        else:  # no others are known to be allowed
            values = inputs.flatten()[torch.randint(inputs.numel(), values.shape)]
        shape = tuple(values.shape)
        wanted = [one for one in pytree.tree_leaves(model(values)) if isinstance(one, Tensor)]
        try:
            found = pytree.tree_leaves(program(values.contiguous()))
        except Exception as error:  # noqa: BLE001  # of another library
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise UsageError(f"what was exported does not take inputs of {shape} ({reason})") from None
        if [one.shape for one in found] != [one.shape for one in wanted]:
            raise UsageError(f"what was exported gives other shapes than the model for inputs of {shape}")
        for one, other in zip(found, wanted):
            if not torch.allclose(
                one.to(other.dtype), other, rtol=1e-3, atol=1e-3 * float(other.detach().abs().max())
            ):
                raise UsageError(f"what was exported gives other values than the model for inputs of {shape}")


def is_rows(inputs: Tensor) -> bool:
    """Whether these are rows of tokens."""
    return inputs.ndim == 2 and inputs.dtype == torch.int64


def config_of(options):
    return config.parse_args(["-cfg", str(options.run / "config.yaml")], describe=False)


def built(options, tensors: dict) -> nn.Module:
    """The run's model with these weights, for evaluation. Raises UsageError if they do not fit."""
    args = config_of(options)
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


def example(options, model: nn.Module) -> tuple[Tensor, Pixels | None]:
    """Two inputs of the shape and type that the run's model gets: of -shape, or two training samples.

    With what normalizes them, if that is known. Raises UsageError where there are none, or where the model takes more
    than one tensor.
    """
    args = config_of(options)
    try:
        part = loader.splits(plugins.load("dataset", args.dataset).get_dataset(args), args.dataset)["train"]
    except UsageError as error:
        if options.shape:
            return of_shape(options.shape, model, args.num_classes), None
        raise UsageError(f"{error}; -shape gives the shape of one input without the data") from None
    on_device = option(part, "on_device")
    pixels = on_device if isinstance(on_device, Pixels) else None
    if options.shape:
        return of_shape(options.shape, model, args.num_classes), pixels
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
    return inputs.contiguous(), pixels


def of_shape(shape: list[int], model: nn.Module, tokens: int) -> Tensor:
    """Two inputs of a shape: floats, or if the model takes none, token numbers. Raises UsageError."""
    for inputs in (torch.zeros(2, *shape), torch.randint(tokens, (2, *shape))):
        try:
            model(inputs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            reason = str(error).splitlines()[0]
            continue
        return inputs
    raise UsageError(f"-shape {','.join(map(str, shape))}: the model does not take it ({reason})")


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
