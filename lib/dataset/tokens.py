"""Tokens of text: of token files, DATA/train.bin and val.bin, or of texts, whose bytes are the tokens.

Token files are those of scripts/make_tokens.py, nanoGPT, llm.c and others, and may be larger than memory:
scripts/token_files.py opens them.
"""

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import scripts.token_files as token_files
from lib.utils import seeding
from lib.utils.checkpoint.run_folder import read_json
from lib.utils.errors import UsageError
from lib.utils.files import is_debris, split_of


def add_args(parser):
    parser.add_argument("-tokens_length", type=int, default=128, metavar="N", help="tokens of a sample")
    count = "training samples an epoch, spread over the text; 0, or too many: as many as it holds"
    parser.add_argument("-tokens_samples", type=int, default=16384, metavar="N", help=count)
    parser.set_defaults(data=sysconfig.get_path("stdlib"))  # a text that is always there: Python's own library
    parser.set_defaults(arch="gpt", epochs=1, batch_size=16, lr_start=3e-3, lr_end=1e-4)
    parser.set_defaults(lr_warmup=0.05, weight_decay=0.1, clip_grad=1.0, channels=1, image_size=1)


def describe(args) -> dict[str, int | None]:
    """Return the size of the vocabulary: 256 bytes, or what scripts/make_tokens.py has written down, or GPT-2's."""
    if not find_files(args.data):
        return {"num_classes": 256}
    if (meta := read_meta(args.data)) is not None:
        return {"num_classes": meta.get("vocabulary")}
    is_unknown = Path(args.data, "meta.pkl").exists()  # nanoGPT's, which could run any code: it is not read
    return {"num_classes": None if is_unknown else 50257}


def get_dataset(args) -> dict[str, Dataset]:
    """Return tokens (tokens_length,), int64, and the token that follows each.

    Training samples begin at places that follow from -seed and the index, the same in each epoch. With `-shuffle no`
    they are evenly spread, as those of val and test are: a sixteenth as many. Token files hold uint16, or uint32 if
    -num_classes is above 65,536. Python's own library differs from version to version: a run needs the same one.
    """
    if files := find_files(args.data):
        meta = read_meta(args.data) or {}
        if args.num_classes is None:
            raise UsageError(f"{args.data}: meta.json has no vocabulary, or is odd: give -num_classes, of all tokens")
        parts = {split: token_files.open_split(split, some, args.num_classes, meta) for split, some in files.items()}
    else:
        parts = token_files.read_texts(args.data)
    for split, part in parts.items():
        if not 0 < args.tokens_length < len(part):
            raise UsageError(f"-tokens_length {args.tokens_length}: {split} has {len(part):,} tokens: too few")
    train = Windows(parts.pop("train"), args, args.tokens_samples, args.seed if args.shuffle else None)
    few = -(-args.tokens_samples // 16)
    return {"train": train, **{split: Windows(part, args, few) for split, part in parts.items()}}


def get_transform(args):
    """Return a function from a text or bytes to its last bytes, int64: the model gives the next one."""

    def transform(text: str | bytes) -> Tensor:
        if args.num_classes != 256:
            raise UsageError("only models of bytes (-num_classes 256) read a text; predict.load takes tokens, too")
        return torch.tensor([*(text.encode() if isinstance(text, str) else text)][-args.tokens_length :])

    return transform


class Windows(Dataset):
    """Samples from a sequence of tokens, which is cut into as many equal stretches as there are samples.

    Sample i begins in stretch i: at a place that follows from (seed, i), or without a seed at its beginning.
    """

    def __init__(self, tokens: "np.ndarray | token_files.Joined", args, samples: int, seed: int | None = None):
        self.tokens, self.length, self.vocabulary, self.seed = tokens, args.tokens_length, args.num_classes, seed
        self.fills = (len(tokens) - 1) // self.length  # how many samples stand in a row
        self.samples = min(samples, self.fills) if samples > 0 else self.fills
        size = token_files.CHECKED
        parts = [tokens[at : at + size] for at in (0, len(tokens) // 2, max(0, len(tokens) - size))]
        self.fingerprint = " ".join(str(zlib.crc32(part.tobytes())) for part in parts)
        if self.vocabulary == 256:
            self.classes = [ascii(chr(byte))[1:-1] for byte in range(256)]

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (len(indices), length) each. Raises UsageError if -num_classes is too small."""
        begins = [self.begin(index) for index in indices]
        rows = np.stack([self.tokens[begin : begin + self.length + 1] for begin in begins]).astype(np.int64)
        if rows.max() >= self.vocabulary:
            raise UsageError(f"-num_classes {self.vocabulary}: the data has the token {rows.max()}")
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])

    def begin(self, index: int) -> int:
        """Return where a sample begins."""
        low, high = (number * self.fills // self.samples * self.length for number in (index, index + 1))
        places = min(high, len(self.tokens) - self.length) - low
        return low + (0 if self.seed is None else seeding.hash_ints(self.seed, index) % places)


def find_files(data: str) -> dict[str, list[Path]]:
    """Return the token files of each split, in order; none without those of train.

    They are DATA/train.bin, or else those with the word train (training) in their names, or those in such a folder.
    """
    loose, nested = (sorted(Path(data).glob(one)) for one in ("*.bin", "*/*.bin"))
    found = {}
    for split in ("train", "val", "test"):
        named = [file for file in loose if split_of(file.stem) == split and not is_debris(file.name)]
        inner = [file for file in nested if split_of(file.parent.name) == split and not is_debris(file.name)]
        alone = [file for file in inner if file.parent.name == split]
        found[split] = [file for file in named if file.stem == split] or named or alone or inner
    return {split: some for split, some in found.items() if some} if found["train"] else {}


def read_meta(data: str) -> dict | None:
    """Return what meta.json says, None without one: {} if scripts/make_tokens.py has not written it."""
    file = Path(data) / "meta.json"
    if not file.exists():
        return None
    meta = read_json(file, follow=True)
    counts = [meta.get("vocabulary"), *(meta.get(split, 1) for split in ("train", "val", "test"))]
    is_known = meta.get("type", "uint16") in ("uint16", "uint32")
    return meta if is_known and all(type(one) is int and 0 < one < 1 << 48 for one in counts) else {}
