"""How a dataset prepares images is found by trying it, so that an exported model can do the same."""

import types
from functools import partial

import numpy as np
import pytest
import torch

from lib.config import plugins
from lib.utils.data import photos
from lib.utils.data.transforms import Pixels
from scripts import preprocessing


def centre(share, width, height):
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


@pytest.mark.parametrize("channels, crop", [(1, None), (1, 1.0), (3, 7 / 8)])
def test_what_get_transform_does_is_found_or_refused(channels, crop, monkeypatch):
    mode, box = ("L" if channels == 1 else "RGB"), crop and partial(centre, crop)

    def transform(image):
        pixels = np.array(photos.view(image, mode, 16, box), np.float32).reshape(16, 16, channels)
        return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.4) / 0.2

    args = types.SimpleNamespace(dataset="any", channels=channels, image_size=16)
    dataset = types.SimpleNamespace(get_transform=lambda args: transform)
    monkeypatch.setattr(plugins, "load", lambda kind, name: dataset)
    assert preprocessing.find(args, None) == preprocessing.Preprocessing(
        Pixels((0.4,) * channels, (0.2,) * channels), crop, upright=True
    )
    dataset.get_transform = lambda args: lambda image: transform(image).abs()
    assert preprocessing.find(args, None) is None
