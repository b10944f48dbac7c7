"""Exports a run's weights as one file: python scripts/export.py out/NAME [-format onnx] [-from final] [-o FILE].

Takes the best weights, the final ones or any checkpoint, in however many shards, on one process and without a GPU.
Of a checkpoint only the model is read, not the optimizer's state.

onnx and torchexport take batches of any size, and rows of tokens of any length. What was written is run on three
shapes, and must give the model's own outputs, or no file is left. In ONNX, of several tensors `output` is the one
that training takes; others are `output_KEY`, after their keys in what the model returns.

Metadata of the file (of ONNX: properties; of torch.export: metadata.json among its extra files) has the input's type
and shape, the classes, the key of the output that training takes, and of images how get_transform prepares them:
turned upright by EXIF, if `upright`; then a square in the centre, of `crop` times the shorter side (null: the whole
image), resized to `image_size` by the `interpolation` (antialiased: Pillow's filter). From its pixels, from 0 to 1,
`mean` is subtracted; the rest is divided by `deviation`. No exported model reads EXIF: turn photos upright before.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.config import plugins
from lib.config.types import whole
from lib.core import parallel
from lib.utils.checkpoint import atomic, run_folder, shards, state, weights
from lib.utils.data.fetch import option
from lib.utils.data.tensors import named_tensors
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError, printable
from scripts import model_input, other_weights, preprocessing

BATCHES = (1, 3, 7, 17)  # on which an exported model is compared with the run's; the last is longer, too, if it can
NEEDED = ("onnx", "onnxscript", "onnxruntime")
MASKED = 1e4  # from here on a number may stand for "never"
MOST_BYTES = 2**31  # of an ONNX file, which is a protobuf
PHOTO = (48, 64)  # height and width of an image to begin with, where any are allowed
FIXED = "-fixed N exports it for N inputs of one shape"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="out/NAME", help="a run's folder")
    parser.add_argument("-o", type=Path, metavar="FILE", help="(out/NAME/NAME.*)")
    parser.add_argument("-format", choices=FORMATS, help="(by the ending of -o, else safetensors)")
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
        "-fixed", type=whole(1), metavar="N", help="the exported model takes N inputs of this shape, and no others"
    )
    parser.add_argument(
        "-pixels", action="store_true", help="the exported model takes images of bytes, and normalizes them"
    )
    parser.add_argument(
        "-resize",
        action="store_true",
        help="as -pixels, of any height and width: it crops and resizes them as get_transform does, but turns none "
        "upright by EXIF; of large JPEGs, which predict.py decodes at a reduced size, probabilities differ a little",
    )
    options = parser.parse_args(argv)
    given = [name for name in ("shape", "fixed", "pixels", "resize") if getattr(options, name)]
    try:
        options.format = format_of(options.o, options.format)
        ending, write = FORMATS[options.format]
        file = options.o or options.run / f"{options.run.resolve().name}{ending}"
        if given and options.format not in ("onnx", "torchexport"):
            raise UsageError(f"-{given[0]} is for -format onnx and torchexport")
        if options.fixed and options.resize:
            raise UsageError("-fixed and -resize: the one takes no other size, the other any")
        if not file.parent.is_dir() or file.is_dir():
            raise UsageError(f"-o {file}: it must be a file in a folder that is there")
        source = place(options.run, options.source)
        tensors = read(source)
        print_note(model_input.note_on_classes(source, model_input.classes_of(options.run)))
        with atomic.new_version(file) as partial:
            takes = write(options, tensors, partial)
    except (UsageError, shards.Damaged, OSError) as error:
        parser.exit(2, printable(f"export.py: {error}\n"))
    size = sum(one.nbytes for one in tensors.values())
    more = f"; it takes {takes}" if takes else ""
    print(printable(f"{file}: {len(tensors)} tensors, {size:,} bytes, from {source}{more}"))
    return 0


def format_of(file: Path | None, given: str | None) -> str:
    """Return the format of a file to write. Raises UsageError if its ending is another one's, or of none."""
    ending = file.suffix.lower() if file else ""
    formats = {ending: name for name, (ending, _) in FORMATS.items()}
    form = given or formats.get(ending, "" if ending else "safetensors")
    if not form:
        raise UsageError(f"-o {file}: give -format, or one of the endings {' '.join(formats)}")
    if formats.get(ending, form) != form:
        raise UsageError(f"-o {file}: {ending} is the ending of -format {formats[ending]}, and not of {form}")
    return form


