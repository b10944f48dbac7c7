"""Photos as phones and people make them: turned, in 16 bits, next to debris, damaged, on a failing disk."""

import errno
import itertools
import os
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiny_data
import torch
import yaml
from command_line import usage_error
from PIL import Image
from PIL.Image import Transpose
from runs import distance, run

from lib import config
from lib.dataset import folder
from lib.utils import files
from lib.utils.data import loader, photos
from lib.utils.data.transforms import Pixels
from scripts import check_data, doctor

FLAGS = "-dataset folder -arch convnet -image_size 16 -batch_size 4 -epochs 1"
TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE ROTATE_270"
INVERSE = {number: Transpose[name] for number, name in enumerate(TURNS.split(), 2)}  # by EXIF's orientation


def dataset(data, *flags):
    return folder.get_dataset(config.parse_args([*FLAGS.split(), "-data", str(data), *flags]))


def refusal(data, *flags) -> str:
    message = usage_error(dataset, data, *flags)
    assert message.isprintable()
    return message


def scene(width=40, height=30) -> Image.Image:
    """A picture whose four quarters differ."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, :, 0] = 220
    pixels[:, : width // 3, 1] = 160
    pixels[height // 4 :, width // 2 :, 2] = 90
    return Image.fromarray(pixels)


def store(file: Path, image: Image.Image, orientation: int, **options) -> None:
    """Save an image as a camera does that was held in this way."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    (image.transpose(INVERSE[orientation]) if orientation in INVERSE else image).save(file, exif=exif, **options)


def test_turned_photos_are_the_same_samples_as_upright_ones_in_training_and_evaluation(tmp_path):
    tiny_data.make_folder(tmp_path)
    for orientation in range(1, 9):
        store(tmp_path / "train" / "ant" / f"x{orientation}.webp", scene(), orientation, lossless=True)
    for flags in (["-augment", "no"], ["-image_size", "12"]):
        parts = dataset(tmp_path, *flags)
        train, items = parts["train"], []
        assert train.on_device.mirror == ("no" not in flags) and not parts["val"].on_device.mirror
        for index in range(2, 10):
            torch.manual_seed(5)
            items.append(train[index][0])
        assert items[0].float().std() > 20 and all(torch.equal(item, items[0]) for item in items)


def test_turned_jpegs_are_upright_also_when_they_are_decoded_smaller(tmp_path):
    args = config.parse_args(["-dataset", "folder", "-data", str(tmp_path), "-image_size", "16"], describe=False)
    upright, turned = tmp_path / "1.jpg", tmp_path / "2.jpg"
    store(upright, scene(640, 480), 1, quality=95)
    for orientation in range(2, 9):
        store(turned, scene(640, 480), orientation, quality=95)
        one, other = (photos.read(file, folder.get_transform(args)) for file in (upright, turned))
        assert (one - other).abs().mean() < 0.05, orientation
        loaded = Image.open(turned)
        loaded.load()  # as in a notebook that has shown it
        one, other = photos.read(upright, folder.get_transform(args)), folder.get_transform(args)(loaded)
        assert (other - one).abs().mean() < 0.1, orientation


