"""A multilayer perceptron over flattened inputs."""

import itertools

from torch import nn


def add_args(parser):
    parser.add_argument("-mlp_width", type=int, default=256, metavar="N", help="features of each hidden layer")
    parser.add_argument("-mlp_depth", type=int, default=2, metavar="N", help="hidden layers; 0: a linear model")
    parser.add_argument("-mlp_dropout", type=float, default=0.0, metavar="P", help="share of features dropped")


def get_model(args) -> nn.Module:
    """(B, C, H, W), or anything with C x H x W numbers a sample, to (B, num_classes)."""
    widths = [args.channels * args.image_size**2] + [args.mlp_width] * args.mlp_depth
    layers = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
        layers += [nn.Dropout(args.mlp_dropout)] if args.mlp_dropout else []
    return nn.Sequential(*layers, nn.Linear(widths[-1], args.num_classes))
