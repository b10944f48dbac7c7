"""Images in class folders: DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg and, if there, DATA/test/CLASS/*.jpg."""

from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

COLOUR, GREY = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.449,), (0.226,))  # mean, deviation (ImageNet's)
NEEDED = "-dataset folder reads DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, and DATA/test if it is there"


def add_args(parser):
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """Return the number of classes in the training folder. Raises UsageError if there is no such folder."""
    return {"num_classes": len(class_names(args.data))}


def get_dataset(args) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, and class numbers in the order of the folders' names.

    Training images are cropped and mirrored at random (Szegedy et al., arXiv:1409.4842), the others resized and
    cropped at the centre; on the device they are normalized. Raises UsageError naming what is missing, empty or
    unreadable.
    """
    names = class_names(args.data)
    if len(names) > args.num_classes:
        raise UsageError(f"-num_classes {args.num_classes}: {args.data}/train has {len(names)} class folders")
    if args.channels not in (1, 3):
        raise UsageError(f"-channels {args.channels}: -dataset folder reads images in 1 (grey) or 3 (colour)")
    parts = [part for part in ("train", "val", "test") if part != "test" or (Path(args.data) / part).is_dir()]
    return {part: _images(args, part, names) for part in parts}


def get_transform(args):
    """Return a function from an image of any size to the floats (channels, image_size, image_size) of evaluation."""
    still = Images([], [], args, drawn=False)
    return lambda image: still.on_device.normalize(still.transform(image.convert(still.mode)))


def class_names(data: str, part: str = "train") -> list[str]:
    """Return the class folders in DATA/PART, sorted, no hidden ones. Raises UsageError if there are none."""
    folder = Path(data) / part
    names = sorted(one.name for one in folder.glob("[!.]*") if one.is_dir())
    if not names:
        raise UsageError(f"-data {data}: no class folders in {folder}; {NEEDED}")
    return names


class Images(Dataset):
    """Image files with their class numbers, each read when it is needed; `drawn`: cropped and mirrored at random."""

    def __init__(self, files: list[tuple[str, int]], classes: list[str], args, drawn: bool):
        self.files, self.classes, self.fixed = files, classes, not drawn
        self.mode, (mean, deviation) = ("L", GREY) if args.channels == 1 else ("RGB", COLOUR)
        centre_view = [transforms.Resize(round(args.image_size * 8 / 7)), transforms.CenterCrop(args.image_size)]
        steps = [transforms.RandomResizedCrop(args.image_size)] if drawn else centre_view
        self.transform = transforms.Compose([*steps, transforms.PILToTensor()])
        self.on_device = Pixels(mean, deviation, mirror=drawn)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        """Return the image as a tensor, and its class number. Raises UsageError naming a file that cannot be read."""
        file, label = self.files[index]
        try:
            with Image.open(file) as opened:
                image = opened.convert(self.mode)
        except Exception as error:  # noqa: BLE001  # Pillow raises many kinds
            raise UsageError(f"{file}: not a readable image ({error}); fix or remove it") from None
        return self.transform(image), label


def _images(args, part, names):
    folder, classes = Path(args.data) / part, class_names(args.data, part)
    unknown = sorted(set(classes) - set(names))
    if unknown:
        raise UsageError(f"-data {args.data}: {folder / unknown[0]} is not a class in train")
    try:
        files = make_dataset(str(folder), {name: names.index(name) for name in classes}, IMG_EXTENSIONS)
    except FileNotFoundError as error:  # a class without images
        raise UsageError(f"-data {args.data}: {folder}: {error}") from None
    return Images(files, names, args, drawn=part == "train" and args.augment)
