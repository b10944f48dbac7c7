"""Noise, for speed tests without data: images in the shape of ImageNet's."""

import torch
from torch.utils.data import Dataset, Subset

from lib.utils.data.tensors import Tensors
from lib.utils.data.transforms import Pixels

IMAGES = 61  # different ones


def add_args(parser):
    parser.add_argument("-fake_samples", type=int, default=1000, metavar="N", help="training samples; val: a tenth")
    parser.set_defaults(arch="resnet", channels=3, image_size=224, num_classes=1000)


def get_dataset(args) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, floats on the device, and classes: always the same."""
    shape = (args.channels, args.image_size, args.image_size)
    counts = {"train": args.fake_samples, "val": max(1, args.fake_samples // 10)}
    return {part: noise(counts[part], shape, args.num_classes, seed) for seed, part in enumerate(counts)}


def noise(samples: int, shape: tuple[int, int, int], classes: int, seed: int) -> Dataset:
    """Return a few random images, again and again: as many samples as one likes cost little time and memory."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (IMAGES, *shape), dtype=torch.uint8, generator=generator)
    few = Tensors(images, torch.randint(classes, (IMAGES,), generator=generator), on_device=Pixels((0.5,), (0.29,)))
    return Subset(few, [number % IMAGES for number in range(samples)])
