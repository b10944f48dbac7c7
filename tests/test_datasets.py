"""The shipped datasets of images, and the model for them, beyond what test_plugins.py checks for all."""

import subprocess
import sys

import numpy as np
import pytest
import tiny_data
import torch
from PIL import Image

from lib import config
from lib.dataset import digits, folder
from lib.utils.data import loader, photos
from lib.utils.data.plan import Plan
from lib.utils.distributed import World
from lib.utils.errors import UsageError


def test_the_digits_file_is_what_its_script_makes_from_scikit_learn(tmp_path):
    script = config.ROOT / "scripts" / "make_digits.py"
    subprocess.run([sys.executable, script, tmp_path / "digits.npz"], check=True, timeout=120)
    made_now, bundled = (np.load(root / "digits.npz") for root in (tmp_path, config.ROOT / "data"))
    assert set(made_now) == set(bundled) == {"images", "labels", "split"}
    assert all(np.array_equal(made_now[name], bundled[name]) for name in bundled)
    assert (config.ROOT / "data" / "digits.npz").stat().st_size < 50_000

    from sklearn.datasets import load_digits

    assert np.array_equal(bundled["images"], load_digits().images) and bundled["images"].dtype == np.uint8
    assert np.array_equal(bundled["labels"], load_digits().target)
    for label in range(10):
        split = bundled["split"][bundled["labels"] == label]
        assert abs(np.mean(split == "test") - 0.2) < 0.01 and abs(np.mean(split == "val") - 0.1) < 0.01


def test_digits_has_each_image_once_and_augments_only_training_images():
    parts = digits.get_dataset(config.parse_args([]))
    sizes = {split: len(part) for split, part in parts.items()}
    assert sizes == {"train": 1259, "val": 179, "test": 359} and sum(sizes.values()) == 1797
    images = torch.cat([part.tensors[0] for part in parts.values()])
    assert len(images.flatten(1).unique(dim=0)) == 1797 and images.min() == 0 and images.max() == 1
    assert [part.on_device for part in parts.values()] == [digits.augment, None, None]
    assert digits.get_dataset(config.parse_args(["-augment", "no"]))["train"].on_device is None

    still = parts["train"].tensors[0][:64]
    moved, _ = digits.augment((still, None), torch.rand(64, 8))
    assert moved.shape == still.shape and 0.02 < (moved - still).abs().mean() < 0.2  # images are in 0..1


def test_a_missing_digits_file_is_named(tmp_path):
    args = config.parse_args(["-data", str(tmp_path)])
    with pytest.raises(UsageError, match=f"-data {tmp_path}: no digits.npz"):
        digits.get_dataset(args)


def test_folder_counts_its_classes_and_keeps_their_order(tmp_path):
    tiny_data.make_folder(tmp_path)
    args = config.parse_args(folder_flags(tmp_path))
    parts = folder.get_dataset(args)
    usual = config.parse_args(["-dataset", "folder", "-data", str(tmp_path)])
    assert (usual.num_classes, usual.channels, usual.arch, usual.image_size) == (2, 3, "resnet", 224)
    assert config.parse_args([*folder_flags(tmp_path), "-num_classes", "5"]).num_classes == 5
    assert args.num_classes == 2 and set(parts) == {"train", "val"}
    assert [label for _, label in parts["train"].files] == [0, 0, 1, 1]
    (tmp_path / "test" / "bee").mkdir(parents=True)
    tiny_data.image(tmp_path / "test" / "bee" / "0.png")
    assert [label for _, label in folder.get_dataset(args)["test"].files] == [1]


def test_folder_reports_missing_empty_and_unknown_classes(tmp_path):
    def refused(text, *flags):
        with pytest.raises(UsageError, match=text) as caught:
            folder.get_dataset(config.parse_args([*folder_flags(tmp_path), *flags]))
        assert "\n" not in str(caught.value)

    refused(f"-data {tmp_path}: no class folders in .*train; .*/train/CLASS")
    (tmp_path / "train" / ".hidden").mkdir(parents=True)
    refused(f"-data {tmp_path}: no class folders in .*train")
    tiny_data.make_folder(tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    refused("no image in .*cow")
    (tmp_path / "train" / "cow").rmdir()
    (tmp_path / "val" / "dog").mkdir()
    refused("val/dog' is not a class in train")
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    refused("no class folders in .*val")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "I;16"])
def test_what_is_transparent_is_white_in_training_and_in_predictions(tmp_path, mode):
    tiny_data.make_folder(tmp_path)
    grey = np.repeat(np.uint8([[40] * 20 + [0] * 20]), 40, 0)  # nobody sees the 0
    image = Image.fromarray(np.uint16(grey) * 257 if mode == "I;16" else grey).convert(mode)
    options = {"transparency": (0, 0, 0) if mode == "RGB" else 0}
    if mode.endswith("A"):
        image.putalpha(Image.fromarray(grey).point(lambda value: 255 * (value > 0)))
        options = {}
    file = tmp_path / "train" / "ant" / "x.png"
    image.save(file, **options)
    args = config.parse_args([*folder_flags(tmp_path), "-augment", "no"])
    pixels = folder.get_dataset(args)["train"][2][0]
    assert (pixels[:, :, :14] == 40).all() and (pixels[:, :, 18:] == 255).all()
    assert photos.read(file, folder.get_transform(args))[:, :, 18:].min() > 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_reported_in_one_line_with_and_without_loader_processes(tmp_path, workers):
    tiny_data.make_folder(tmp_path)
    cut = tmp_path / "train" / "ant" / "1.jpg"
    cut.write_bytes(b"")
    train = folder.get_dataset(config.parse_args(folder_flags(tmp_path)))["train"]
    one = loader.Loader(train, Plan(4, 4, 4), World(), seed=0, shuffle=False, workers=workers)
    with pytest.raises(UsageError) as caught:
        next(iter(one.epoch(0)))
    one.fetcher.close()
    message = str(caught.value)
    assert message.startswith(f"{cut}: not a readable image (") and message.count("\n") == 0
    assert message.endswith("a new run can -skip_bad_files (while fetching sample 1)")


def test_the_stem_of_resnet_depends_on_image_size_and_channels():
    resnet = pytest.importorskip("lib.arch.resnet")
    stems = {"3 -image_size 32": (3, 3, 8), "3 -image_size 224": (3, 7, 4)}
    for flags, wanted in {**stems, "5 -image_size 224 -resnet_depth 34": (5, 7, 4)}.items():
        model = resnet.get_model(config.parse_args(f"-arch resnet -channels {flags}".split()))
        rows = model.maxpool(torch.zeros(1, 64, 8, 8)).shape[-1]
        assert (model.conv1.in_channels, model.conv1.kernel_size[0], rows) == wanted


def folder_flags(data):
    return ["-dataset", "folder", "-data", str(data), "-image_size", "32"]