def place(run: Path, source: str | None) -> Path:
    """The weights file or checkpoint to export. Raises UsageError if it does not exist."""
    model_input.config_file(run)  # UsageError if there is none
    files = {name: run / name / "weights.safetensors" for name in ("best", "final")}
    if not source:
        weights.find(run)  # UsageError if the best ones are lost
    newest = run_folder.list_checkpoints(run / "checkpoints")[:1]
    given = [files.get(source, Path(source)), Path(source, weights.FILE)] if source else []
    wanted = given or [*files.values(), *newest]
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
    if kept := sorted(name for name in manifest["tensors"] if name.startswith("trainer.")):
        what = f"not exported are {kept[0]} and {len(kept) - 1} more of the trainer"
        hint = "if it evaluates an average, that is in best/, which comes with the first evaluation"
        print_note(f"{source}: {what}: {hint}")
    tensors = shards.make_empty({name: one for name, one in manifest["tensors"].items() if name.startswith("model.")})
    shards.read(source, [*manifest["shards"]], tensors)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def print_note(text: str):
    if text:
        print(printable(f"export.py: {text}"), file=sys.stderr)


def to_safetensors(options, tensors: dict, file: Path):
    shards.write_weights(file, tensors)


def to_torch(options, tensors: dict, file: Path):
    """Write the model's state_dict, which has tied tensors under each of their names: strict loading takes it."""
    torch.save(built(options, tensors).state_dict(), file)


def to_torchexport(options, tensors: dict, file: Path) -> str:
    made = prepared(options, tensors)
    program = exported(export_program, made)
    with file.open("wb") as stream:
        torch.export.save(program, stream, extra_files={"metadata.json": json.dumps(made.facts)})
    with file.open("rb") as stream:
        check(made, torch.export.load(stream).module())
    return made.facts["input"]


def export_program(model: nn.Module, inputs: tuple, shapes: tuple | None):
    any_size = torch.export.Dim.AUTO
    return torch.export.export(
        model, inputs, dynamic_shapes=shapes and tuple(dict.fromkeys(one, any_size) for one in shapes)
    )


def to_onnx(options, tensors: dict, file: Path) -> str:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"-format onnx needs {' and '.join(missing)}: uv pip install -r pyproject.toml --group export"
        )
    if (size := sum(one.nbytes for one in tensors.values())) >= MOST_BYTES:
        raise UsageError(f"-format onnx: a file has less than 2 GiB, the weights {size:,} bytes: take torchexport")
    import onnx
    import onnxruntime

    made = prepared(options, tensors)
    proto = exported(export_onnx, made).model_proto
    onnx.helper.set_model_props(proto, {name: json.dumps(fact) for name, fact in made.facts.items()})
    onnx.save(proto, file)
    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  # an operator that it lacks
        raise UsageError(f"onnxruntime does not load what was exported ({reason_of(error)})") from None
    check(made, lambda values: [*map(torch.from_numpy, session.run(None, {"input": values.numpy()}))])
    return made.facts["input"]


def export_onnx(model: nn.Module, inputs: tuple, shapes: tuple | None):
    answer = model(*inputs)
    outputs = ["output"] if isinstance(answer, Tensor) else [*answer]  # of NamedOutputs
    names = {"input_names": ["input"], "output_names": outputs, "verbose": False}
    return torch.onnx.export(model, inputs, dynamic_shapes=shapes, **names)


@dataclass(frozen=True)
class Exportable:
    """A model, inputs of it, the names of their dimensions that may have other sizes, and facts for the file."""

    model: nn.Module
    inputs: Tensor
    names: dict[int, str]
    facts: dict


