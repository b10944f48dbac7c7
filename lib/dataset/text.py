"""Text as bytes, no tokenizer: the Python standard library's own source, or any file or folder."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lib.utils import seeding
from lib.utils.errors import UsageError

HELD_OUT = 20  # the last 1/20 of the text is for the test, the 1/20 before it for validation
OTHERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}  # not in every installation


def add_args(parser):
    parser.add_argument("-text_from", metavar="PATH", help="file or folder (DATA/text; else Python's own library)")
    parser.add_argument("-text_length", type=int, default=128, metavar="N", help="bytes of a sample")
    count = "samples an epoch, spread over the text; 0: as many as it fills"
    parser.add_argument("-text_samples", type=int, default=16384, metavar="N", help=count)
    parser.set_defaults(num_classes=256, arch="gpt", epochs=1, batch_size=16, lr_start=3e-3, lr_end=1e-4)
    parser.set_defaults(lr_warmup=0.05, weight_decay=0.1, clip_grad=1.0, channels=1, image_size=1)


def get_dataset(args) -> dict[str, Dataset]:
    """Return bytes (text_length,), int64, and the bytes that follow each.

    Training samples begin at places that -seed and the index decide; those of val and test, a sixteenth as many,
    stand at even distances in the last tenth of the text. Raises UsageError for a text that is not there or too
    short. Python's own library differs from one version to the next: a run on it continues on the same version.
    """
    length = args.text_length
    if args.num_classes < 256:
        raise UsageError(f"-num_classes {args.num_classes}: -dataset text has the 256 bytes")
    text = read(files_of(args))
    edges = [0, len(text) - 2 * (len(text) // HELD_OUT), len(text) - len(text) // HELD_OUT, len(text)]
    if edges[2] - edges[1] < 2 * length:
        needed = 2 * HELD_OUT * length
        raise UsageError(f"-text_length {length}: {needed} bytes of text are needed, {len(text)} are there")
    few = -(-args.text_samples // 16)
    return {
        "train": Windows(text, *edges[:2], length=length, samples=args.text_samples, seed=args.seed),
        "val": Windows(text, *edges[1:3], length=length, samples=few, seed=None),
        "test": Windows(text, *edges[2:], length=length, samples=few, seed=None),
    }


def get_transform(args):
    """Return a function from a text or bytes to the last `text_length` bytes, int64: the model gives the next one."""
    return lambda text: torch.tensor(list(text.encode() if isinstance(text, str) else text)[-args.text_length :])


class Windows(Dataset):
    """Samples of `length` bytes and their next ones from text[start:stop].

    The text is cut into as many even stretches as there are samples. Sample i begins in stretch i: at a place that
    (seed, i) decides, or without a seed at its beginning.
    """

    fixed = True
    classes = tuple(ascii(chr(byte))[1:-1] for byte in range(256))

    def __init__(self, text: np.ndarray, start: int, stop: int, *, length: int, samples: int, seed: int | None):
        self.text, self.start, self.length, self.seed = text, start, length, seed
        self.places = stop - start - length  # where a sample can begin
        fills = self.places // length
        self.samples = min(samples or fills, fills)

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (len(indices), length) each."""
        begins = [self.begin(index) for index in indices]
        rows = torch.from_numpy(np.stack([self.text[begin : begin + self.length + 1] for begin in begins])).long()
        return rows[:, :-1], rows[:, 1:]

    def begin(self, index: int) -> int:
        """Return where a sample begins in the text."""
        low, high = index * self.places // self.samples, (index + 1) * self.places // self.samples
        return self.start + low + (0 if self.seed is None else seeding.mix(self.seed, index) % (high - low))


def read(files: list[Path]) -> np.ndarray:
    """Return the bytes of all files. One file is mapped and may be larger than memory; several are read into it."""
    if len(files) == 1:
        return np.memmap(files[0], np.uint8, "r")
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def files_of(args) -> list[Path]:
    """Return the files to read, sorted, without hidden ones. Raises UsageError if there are none."""
    given = Path(args.text_from) if args.text_from else Path(args.data) / "text"
    if given.is_file():
        return [given]
    library = not args.text_from and not given.exists()
    root = Path(sysconfig.get_path("stdlib")) if library else given
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and not (library and name in OTHERS)]
        files += [Path(folder, name) for name in names if name.endswith(".py" if library else "")]
    files = sorted(file for file in files if not file.name.startswith(".") and file.is_file())
    if not files:
        raise UsageError(f"-text_from {root}: no such file, or a folder without files")
    return files
