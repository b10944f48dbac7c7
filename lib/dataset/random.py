"""Random numbers to random numbers: a regression that needs no data, for trying a set-up."""

import torch

from lib.utils.data.tensors import Tensors


def add_args(parser):
    parser.add_argument("-random_samples", type=int, default=2048, metavar="N", help="samples to make")
    parser.set_defaults(arch="mlp", loss="mse", channels=1, image_size=32, num_classes=1024)


def get_dataset(args) -> Tensors:
    """Return inputs (channels * image_size ** 2,) and targets (num_classes,), normal numbers that -seed decides."""
    generator = torch.Generator().manual_seed(args.seed)
    inputs = torch.randn(args.random_samples, args.channels * args.image_size**2, generator=generator)
    targets = torch.randn(args.random_samples, args.num_classes, generator=generator)
    return Tensors(inputs, targets)