def prepared(options, tensors: dict) -> Exportable:
    """Return what is exported. Raises UsageError if -pixels or -resize is not what the dataset does."""
    model, args = state.unwrap(built(options, tensors)), model_input.flags_of(options.run)
    samples = training_samples(options, args)
    if options.shape:
        model = model_input.with_one_input(model, args)
        inputs = of_shape(options.shape, model, args.num_classes)
    else:
        given = model_input.first_inputs(model, samples, args)
        inputs = one_tensor(given, options, args)
        model = model_input.with_one_input(model, args, given)
    on_device = option(samples, "on_device")
    pixels = on_device if isinstance(on_device, Pixels) else None
    print_note(model_input.note_on_trainer(args))
    answer = model(inputs)
    model = with_plain_outputs(model, answer, options.format).eval()
    facts = {"run": args.model, "arch": args.arch, "dataset": args.dataset}
    facts |= {"classes": model_input.classes_of(options.run), **facts_on_output(answer)}
    names = {0: "batch", 1: "length"} if has_any_length(model, inputs) else {0: "batch"}
    found = None
    if inputs.ndim == 4:
        facts |= {"image_size": args.image_size, "channels": args.channels}
        try:
            found = preprocessing.find(args, pixels)
        except UsageError as error:
            if options.resize or (options.pixels and not pixels):
                raise
            print_note(f"{error}: the file does not say how images are prepared")
    if found:
        facts |= {"upright": found.upright, "crop": found.crop, "interpolation": "bilinear, antialiased"}
        pixels = found.pixels
    if pixels:
        facts |= {"mean": pixels.mean, "deviation": pixels.deviation}
    if options.pixels or options.resize:
        if options.resize and not found:
            raise UsageError(
                f"-resize: -dataset {args.dataset} has no get_transform that crops a centre, resizes and normalizes: "
                f"take -pixels"
            )
        if not pixels:
            raise UsageError(
                f"-pixels: -dataset {args.dataset} does not normalize bytes: see Pixels in lib/utils/data"
            )
        model = preprocessing.FromBytes(model, pixels, found if options.resize else None, args.image_size).eval()
        shape = (2, args.channels, *PHOTO) if options.resize else inputs.shape
        inputs = torch.randint(256, shape, dtype=torch.uint8)
        names |= {2: "height", 3: "width"} if options.resize else {}
    if options.fixed:
        inputs, names = inputs[:1].repeat(options.fixed, *[1] * (inputs.ndim - 1)), {}
    sizes = ", ".join(names.get(place, str(size)) for place, size in enumerate(inputs.shape))
    facts["input"] = f"{str(inputs.dtype).removeprefix('torch.')} ({sizes})"
    return Exportable(model, inputs, names, facts)


