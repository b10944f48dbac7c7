"""Makes data/digits.npz from scikit-learn's copy of the handwritten digits: python scripts/make_digits.py [FILE]."""

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np

SEED = 11  # the first whose parts hold their share of the hard digits, see data/README.md
SHARES = {"test": 0.2, "val": 0.1}  # of each class, rounded; the rest is train


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parent.parent / "data" / "digits.npz"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    file = parser.parse_args().file
    arrays = digits()
    write(file, arrays)
    parts = ", ".join(f"{np.sum(arrays['split'] == part)} {part}" for part in ("train", "val", "test"))
    print(f"{file}: {file.stat().st_size:,} bytes, {parts}")


def digits() -> dict[str, np.ndarray]:
    """Images (1797, 8, 8) uint8 from 0 to 16, labels (1797,) uint8, split (1797,) of "train", "val" and "test"."""
    from sklearn.datasets import load_digits

    source = load_digits()
    labels = source.target.astype(np.uint8)
    return {"images": source.images.astype(np.uint8), "labels": labels, "split": split(labels)}


def split(labels: np.ndarray) -> np.ndarray:
    """The split of each sample: every class is divided in the order of a hash of the sample's number.

    A hash and no random generator, so that the split is the same under any version of anything.
    """
    parts = np.full(len(labels), "train")
    for label in np.unique(labels):
        dealt = sorted(np.flatnonzero(labels == label), key=_hash)
        for part, share in SHARES.items():
            count = round(share * np.sum(labels == label))
            parts[dealt[:count]], dealt = part, dealt[count:]
    return parts


def write(file: Path, arrays: dict[str, np.ndarray]):
    """Writes the .npz atomically; numpy dates its members 1980, so the same zlib gives the same bytes."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def _hash(index):
    return hashlib.sha256(f"{SEED}:{index}".encode()).digest()


if __name__ == "__main__":
    main()
