"""Images in class folders: DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg and, if there, DATA/test/CLASS/*.jpg."""

import os
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor

from lib.utils.data import photos
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError, printable
from lib.utils.files import is_debris

COLOUR, GREY = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.449,), (0.226,))  # mean, deviation (ImageNet's)


def add_args(parser):
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """Return the number of classes in the training folder. Raises UsageError if there is no such folder."""
    return {"num_classes": len(class_names(args.data))}


def get_dataset(args) -> dict[str, Dataset]:
    """Return images (channels, image_size, image_size), uint8, and class numbers in the order of the folders' names.

    Training images are cropped and mirrored at random (Szegedy et al., arXiv:1409.4842), of the others the centre is
    taken; on the device they are normalized. Raises UsageError naming what is missing, empty or ambiguous.
    """
    names = class_names(args.data)
    parts = [part for part in ("train", "val", "test") if part != "test" or (Path(args.data) / part).is_dir()]
    others = Counter()  # files that are not read, by ending
    images = {part: find_images(args, part, names, others) for part in parts}
    if others:
        vars(images["train"])["log_lines"] = [f"-data {args.data}: {photos.describe(others)}"]
    return images


def get_transform(args):
    """Return a function from an image of any size to the floats (channels, image_size, image_size) of evaluation."""
    still = Images([], [], args, drawn=False)
    return lambda image: still.on_device.normalize(still.to_tensor(image))


def class_names(data: str, part: str = "train") -> list[str]:
    """Return the class folders in DATA/PART, sorted. Raises UsageError if there are none, or only one to train on."""
    folder = Path(data) / part
    entries = folder.iterdir() if folder.is_dir() else []
    names = sorted(one.name for one in entries if one.is_dir() and not is_debris(one.name))
    if not names:
        there = sorted(one.name for one in Path(data).glob("*/")) if Path(data).is_dir() else []
        found = f"no class folders in {folder}; -dataset folder reads {folder}/CLASS/*.jpg"
        raise UsageError(f"-data {data}: {found}; {', '.join(there[:9]) or 'no folder'} is there")
    if len({unicodedata.normalize("NFKC", name).strip() for name in names}) < len(names):
        raise UsageError(f"-data {data}: classes in {folder} differ only in spaces or Unicode form: {names!a}")
    if part == "train" and len(names) == 1:
        raise UsageError(f"-data {data}: {names[0]} is the only class folder in {folder}: two or more are needed")
    return names


class Images(Dataset):
    """Image files with their class numbers, each read when it is needed; `drawn`: cropped and mirrored at random."""

    def __init__(self, files: list[tuple[str, int]], classes: list[str], args, drawn: bool):
        self.files, self.classes = files, [printable(name) for name in classes]
        self.labels = [label for _, label in self.files]
        names = "".join(f"{label} {file.removeprefix(str(Path(args.data)))}" for file, label in self.files)
        self.listing = zlib.crc32(names.encode(errors="surrogateescape"))  # by which a run knows its data, too
        self.folder, self.size, self.box = args.data, args.image_size, random_box if drawn else centre_box
        self.mode, (mean, deviation) = ("L", GREY) if args.channels == 1 else ("RGB", COLOUR)
        self.on_device = Pixels(mean, deviation, mirror=drawn)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        """Return the image as a tensor, and its class number. Raises UsageError naming a file that is no image."""
        file, label = self.files[index]
        return photos.read(file, self.to_tensor), label

    def to_tensor(self, image: Image.Image) -> Tensor:
        """Return what the model sees of an image: uint8 (channels, image_size, image_size)."""
        return pil_to_tensor(photos.view(image, self.mode, self.size, self.box))

    def sample_name(self, index: int) -> str:
        """Return a file's path below -data, for lists of bad files."""
        return printable(os.path.relpath(self.files[index][0], self.folder))


def centre_box(width: int, height: int) -> photos.Box:
    """Return the square in the centre, of 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int) -> photos.Box:
    """Return a box of 8 to 100 % of the area, drawn at random, whose sides are as 3:4, 4:3 or between."""
    frame = torch.empty(height, width, device="meta")
    top, left, rows, columns = RandomResizedCrop.get_params(frame, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3])
    return left, top, left + columns, top + rows


def find_images(args, part: str, names: list[str], others: Counter) -> Images:
    """Return the images of a part; count other files in `others`. Raises UsageError for a class that is not right."""
    folder, files = Path(args.data) / part, []
    for name in class_names(args.data, part):
        if name not in names:  # it may look like one: in other Unicode, or with a space at its end
            raise UsageError(f"-data {args.data}: {str(folder / name)!a} is not a class in train")
        found, rest = photos.find(folder / name)
        if not found:
            hint = f"; {photos.describe(rest)}" if rest else ""
            raise UsageError(f"-data {args.data}: no image in {folder}/{name}{hint}")
        files += [(file, names.index(name)) for file in found]
        others.update(rest)
    loose = (one for one in folder.iterdir() if not one.is_dir() and not is_debris(one.name))
    others.update("outside the class folders" for _ in loose)
    return Images(files, names, args, drawn=part == "train" and args.augment)
