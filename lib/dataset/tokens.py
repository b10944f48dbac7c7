"""Token files of any size, DATA/train.bin and val.bin, as scripts/make_tokens.py, nanoGPT and others write them."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lib.utils import seeding
from lib.utils.errors import UsageError


def add_args(parser):
    parser.add_argument("-tokens_length", type=int, default=256, metavar="N", help="tokens of a sample")
    parser.add_argument("-tokens_samples", type=int, default=0, metavar="N", help="training samples an epoch; 0: all")
    parser.set_defaults(num_classes=50257, arch="gpt", epochs=1, batch_size=16, lr_start=1e-3, lr_end=1e-4)  # GPT-2's
    parser.set_defaults(lr_warmup=0.05, weight_decay=0.1, clip_grad=1.0, channels=1, image_size=1)


def describe(args) -> dict[str, int]:
    """Return the size of the vocabulary, if scripts/make_tokens.py has written it down."""
    meta = Path(args.data) / "meta.json"
    return {"num_classes": json.loads(meta.read_text())["vocabulary"]} if meta.is_file() else {}


def get_dataset(args) -> dict[str, Dataset]:
    """Return tokens (tokens_length,), int64, and the token that follows each.

    Training samples begin at places that -seed and the index decide; with `-shuffle no` they stand in a row, as those
    of val and test do, which are a sixteenth as many. Tokens are uint16, or uint32 if -num_classes is above 65,536.
    """
    files = [Path(args.data) / f"{split}.bin" for split in ("train", "val", "test")]
    if not files[0].is_file():
        raise UsageError(f"-data {args.data}: no train.bin there; scripts/make_tokens.py TEXTS -o DIR makes one")
    few = -(-args.tokens_samples // 16)
    parts = {file.stem: Windows(file, args, few) for file in files[1:] if file.is_file()}
    return {"train": Windows(files[0], args, args.tokens_samples, args.seed if args.shuffle else None), **parts}


class Windows(Dataset):
    """Samples from a file, which is cut into as many even stretches as there are samples.

    Sample i begins in stretch i: at a place that (seed, i) decides, or without a seed at its beginning.
    """

    fixed = True

    def __init__(self, file: Path, args, samples: int, seed: int | None = None):
        self.file, self.length, self.vocabulary, self.seed = file, args.tokens_length, args.num_classes, seed
        self.type = np.dtype("uint16" if self.vocabulary <= 1 << 16 else "uint32")
        self.tokens = file.stat().st_size // self.type.itemsize
        self.fills = max(0, self.tokens - 1) // self.length  # how many samples stand in a row
        self.samples = min(samples or self.fills, self.fills)

    def __len__(self):
        return self.samples

    def __getitem__(self, index) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (length,) each. Raises UsageError for a token that -num_classes leaves out."""
        offset = self.begin(index) * self.type.itemsize
        window = np.memmap(self.file, self.type, "r", offset, (self.length + 1,)).astype(np.int64)
        if window.max() >= self.vocabulary:
            raise UsageError(f"-num_classes {self.vocabulary}: {self.file} holds the token {window.max()}")
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])

    def begin(self, index: int) -> int:
        """Return where a sample begins in the file."""
        low, high = (number * self.fills // self.samples * self.length for number in (index, index + 1))
        places = min(high, self.tokens - self.length) - low
        return low + (0 if self.seed is None else seeding.mix(self.seed, index) % places)
