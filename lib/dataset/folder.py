"""Images in class folders: DATA/train/CLASS/*.jpg, DATA/val/CLASS/*.jpg and, if there, DATA/test/CLASS/*.jpg."""

import logging
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError

COLOUR, GREY = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.449,), (0.226,))  # mean, deviation (ImageNet's)
# What Pillow raises for damaged files.
BROKEN = (OSError, SyntaxError, TypeError, ValueError, struct.error, Image.DecompressionBombError)
NEEDED = "-dataset folder reads DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, and DATA/test if it is there"

log = logging.getLogger(__name__)


def add_args(parser):
    policies = ("error", "skip")
    parser.add_argument(
        "-folder_unreadable",
        choices=policies,
        default="error",
        help="a damaged image stops the run, or all are read at the start and such left out",
    )
    parser.set_defaults(arch="resnet", channels=3, image_size=224)


def describe(args) -> dict[str, int]:
    """The number of classes, as the training folder has it. Raises UsageError if there is no such folder."""
    return {"num_classes": len(class_names(args.data))}


def get_dataset(args) -> dict[str, Dataset]:
    """Images (channels, image_size, image_size), uint8, and class numbers in the order of the folders' names.

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


def class_names(data: str) -> list[str]:
    """The classes: the folders in DATA/train, sorted; hidden ones are none. Raises UsageError if there are none."""
    names = _folders(data, "train")
    if not names:
        raise UsageError(f"-data {data}: no class folders in {Path(data) / 'train'}; {NEEDED}")
    return names


class Images(Dataset):
    """Image files with their class numbers, each read when it is asked for."""

    def __init__(self, files: list[tuple[str, int]], *, mode: str, transform, fixed: bool, on_device):
        self.files, self.mode, self.transform, self.fixed, self.on_device = files, mode, transform, fixed, on_device

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        """The image as a tensor, and its class number. Raises UsageError naming a file that cannot be read."""
        file, label = self.files[index]
        try:
            image = read(file, self.mode)
        except BROKEN as error:
            raise UsageError(f"{file}: not a readable image ({error}); mend it, or -folder_unreadable skip") from None
        return self.transform(image), label


def read(file: str, mode: str) -> Image.Image:
    """The whole image, decoded, in Pillow's mode L or RGB."""
    with Image.open(file) as image:
        return image.convert(mode)


def _images(args, part, names):
    folder = Path(args.data) / part
    unknown = sorted(set(_folders(args.data, part)) - set(names))
    if unknown:
        raise UsageError(f"-data {args.data}: {folder / unknown[0]} is a class that train has not")
    mode, (mean, deviation) = ("L", GREY) if args.channels == 1 else ("RGB", COLOUR)
    files = _files(args.data, part, names)
    if args.folder_unreadable == "skip":
        files = _readable(files, mode, args.data, part)
    drawn, size = part == "train" and args.augment, args.image_size
    steps = [transforms.RandomResizedCrop(size)] if drawn else _centre_view(size)
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    pixels = Pixels(mean, deviation, mirror=drawn)
    return Images(files, mode=mode, transform=transform, fixed=not drawn, on_device=pixels)


def _folders(data, part):
    try:
        entries = sorted((Path(data) / part).iterdir())
    except OSError as error:
        raise UsageError(f"-data {data}: cannot read {Path(data) / part} ({error.strerror}); {NEEDED}") from None
    return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _files(data, part, names):
    classes = {name: label for label, name in enumerate(names)}
    files = make_dataset(str(Path(data) / part), classes, IMG_EXTENSIONS, allow_empty=True)
    labels = {label for _, label in files}
    empty = [name for name in _folders(data, part) if classes[name] not in labels]
    if empty or not files:
        where = Path(data) / part / (empty[0] if empty else "")
        raise UsageError(f"-data {data}: no images in {where} (of {', '.join(IMG_EXTENSIONS)})")
    return files


def _readable(files, mode, data, part):
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock
        faults = list(pool.map(lambda item: _fault(item[0], mode), files))
    for (file, _), fault in zip(files, faults, strict=True):
        if fault:
            log.warning("left out: %s (%s)", file, fault)
    kept = [item for item, fault in zip(files, faults, strict=True) if not fault]
    if not kept:
        raise UsageError(f"-data {data}: none of the {len(files)} images in {Path(data) / part} can be read")
    return kept


def _fault(file, mode):
    try:
        read(file, mode)
    except BROKEN as error:
        # What the disk or a permission says may differ between processes: no reason to leave a file out.
        if getattr(error, "errno", None):
            raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
        return str(error) or type(error).__name__
    return ""


def _centre_view(size):
    return [transforms.Resize(round(size * 8 / 7)), transforms.CenterCrop(size)]
