"""CIFAR-10: 60,000 colour images of 32x32 pixels in 10 classes, downloaded into -data once."""

import contextlib
import fcntl
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.transforms.functional import pil_to_tensor

from lib.utils.data import photos
from lib.utils.data.tensors import Tensors
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, 0 to 1
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PAD = 4  # most pixels by which a training image is shifted each way


def add_args(parser):
    parser.set_defaults(num_classes=10, channels=3, image_size=32, arch="resnet", epochs=30, batch_size=128)
    parser.set_defaults(lr_warmup=1.0, weight_decay=0.05)


def get_dataset(args) -> dict[str, Tensors]:
    """Return 45,000 training, 5,000 validation (the last of the training files) and 10,000 test samples, in memory.

    Images (3, 32, 32), uint8, are normalized on the device. Those to train on are also shifted by up to 4 pixels each
    way and mirrored at random (He et al., arXiv:1512.03385, section 4.2). Raises UsageError if the files are not in
    -data and cannot be downloaded.
    """
    (images, labels), test = load(args.data)
    split = len(labels) - len(labels) // 10
    still = Pixels(MEAN, STD)
    moving = Pixels(MEAN, STD, PAD, mirror=True) if args.augment else still
    return {
        "train": Tensors(images[:split], labels[:split], on_device=moving, classes=CLASSES),
        "val": Tensors(images[split:], labels[split:], on_device=still, classes=CLASSES),
        "test": Tensors(*test, on_device=still, classes=CLASSES),
    }


def get_transform(args):
    """Return a function from an image, made 32 pixels wide and high, to the floats (3, 32, 32) of evaluation."""
    pixels = Pixels(MEAN, STD)
    return lambda image: pixels.normalize(pil_to_tensor(photos.view(image, "RGB", 32)))


def load(data: str) -> list[tuple[Tensor, Tensor]]:
    """Return the training and test files as uint8 images (N, 3, 32, 32) and labels (N,), downloaded first if need be.

    One process downloads, the others wait for it: on each machine, or once for all where `data` is a shared folder
    with working locks. torchvision checks the files' digests before it opens them.
    """
    try:
        with contextlib.suppress(RuntimeError):  # not there, damaged, or just being unpacked by another
            return _read(data)
        Path(data).mkdir(parents=True, exist_ok=True)
        with Path(data, "cifar10.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            return _read(data, download=True)
    except (OSError, RuntimeError) as error:
        missing = f"-data {data}: CIFAR-10 is missing or damaged there, and cannot be downloaded ({error})"
        raise UsageError(f"{missing}; put {CIFAR10.filename} from {CIFAR10.url} there") from None


def _read(data, download=False):
    files = [CIFAR10(data, train=train, download=download) for train in (True, False)]
    return [(torch.from_numpy(one.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(one.targets)) for one in files]
