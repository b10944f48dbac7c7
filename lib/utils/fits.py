"""Whether the data fits the flags and the model, found out before a run writes anything."""

import warnings

import torch
from torch import Tensor, nn

from lib.utils import distributed
from lib.utils.data import fetch, prefetch
from lib.utils.data.options import whole_dataset
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def check(splits: dict, model: nn.Module, loss, args, world: World):
    """Raises UsageError where samples are not what the flags say, and the model or the loss fails on them for that.

    A model that takes other sizes than the flags name is free to. Data that is read by -workers is not looked at:
    files that a dataset opens here would be open in all of them.
    """
    for name, part in splits.items():
        dataset = whole_dataset(part)
        if fetch.workers(args.workers, part, world) and not hasattr(dataset, "tensors"):
            continue
        ends = [0, len(part) - 1]
        batch = prefetch.Finish(part, args.seed, distributed.CPU)(0, ends, fetch.Fetch(part, args.seed)[0, ends])
        if not (isinstance(batch, (tuple, list)) and list(map(torch.is_tensor, batch)) == [True, True]):
            continue
        inputs, targets = (values.cpu().clone() for values in batch)
        if part is dataset and not targets.is_floating_point():
            low, high = _range(dataset)
            targets[0], targets[-1] = min(int(targets.min()), low), max(int(targets.max()), high)
        odd = [*_odd_inputs(inputs, args), *_odd_targets(targets, args)]
        if odd and (error := _failure(model, loss, inputs, targets)):
            raise UsageError(f"-dataset {args.dataset} on -arch {args.arch}: {'; '.join(odd)}, in its {name} split "
                             f"({error})")  # fmt: skip


def _range(dataset) -> tuple[int, int]:
    """The lowest and highest class number in a dataset that has them all at hand, in memory or as torchvision's
    `targets`."""
    tensors = getattr(dataset, "tensors", None)
    labels = tensors[1] if tensors else getattr(dataset, "targets", ())
    return tuple(map(int, torch.as_tensor(labels).aminmax())) if len(labels) else (0, 0)


def _odd_inputs(inputs: Tensor, args):
    channels, size = args.channels, args.image_size
    if inputs.ndim == 4:
        shape = "x".join(map(str, inputs.shape[1:]))
        if inputs.shape[1] != channels:
            yield f"-channels is {channels} and the images are {shape}"
        if set(inputs.shape[2:]) != {size}:
            yield f"-image_size is {size} and the images are {shape}"
    elif inputs.ndim == 2 and inputs.shape[1] != channels * size**2:
        count = inputs.shape[1]
        yield f"-channels {channels} -image_size {size} are {channels * size**2} numbers and a sample has {count}"


def _odd_targets(targets: Tensor, args):
    classes = targets.ndim == 1 and not targets.is_floating_point()
    if classes != (args.loss == "cross_entropy"):
        yield f"-loss is {args.loss} and the targets are {'class numbers' if classes else 'no class numbers'}"
    elif classes and int(targets.max()) >= args.num_classes:
        yield f"-num_classes is {args.num_classes} and there is a class {int(targets.max())}, counted from 0"
    elif classes and int(targets.min()) < 0:
        yield f"there is a class {int(targets.min())}: they are counted from 0"
    elif targets.ndim == 2 and targets.shape[1] != args.num_classes:
        yield f"-num_classes is {args.num_classes} and a target has {targets.shape[1]} numbers"


def _failure(model, loss, inputs, targets) -> str:
    """What the model or the loss says against the samples, in a line; "" if they get along."""
    was, like = model.training, next(model.parameters(), inputs)  # on meta, where the model is without memory
    inputs = inputs.to(like.device, like.dtype if inputs.is_floating_point() else inputs.dtype)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss(model.eval()(inputs), targets.to(like.device))
    except (RuntimeError, ValueError, IndexError, UsageError) as error:
        return " ".join(str(error).split())[:200]
    finally:
        model.train(was)
    return ""
