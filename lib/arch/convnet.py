"""A small convolutional network for images of 4 to about 64 pixels."""

import math

from torch import nn


def add_args(parser):
    parser.add_argument("-convnet_width", type=int, default=24, metavar="N", help="channels of the first layer")
    parser.add_argument("-convnet_dropout", type=float, default=0.1, metavar="P", help="share of features dropped")
    parser.set_defaults(channels_last=True)


def get_model(args) -> nn.Module:
    """(B, C, H, W) to (B, num_classes): convolutions at full, half and quarter size, then the mean over places."""
    width = args.convnet_width
    return nn.Sequential(
        *_layer(args.channels, width),
        *_layer(width, 2 * width),
        nn.MaxPool2d(2),
        *_layer(2 * width, 2 * width),
        nn.MaxPool2d(2),
        *_layer(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(args.convnet_dropout),
        nn.Linear(4 * width, args.num_classes),
    )


def _layer(before, after):
    # GroupNorm and not BatchNorm: what a sample gives does not depend on which others share its micro-batch, so any
    # number of processes trains the same (Wu and He, arXiv:1803.08494).
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(math.gcd(8, after), after), nn.GELU()
