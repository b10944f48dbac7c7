"""Each classification model of torchvision by its name: -torchvision_name resnet50."""

from torch import Tensor, nn
from torchvision import models

from lib.utils.errors import UsageError


def add_args(parser):
    parser.add_argument("-torchvision_name", default="resnet18", metavar="NAME", help="as vit_b_16, convnext_tiny")
    parser.set_defaults(channels_last=True)


def get_model(args, weights=None) -> nn.Module:
    """(B, 3, H, W) to (B, num_classes). Raises UsageError for a name or an image size that does not fit."""
    name, size = args.torchvision_name, args.image_size
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
    return get_model(args, models.get_model_weights(args.torchvision_name).DEFAULT).state_dict()
