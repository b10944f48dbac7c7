"""torchvision's residual networks, with a stem for small images where they are small."""

import torchvision
from torch import Tensor, nn

SMALL = 64  # pixels: up to here the usual stem, which divides height and width by 4, would leave too little


def add_args(parser):
    parser.add_argument("-resnet_depth", type=int, choices=(18, 34, 50, 101, 152), default=18, help="layers")
    parser.set_defaults(channels_last=True)


def get_model(args) -> nn.Module:
    """(B, C, H, W) to (B, num_classes).

    He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385; the small stem, a 3x3 convolution and
    no pooling, is the one of its section 4.2.
    """
    model = getattr(torchvision.models, f"resnet{args.resnet_depth}")(num_classes=args.num_classes)
    if args.image_size <= SMALL:
        model.conv1 = _first(args.channels, size=3, stride=1)
        model.maxpool = nn.Identity()
    elif args.channels != 3:
        model.conv1 = _first(args.channels, size=7, stride=2)
    return model


def get_weights(args) -> dict[str, Tensor]:
    """Return the weights for -weights imagenet, of torch.hub's cache or downloaded. Raises OSError."""
    return getattr(torchvision.models, f"resnet{args.resnet_depth}")(weights="DEFAULT", progress=False).state_dict()


def _first(channels, size, stride):
    conv = nn.Conv2d(channels, 64, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    return conv
