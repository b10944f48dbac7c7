"""Each classification model of torchvision by its name: -torchvision_name resnet50."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision import models

from lib.utils.errors import UsageError, suggest


def add_args(parser):
    parser.add_argument("-torchvision_name", default="resnet18", metavar="NAME", help="as vit_b_16, convnext_tiny")
    parser.set_defaults(channels_last=True)


def get_model(args, weights=None) -> nn.Module:
    """(B, 3, H, W) to (B, num_classes). Raises UsageError for a name, channels or an image size that do not fit."""
    name, size, names = args.torchvision_name, args.image_size, models.list_models(module=models)
    if name not in names:
        hint = suggest(name, names, most=5)
        raise UsageError(f"-torchvision_name {name}: torchvision has no such classifier{hint}")
    if args.channels != 3:
        raise UsageError(f"-channels {args.channels}: torchvision's models take 3; -arch resnet takes others")
    options = {"weights": weights, "progress": False} if weights else {"num_classes": args.num_classes}
    if name in ("googlenet", "inception_v3"):  # their weights are for other mean values; no further heads
        options |= {"transform_input": True} | ({} if weights else {"aux_logits": False, "init_weights": True})
    options |= {"vit": {"image_size": size}, "maxvit": {"input_size": (size, size)}}.get(name.partition("_")[0], {})
    try:
        return models.get_model(name, **options)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"-image_size {size} -torchvision_name {name}: {str(error).splitlines()[0]}") from None


def get_weights(args) -> dict[str, Tensor]:
    """Return the weights for -weights imagenet, of torch.hub's cache or downloaded. Raises OSError."""
    best = models.get_model_weights(args.torchvision_name).DEFAULT
    try:
        return get_model(args, best).state_dict()
    except OSError as error:
        file = Path(torch.hub.get_dir(), "checkpoints", Path(best.url).name)
        raise OSError(f"{error}: put {best.url} at {file}") from None
