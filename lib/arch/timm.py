"""Each image model of timm by its name: -timm_name convnext_nano. It needs `pip install timm`."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lib.utils.errors import UsageError, suggest


def add_args(parser):
    parser.add_argument("-timm_name", default="resnet18", metavar="NAME", help="as convnext_nano, resnet50.a1_in1k")
    parser.set_defaults(channels_last=True)


def get_model(args, **pretrained) -> nn.Module:
    """(B, channels, H, W) to (B, num_classes). Raises UsageError if there is no timm, or no such model in it."""
    try:
        import timm  # the package: imports are absolute
    except ModuleNotFoundError:
        raise UsageError("-arch timm: the package timm is not installed: uv pip install timm") from None
    name, names = args.timm_name, timm.list_models() + timm.list_pretrained()
    if name not in names:
        raise UsageError(f"-timm_name {name}: timm has no such model{suggest(name, names, most=5)}")
    options = pretrained or {"num_classes": args.num_classes}
    if timm.get_pretrained_cfg(name).fixed_input_size:
        options["img_size"] = args.image_size
    return timm.create_model(name, in_chans=args.channels, **options)


def get_weights(args) -> dict[str, Tensor]:
    """Return the weights for -weights imagenet, of torch.hub's folder or as timm finds them, or raise OSError."""
    source = get_model(args).pretrained_cfg["hf_hub_id"]
    file = Path(torch.hub.get_dir(), "checkpoints", f"{Path(source).name}.safetensors")
    options = {"pretrained_cfg_overlay": {"file": str(file)}} if file.is_file() else {}
    try:
        return get_model(args, pretrained=True, **options).state_dict()
    except OSError as error:
        raise OSError(
            f"{str(error).rstrip('.')}: put https://huggingface.co/{source}/resolve/main/model.safetensors at {file}"
        ) from None
