"""torchvision's FakeData: images of noise in the shape of ImageNet's, for speed tests without data."""

from torch.utils.data import Dataset
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from lib.utils.errors import UsageError


def add_args(parser):
    parser.add_argument("-fake_samples", type=int, default=1000, metavar="N", help="training samples; val: a tenth")
    parser.set_defaults(arch="resnet", channels=3, image_size=224, num_classes=1000)


def get_dataset(args) -> dict[str, Dataset]:
    """Images (channels, image_size, image_size) from 0 to 1 and class numbers, item i always the same."""
    if args.fake_samples < 1:
        raise UsageError(f"-fake_samples {args.fake_samples}: at least 1 is needed")
    return {
        "train": _fake(args, args.fake_samples, offset=0),
        "val": _fake(args, max(1, args.fake_samples // 10), offset=args.fake_samples),
    }


def _fake(args, samples, offset):
    shape = (args.channels, args.image_size, args.image_size)
    dataset = FakeData(samples, shape, args.num_classes, transform=ToTensor(), random_offset=offset)
    dataset.fixed = True  # item i is drawn under its own seed
    return dataset