@torch.no_grad()
def has_any_length(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether inputs are rows of tokens, which may be shorter, and no columns of a table."""
    if inputs.ndim != 2 or inputs.dtype != torch.int64 or inputs.shape[1] < 2:
        return False
    try:
        model(inputs[:, :-1])
    except Exception:  # noqa: BLE001  # whatever the model raises
        return False
    return True


def with_plain_outputs(model: nn.Module, answer: Any, form: str) -> nn.Module:
    """Return a model that returns tensors alone, by name in ONNX, instead of such an answer."""
    if has_other_parts(answer):
        return Outputs(model)
    return NamedOutputs(model) if form == "onnx" and not isinstance(answer, Tensor) else model


def facts_on_output(answer: Any) -> dict[str, str]:
    """Return the key of the outputs that training takes, in what a model returns; nothing if that is a tensor."""
    keys = [key for key, one in named_tensors(answer) if one is model_input.outputs_of(answer)]
    return {"output": keys[0]} if keys and not isinstance(answer, Tensor) else {}


class Outputs(nn.Module):
    """A model that returns its outputs alone, and nothing else, as a cache of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return model_input.outputs_of(self.model(inputs))


class NamedOutputs(nn.Module):
    """A model that returns all its tensors by name: "output" is that of `Outputs`, and the first."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        answer = self.model(inputs)
        outputs = model_input.outputs_of(answer)
        others = {f"output_{key}": one for key, one in named_tensors(answer) if one is not outputs}
        return others if outputs is None else {"output": outputs, **others}


def has_other_parts(answer) -> bool:
    """Whether an answer has other parts than tensors, or is a named tuple, which torch cannot write."""
    return hasattr(type(answer), "_asdict") or not all(
        one is None or isinstance(one, Tensor) for one in pytree.tree_leaves(answer)
    )


def exported(export: Callable, made: Exportable):
    """Return what `export` makes of a model, its inputs and their sizes that may differ. Raises UsageError."""
    shapes = (made.names,) if made.names else None
    try:
        with silence():
            return export(made.model, (made.inputs,), shapes)
    except Exception as error:  # noqa: BLE001  # whatever torch's compiler does not take
        hint = f"{FIXED}; -format torch can always" if shapes else "-format torch can"
        raise UsageError(f"the model cannot be exported ({reason_of(error)}); {hint}") from None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep back the graphs and warnings that torch prints: what was exported is compared with the model."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def reason_of(error: BaseException) -> str:
    """Return the beginning of an error's text, or of that of its cause, in one line."""
    while error.__cause__:
        error = error.__cause__
    return textwrap.shorten(f"{type(error).__name__}: {error}", 250)


@torch.no_grad()
def check(made: Exportable, program: Callable):
    """Raise UsageError unless a program gives the model's outputs, for inputs of four sizes."""
    hint = f": {FIXED}" if made.names else ""
    for count in BATCHES:
        values = random_inputs(made, count)
        shape = tuple(values.shape)
        try:
            outputs = [pytree.tree_leaves(made.model(values.clone())) for _ in range(2)]
            wanted, again = ([one for one in some if isinstance(one, Tensor)] for some in outputs)
        except Exception as error:
            if count == BATCHES[-1]:  # longer than its table of positions, whatever it raises
                continue
            raise UsageError(f"the model takes no inputs of {shape} ({reason_of(error)}){hint}") from error
        if not wanted:
            raise UsageError("the model returns no tensor: there is nothing to export")
        if not all(map(is_close, wanted, again)):
            raise UsageError(
                "the model gives other outputs each time, as with a dropout that self.training does not end"
            )
        try:
            found = [one for one in pytree.tree_leaves(program(values.clone())) if isinstance(one, Tensor)]
        except Exception as error:  # noqa: BLE001  # of another library
            raise UsageError(f"what was exported takes no inputs of {shape} ({reason_of(error)}){hint}") from None
        if [one.shape for one in found] != [one.shape for one in wanted]:
            raise UsageError(f"what was exported gives other shapes than the model for inputs of {shape}{hint}")
        if not all(map(is_close, found, wanted)):
            raise UsageError(f"what was exported gives other values than the model for inputs of {shape}{hint}")


def random_inputs(made: Exportable, count: int) -> Tensor:
    """Return `count` random inputs, the shorter the more there are, but twice as long for the last count."""
    shape = [*made.inputs.shape]
    for place in made.names:
        size = 2 * shape[place] if count == BATCHES[-1] else max(2, shape[place] // count)
        shape[place] = count if place == 0 else size
    if made.inputs.is_floating_point():
        return torch.randn(shape, dtype=made.inputs.dtype)
    if shape[1:] == [*made.inputs.shape[1:]]:  # each place, as a column of a table, may allow other numbers
        return made.inputs.gather(0, torch.randint(len(made.inputs), shape))
    return made.inputs.flatten()[torch.randint(made.inputs.numel(), shape)]  # no others are known to be allowed


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are equal up to rounding, in relation to the largest number that is no mask, as -1e9."""
    one, other = one.double(), other.double()
    usual = other[other.abs() < MASKED]
    usual = usual if len(usual) else other[other.isfinite()]
    largest = usual.abs().max() if len(usual) else 0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(largest), equal_nan=True)


def built(options, tensors: dict) -> nn.Module:
    """The run's model with these weights, for evaluation. Raises UsageError if they do not fit."""
    args = model_input.flags_of(options.run)
    model = parallel.build(plugins.load("arch", args.arch), args).eval().requires_grad_(False)
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


def training_samples(options, args) -> Any:
    """Return the training samples, None if they are not there and -shape says what they are like.

    Raises UsageError without both.
    """
    try:
        return model_input.training_samples(args)
    except UsageError as error:
        if options.shape:
            return None
        raise UsageError(f"{error}; -shape gives the shape of one input without the data") from None


def one_tensor(inputs: Any, options, args) -> Tensor:
    """Return the one tensor that the model gets in training, of two samples. Raises UsageError if it gets others."""
    if isinstance(inputs, dict) and len(inputs) == 1:
        inputs = next(iter(inputs.values()))
    if not isinstance(inputs, Tensor):
        given = f"a dict of {', '.join(inputs)}" if isinstance(inputs, dict) else f"a {type(inputs).__name__}"
        raise UsageError(
            f"-format {options.format} is for models of one tensor, and -dataset {args.dataset} gives "
            f"{given}: give get_model a wrapper that takes one, or use -format torch"
        )
    return inputs.contiguous()


def of_shape(shape: list[int], model: nn.Module, tokens: int) -> Tensor:
    """Two inputs of a shape: floats or token numbers, whichever the model takes. Raises UsageError.

    Of one dimension tokens are tried first: a layer may take floats for them, and images may be taken as integers.
    """
    kinds = [torch.zeros(2, *shape), torch.randint(tokens, (2, *shape))]
    for inputs in reversed(kinds) if len(shape) == 1 else kinds:
        try:
            model(inputs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            reason = str(error).splitlines()[0]
            continue
        return inputs
    raise UsageError(f"-shape {','.join(map(str, shape))}: the model does not take it ({reason})")


def numbers(text: str) -> list[int]:
    if min(shape := [int(number) for number in text.split(",")]) < 1:
        raise ValueError
    return shape


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