def test_images_of_16_bits_look_like_those_of_8(tmp_path):
    grey = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (32, 1))
    Image.fromarray(grey).save(tmp_path / "8.png")
    wide = grey.astype(np.uint16) * 257
    Image.fromarray(65535 - wide).save(tmp_path / "white.tif", tiffinfo={262: 0})  # 0 is white, as in scans
    for name in ("16.png", "16.tif", "16.pgm"):
        Image.fromarray(wide).save(tmp_path / name)
    (tmp_path / "12.pgm").write_bytes(b"P5 32 32 4095\n" + (grey.astype(int) * 4095 // 255).astype(">u2").tobytes())
    for mode in ("L", "RGB"):
        see = lambda image: np.asarray(photos.view(image, mode, 32), np.int16)  # noqa: B023, E731
        wanted = photos.read(tmp_path / "8.png", see)
        for name in ("16.png", "16.tif", "16.pgm", "12.pgm", "white.tif"):
            assert np.abs(photos.read(tmp_path / name, see) - wanted).max() <= 1, name


def test_images_whose_range_is_not_known_are_refused_by_name(tmp_path):
    """Of 8 or 12 bits that are stored in 16, of floats and of 32 bits."""
    see = lambda image: photos.view(image, "L", 8).getpixel((0, 0))  # noqa: E731
    for value in (1, 255, 4095, 4112):
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(tmp_path / f"{value}.png")
    assert photos.read(tmp_path / "4112.png", see) == 16
    for value in (1, 255, 4095):
        said = usage_error(photos.read, tmp_path / f"{value}.png", see)
        assert re.search(f"{value}.png: not a readable image .*12 bits or fewer, up to {value}", said)
    for mode, kind in (("F", np.float32), ("I", np.int32)):
        Image.fromarray(np.full((20, 20), 300, kind)).save(tmp_path / f"{mode}.tiff")
        said = usage_error(photos.read, tmp_path / f"{mode}.tiff", see)
        assert re.search(f"{tmp_path}/{mode}.tiff: .*mode {mode} has no range", said)


def test_half_of_the_images_are_mirrored_and_all_are_normalized():
    images, draws = torch.randint(0, 256, (60, 3, 32, 24), dtype=torch.uint8), torch.rand(60, 8)
    mean, deviation = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    batch = images, torch.arange(60), images[:, 0], torch.eye(60)[:, :24]
    got, labels, masks, rows = Pixels(mean, deviation, mirror=True)(batch, draws)
    assert got.dtype == torch.float32 and torch.equal(labels, torch.arange(60))
    wanted = (images / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]
    mirrored = draws[:, 2] < 0.5
    assert 10 < mirrored.sum() < 50 and torch.allclose(got[mirrored], wanted[mirrored].flip(3), atol=1e-5)
    assert torch.allclose(got[~mirrored], wanted[~mirrored], atol=1e-5)
    assert torch.equal(masks[mirrored], images[mirrored, 0].flip(2)) and torch.equal(rows, batch[3])
    still, _ = Pixels((0.0,), (1 / 255,))((images, labels), draws)
    assert torch.allclose(still, images.float(), atol=1e-4)
    for other in ((still, labels), {"image": images}):
        assert "on_device takes (uint8 images, ...), not" in usage_error(Pixels((0.0,), (1.0,)), other, draws)


def test_debris_is_no_class_and_no_image_and_what_is_not_read_is_counted_by_ending(tmp_path):
    tiny_data.make_folder(tmp_path)
    before = [label for _, label in dataset(tmp_path)["train"].files]
    train = tmp_path / "train"
    for name in ("__MACOSX", ".ipynb_checkpoints", "@eaDir", "ant/@eaDir", "ant/.ipynb_checkpoints", "$RECYCLE.BIN"):
        tiny_data.image(train / name / "0.jpg")
    for name in ("ant/._0.jpg", "ant/.hidden.png", "ant/Thumbs.db", "bee/desktop.ini", ".DS_Store", "Thumbs.db"):
        (train / name).write_bytes(b"\0\5\x16\7")
    parts = dataset(tmp_path)
    assert [label for _, label in parts["train"].files] == before and not hasattr(parts["train"], "log_lines")
    for name in ("ant/a.heic", "ant/b.HEIC", "bee/c.gif", "bee/d.jfif", "bee/e", "loose.jpg"):
        (train / name).touch()
    (tmp_path / "val" / "bee" / "f.heic").touch()
    [line] = dataset(tmp_path)["train"].log_lines
    counts = ("7 files are not read: 3 .heic, ", "1 .gif", "1 .jfif", "1 no ending", "1 outside the class folders")
    assert all(one in line for one in (*counts, ".jpeg"))
    for file in (train / "ant").glob("*.jpg"):
        file.unlink()
    assert "no image in " in refusal(tmp_path) and "2 .heic" in refusal(tmp_path)


@pytest.mark.parametrize("other", ["train/__MACOSX", "val/dogs"])
def test_a_single_class_is_refused(tmp_path, other):
    for name in ("train/cats", "val/cats", other):
        tiny_data.image(tmp_path / name / "1.png")
    assert "cats is the only class folder in " in refusal(tmp_path)


@pytest.mark.parametrize("twin", ["cafe\u0301", "caf\xe9 "])
def test_a_class_that_only_looks_like_one_of_train_is_shown_by_what_differs(tmp_path, twin):
    for name in ("train/bee", "train/caf\xe9", "val/bee", f"val/{twin}"):
        tiny_data.image(tmp_path / name / "1.png")
    assert f"{str(tmp_path / 'val' / twin)!a} is not a class in train" in refusal(tmp_path)
    (tmp_path / "val" / twin).rename(tmp_path / "train" / twin)
    assert "differ only in spaces or Unicode form" in refusal(tmp_path) and ascii(twin) in refusal(tmp_path)


def failing(monkeypatch, number: int, times: int) -> None:
    answers = itertools.chain([OSError(number, "injected")] * times, itertools.repeat(mock.DEFAULT))
    monkeypatch.setattr(Image, "open", mock.Mock(wraps=Image.open, side_effect=answers))


@pytest.mark.parametrize("flags", ["-workers 1", "-workers 0 -skip_bad_files"])
def test_a_disk_that_fails_for_a_moment_changes_no_bit_and_a_dead_one_ends_the_run(tmp_path, monkeypatch, flags):
    tiny_data.make_folder(tmp_path / "data")
    monkeypatch.setattr(files, "PAUSES_S", (0.01, 0.01, 0.01))
    flags = f"{FLAGS} -data {tmp_path / 'data'} -cpu 1 -epochs 2 {flags}"
    for model, times in (("calm", 0), ("odd", 3)):
        failing(monkeypatch, errno.ESTALE, times)
        run(tmp_path / "out", f"{flags} -model {model}")
    assert distance(tmp_path / "out" / "calm", tmp_path / "out" / "odd") == 0
    failing(monkeypatch, errno.EIO, times=10**6)
    with pytest.raises((RuntimeError, OSError), match="Errno 5"):  # exit code 1, and no sample is skipped
        run(tmp_path / "out", f"{flags} -model dead")
    assert "[Errno 5]" in (tmp_path / "out" / "dead" / "outcome.json").read_text()


def test_overfit_takes_all_classes_and_files_without_which_one_is_empty_are_not_left_out(tmp_path, refused):
    tiny_data.make_folder(tmp_path / "data")
    few = loader.splits(dataset(tmp_path / "data"), "folder", overfit=2)["train"]
    assert [label for _, label in few] == [0, 1]
    for file in (tmp_path / "data" / "train" / "bee").iterdir():
        file.write_text("no photo")
    line = refused(f"{FLAGS} -data {tmp_path / 'data'} -skip_bad_files -cpu 1")
    assert "-skip_bad_files: no sample of the class bee in train can be read" in line


@pytest.fixture
def damaged(tmp_path):
    tiny_data.make_folder(tmp_path / "data")
    files = [tmp_path / "data" / name for name in ["train/ant/0.jpg", "train/bee/empty.png", "val/bee/text.jpg"]]
    files[0].write_bytes(files[0].read_bytes()[:300])
    files[1].touch()
    files[2].write_text("no image")
    return tmp_path / "data", files


def test_check_data_and_the_doctor_list_every_file_that_cannot_be_read(damaged, capsys):
    data, files = damaged
    (data / "train" / "ant" / "x.heic").touch()
    odd = [data / "val" / "bee" / "\x1b[31mx.jpg", data / "val" / "bee" / "y.jpg"]
    odd[0].symlink_to("nothing")
    os.mkfifo(odd[1])
    args = config.parse_args([*FLAGS.split(), "-data", str(data), "-cpu", "1"])
    assert check_data.check(args) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    shown = [str(file).replace("\x1b", "\\x1b") for file in (*files[:2], odd[0], files[2], odd[1])]
    assert all(line.startswith(f"{file}: not a readable image (") for line, file in zip(lines, shown, strict=True))
    assert last.startswith("-check_data: 5 of 10 samples cannot be read")
    found = list(doctor.guarded(doctor.data, args))
    assert sorted(level for level, _ in found) == [*["bad"] * 5, "note", "ok", "ok"]
    assert any(level == "note" and "1 .heic" in text for level, text in found)
    for file in (*files, *odd):
        file.unlink()
    odd[1].write_bytes(next((data / "train" / "ant").glob("*.jpg")).read_bytes())
    assert check_data.check(config.parse_args([*FLAGS.split(), "-data", str(data)])) == 0
    assert "samples are in another split, too; the first, val/bee/y.jpg, is train/ant/" in capsys.readouterr().out


def test_a_file_of_another_name_or_class_is_other_data_and_a_moved_folder_is_not(tmp_path):
    def listing(place):
        return folder.get_dataset(config.parse_args(["-dataset", "folder", "-data", str(place)]))["train"].listing

    tiny_data.make_folder(tmp_path / "a")
    found = listing(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert listing(f"{tmp_path}/b/") == found
    (tmp_path / "b/train/ant/1.jpg").rename(tmp_path / "b/train/ant/9.jpg")
    assert listing(tmp_path / "b") != found


def test_skipped_files_are_kept_with_the_run_and_all_starts_and_ranks_agree(damaged, tmp_path):
    data, files = damaged
    names = sorted(str(file.relative_to(data)) for file in files)
    flags = f"{FLAGS} -data {data} -batch_size 2 -skip_bad_files -model s"
    made = run(tmp_path / "out", f"{flags} -cpu 2 -limit_steps 1", wanted=75)
    skipped = lambda: yaml.safe_load((made / "config.yaml").read_text())["about"]["skipped"]  # noqa: E731
    assert skipped() == names
    tiny_data.image(files[0])  # good now; the run keeps its list, on any number of processes
    run(tmp_path / "out", f"{flags} -cpu 1")
    assert skipped() == names
    run(tmp_path / "out", f"{flags} -cpu 1 -eval")
    (data / "val" / "bee" / "0.jpg").rename(data / "val" / "bee" / "z.jpg")
    run(tmp_path / "out", f"{flags} -cpu 1", wanted=2)  # as without -skip_bad_files
    run(tmp_path / "out", f"{flags.replace('-skip_bad_files ', '')} -cpu 1", wanted=2)
    run(tmp_path / "out", f"{flags} -cpu 1 -reset")
    assert skipped() == names[1:]
