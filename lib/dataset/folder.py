"""Images in class folders: DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg and, if there, DATA/test/CLASS/*.jpg."""

import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

COLOUR, GREY = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.449,), (0.226,))  # mean, deviation (ImageNet's)
DEBRIS = r"/(\.|__MACOSX/|@eaDir/)"  # in a path: hidden names, and folders that systems make
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
    return lambda image: still.on_device.normalize(still.transform(still.upright(image)))


def class_names(data: str, part: str = "train") -> list[str]:
    """Return the class folders in DATA/PART, sorted, no hidden ones. Raises UsageError for none, or one in train."""
    folder = Path(data) / part
    names = sorted(
        one.name for one in folder.glob("[!.]*") if one.is_dir() and not re.search(DEBRIS, f"/{one.name}/")
    )
    if not names:
        raise UsageError(f"-data {data}: no class folders in {folder}; {NEEDED}")
    if part == "train" and len(names) == 1:
        raise UsageError(f"-data {data}: {names[0]} is the only class folder in {folder}: two or more are needed")
    return names


class Images(Dataset):
    """Image files with their class numbers, each read when it is needed; `drawn`: cropped and mirrored at random."""

    def __init__(self, files: list[tuple[str, int]], classes: list[str], args, drawn: bool):
        self.files, self.classes, self.fixed = files, classes, not drawn
        self.least = args.image_size * 4 if drawn else round(args.image_size * 8 / 7)  # pixels of a JPEG's sides
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
                image = self.upright(opened)
        except Exception as error:  # Pillow raises many kinds for bad content, none with a number
            if isinstance(error, MemoryError) or getattr(error, "errno", None):
                raise
            raise UsageError(f"{file}: not a readable image ({error}); fix or remove it") from None
        return self.transform(image), label

    def upright(self, image: Image.Image) -> Image.Image:
        """Return an image as its EXIF says that it is held, in 8 bits; a JPEG no larger than crops of 8 % need.

        Raises ValueError for values whose range from black to white is not known.
        """
        image.draft(self.mode, (self.least, self.least))
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"mode {image.mode} has no known range: save it with 8 or 16 bits")
        return image.convert(self.mode)


def _images(args, part, names):
    folder, classes = Path(args.data) / part, class_names(args.data, part)
    unknown = sorted(set(classes) - set(names))
    if unknown:
        raise UsageError(f"-data {args.data}: {folder / unknown[0]} is not a class in train")

    def is_photo(file: str) -> bool:
        return file.lower().endswith(IMG_EXTENSIONS) and not re.search(DEBRIS, file.removeprefix(str(folder)))

    try:
        files = make_dataset(str(folder), {name: names.index(name) for name in classes}, is_valid_file=is_photo)
    except FileNotFoundError as error:  # a class without images
        raise UsageError(f"-data {args.data}: {folder}: {error}") from None
    return Images(files, names, args, drawn=part == "train" and args.augment)
