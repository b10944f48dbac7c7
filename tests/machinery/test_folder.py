"""Photos as phones and people make them: turned, of 16 bits, with debris next to them, on a disk that fails."""

import errno

import numpy as np
import pytest
import torch
from command_line import parsed
from PIL import Image
from tiny_data import make_folder

from lib.dataset import folder
from lib.utils.errors import UsageError

SIZE = 32


def dataset(root, flags="", part="val"):
    command = f"-dataset folder -data {root} -image_size {SIZE} -num_classes 2 {flags}"
    return folder.get_dataset(parsed(command))[part]


def photo(seed=0, size=(96, 64)):
    """A picture with large shapes, so that a JPEG changes it little."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1] // 16, size[0] // 16, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_a_photo_that_was_held_in_any_way_is_the_same_upright(orientation, ending, tmp_path):
    make_folder(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # torch's and Pillow's own transpositions
    turned = photo().transpose(undo[orientation]) if orientation > 1 else photo()
    options = {"lossless": True} if ending == "webp" else {"quality": 100}
    turned.save(tmp_path / "val" / "ant" / f"0.{ending}", exif=exif, **options)
    if ending != "jpg":
        (tmp_path / "val" / "ant" / "0.jpg").unlink()
    seen, wanted = dataset(tmp_path)[0][0], dataset(tmp_path).upright(photo())
    wanted = dataset(tmp_path).transform(wanted)
    assert (seen.float() - wanted.float()).abs().mean() < 6, "another turn is 40 and more away"


def test_16_bits_are_scaled_and_values_without_a_range_are_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "val" / "ant" / "0.jpg").unlink()
    values = np.linspace(0, 65535, SIZE * SIZE).reshape(SIZE, SIZE)
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "val" / "ant" / "0.png")
    pixels = dataset(tmp_path)[0][0].float()
    assert pixels.min() < 40 and pixels.max() > 215 and pixels.unique().numel() > 100
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "val" / "ant" / "0.tif")
    (tmp_path / "val" / "ant" / "0.png").unlink()
    with pytest.raises(UsageError, match=r"0\.tif: not a readable image \(mode F has no known range"):
        dataset(tmp_path)[0]


def test_debris_of_systems_is_neither_a_class_nor_an_image(tmp_path):
    make_folder(tmp_path)
    wanted = dataset(tmp_path, part="train").files
    for place in ("train/__MACOSX", "train/.ipynb_checkpoints", "train/@eaDir", "train/ant/@eaDir"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "0.jpg").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "._0.jpg").write_bytes(b"no image")
    found = dataset(tmp_path, part="train")
    assert (found.files, found.classes) == (wanted, ["ant", "bee"])


def test_a_single_class_is_refused(tmp_path):
    (tmp_path / "train" / "only").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"only is the only class folder in .*train: two or more are needed"):
        folder.describe(parsed(f"-data {tmp_path}"))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE])
def test_an_error_of_the_disk_is_not_taken_for_a_bad_image(number, tmp_path, monkeypatch):
    make_folder(tmp_path)
    data = dataset(tmp_path)

    def fail(file):
        raise OSError(number, "the disk", str(file))

    monkeypatch.setattr(folder.Image, "open", fail)
    with pytest.raises(OSError, match="the disk") as caught:
        data[0]
    assert caught.value.errno == number


@pytest.mark.parametrize(("part", "least"), [("val", SIZE * 8 / 7), ("train", SIZE)])
def test_a_large_jpeg_is_decoded_in_part_and_keeps_the_pixels_that_a_sample_has(part, least, tmp_path, monkeypatch):
    make_folder(tmp_path)
    file = tmp_path / part / "ant" / "0.jpg"
    photo(size=(1600, 1200)).save(file, quality=95)
    decoded, real = [], folder.Images.upright

    def upright(self, image):
        turned = real(self, image)
        decoded.append(turned.size)
        return turned

    monkeypatch.setattr(folder.Images, "upright", upright)
    torch.manual_seed(0)
    dataset(tmp_path, part=part)[0]
    assert decoded[0][0] < 1600 and min(decoded[0]) >= least


def test_a_class_with_nothing_but_debris_has_no_images(tmp_path):
    make_folder(tmp_path)
    for file in (tmp_path / "val" / "ant").iterdir():
        file.rename(file.with_name(f"._{file.name}"))
    with pytest.raises(UsageError, match="ant"):
        dataset(tmp_path)
    make_folder(tmp_path / "@eaDir" / "photos")
    assert len(dataset(tmp_path / "@eaDir" / "photos")) == 2
