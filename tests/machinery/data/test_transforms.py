"""Images are changed on the device by random numbers that depend only on seed, epoch and index."""

import pytest
import tiny_data
import torch

from lib import config
from lib.dataset import folder
from lib.utils.data.transforms import Pixels
from lib.utils.errors import UsageError


def test_half_of_the_images_are_mirrored_and_all_are_normalized():
    images, draws = torch.randint(0, 256, (60, 3, 32, 24), dtype=torch.uint8), torch.rand(60, 8)
    mean, deviation = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    got, labels = Pixels(mean, deviation, mirror=True)((images, torch.arange(60)), draws)
    assert got.dtype == torch.float32 and torch.equal(labels, torch.arange(60))
    wanted = (images / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]
    mirrored = draws[:, 2] < 0.5
    assert 10 < mirrored.sum() < 50
    assert torch.allclose(got[mirrored], wanted[mirrored].flip(3), atol=1e-5)
    assert torch.allclose(got[~mirrored], wanted[~mirrored], atol=1e-5)
    still, _ = Pixels((0.0,), (1 / 255,))((images, labels), draws)
    assert torch.allclose(still, images.float(), atol=1e-4)
    for other in ((still, labels), {"image": images}):
        with pytest.raises(UsageError, match=r"on_device takes .uint8 images, ...., not"):
            Pixels((0.0,), (1.0,))(other, draws)


def test_images_are_loaded_as_bytes_and_only_training_images_are_augmented(tmp_path):
    tiny_data.make_folder(tmp_path)
    flags = ["-dataset", "folder", "-data", str(tmp_path), "-image_size", "32"]
    for augment in ("yes", "no"):
        args = config.parse_args([*flags, "-augment", augment])
        for split, part in folder.get_dataset(args).items():
            assert part[0][0].dtype == torch.uint8
            assert part.on_device.mirror == (split == "train" and augment == "yes")
