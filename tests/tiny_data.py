"""Tiny data sets on disk for tests, made by make_NAME for the dataset of that name."""

import hashlib
import importlib
import pickle

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10


def make_cifar10(root, monkeypatch):
    """A tiny CIFAR-10 in the layout of the real one; torchvision gets its checksums."""
    batches = root / CIFAR10.base_folder
    batches.mkdir(parents=True)

    def write(name, content):
        data = pickle.dumps(content)
        (batches / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    draw = np.random.default_rng(0)
    drawn = lambda: {"data": draw.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 3, 9, 1]}  # noqa: E731
    listed = [write(name, drawn()) for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    meta = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(CIFAR10, "train_list", listed[:5])
    monkeypatch.setattr(CIFAR10, "test_list", listed[5:])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta[1]})


def make_folder(root, _monkeypatch=None, train=2, val=1):
    """Two classes, with so many images of each for training and for validation."""
    for split, count in (("train", train), ("val", val)):
        for name in ("ant", "bee"):
            for number in range(count):
                image(root / split / name / f"{number}.jpg")


def make_tar(root, _monkeypatch=None):
    """The images of make_folder in tar shards."""
    make_folder(root / "photos")
    importlib.import_module("scripts.pack").main([str(root / "photos"), "-o", str(root)])  # a fork may have none


def make_tokens(root, _monkeypatch=None):
    """Token files as nanoGPT writes them: numbers of two bytes below 50, nothing else. Returns the folder."""
    for split, count in (("train", 1000), ("val", 100)):
        np.random.default_rng(count).integers(0, 50, count).astype(np.uint16).tofile(root / f"{split}.bin")
    return root


def image(file):
    """Write an image of noise, in a folder that is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(len(str(file))).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(file)
