"""-dataset tar and scripts/pack.py: shards of ours and as others make them, their index, damage, kills."""

import io
import json
import multiprocessing
import os
import re
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_data
import torch
from command_line import usage_error
from disk import read_tree
from items import Items
from PIL import Image
from runs import plugins, run, same_tensors, weights
from tars import jpeg, pairs, write
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from lib import config
from lib.dataset import folder, tar
from scripts import pack, predict, tar_index

FLAGS = "-dataset tar -arch convnet -image_size 16 -batch_size 4 -epochs 2"


def dataset(data, *flags):
    return tar.get_dataset(config.parse_args([*FLAGS.split(), "-data", str(data), *flags]))


def refusal(data) -> str:
    return usage_error(dataset, data)


@pytest.fixture
def shards(tmp_path):
    """Three shards, of other programs: names of all lengths, folders, debris, and files that are not read."""
    data = tmp_path / "test_shards"  # a pattern's files go by their own names
    (data / "val").mkdir(parents=True)
    hidden = tarfile.TarInfo("part")
    hidden.type = tarfile.DIRTYPE
    write(data / "train-0.tar", pairs(5, path="./"), format=tarfile.GNU_FORMAT)
    long = f"part/{'long' * 50}"
    odd = dict.fromkeys(f"part/._9.jpg part/a.json part/a.seg.png {long}0010.seg.png".split(), b"x")
    write(data / "train-1.tar", {"part": hidden} | odd | pairs(4, 10, long), format=tarfile.PAX_FORMAT)
    write(data / "train-2.tar", pairs(3, 20, "part/" * 30), format=tarfile.GNU_FORMAT)
    write(data / "val" / "0.tar", pairs(6))
    return data


def test_shards_of_other_programs_train_with_the_same_bits_everywhere(shards, tmp_path):
    one = run(tmp_path / "out", f"{FLAGS} -data {shards} -micro_batch 2 -cpu 1 -threads 1 -model one")
    three = run(tmp_path / "out", f"{FLAGS} -data {shards} -micro_batch 2 -cpu 3 -workers 1 -model three")
    run(tmp_path / "out", f"{FLAGS} -data {shards} -micro_batch 2 -cpu 2 -model moved -limit_steps 4", wanted=75)
    moved = shards.rename(tmp_path / "elsewhere")
    stopped = run(tmp_path / "out", f"{FLAGS} -data {moved} -micro_batch 2 -cpu 1 -threads 1 -model moved")
    assert same_tensors(weights(one), weights(three)) and same_tensors(weights(one), weights(stopped))


def test_each_sample_is_what_its_files_say(shards, capsys):
    parts = dataset(shards, "-augment", "no")
    assert "an image or a class, which are left out: 1, as train-1.tar/part/a\n" in capsys.readouterr().err
    assert {name: len(part) for name, part in parts.items()} == {"train": 12, "val": 6}
    assert [label for _, label in parts["train"]] == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0]
    assert [bool(image.float().mean() > 80) for image, _ in parts["val"]] == [False, True] * 3
    assert parts["train"].sample_name(0) == "train-0.tar/./0000"
    assert parts["val"].classes == ["0", "1"]


class Notes(tar.Shards):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.on_device = None

    def __getitem__(self, index):
        _, files = self.read(index)
        numbers = torch.from_numpy(np.load(io.BytesIO(files["npy"])))
        return numbers + len(files["extra.txt"]), json.loads(files["json"])["class"]


def test_a_dataset_of_ones_own_takes_other_files_of_a_sample(tmp_path):
    members, numbers = {}, io.BytesIO()
    for number in range(12):
        np.save(numbers, np.full((1, 8, 8), number % 2, np.float32))
        texts = {"extra.txt": b"x" * (number % 2), "npy": numbers.getvalue(), "json": b'{"class": %d}' % (number % 2)}
        members |= {f"long{'er' * 60}/{number}.{ending}": data for ending, data in texts.items()}
        numbers.truncate(0), numbers.seek(0)
    write(tmp_path / "train-0.tar", members)
    flags = f"-arch mlp -batch_size 4 -micro_batch 2 -threads 1 -epochs 2 -data {tmp_path}"
    with plugins(dataset={"notes": lambda args: tar.get_dataset(args, Notes)}):
        one, two = (run(tmp_path / "out", f"-dataset notes {flags} -cpu {cpu} -model m{cpu}") for cpu in (1, 2))
    assert same_tensors(weights(one), weights(two))
    found = tar.get_dataset(config.parse_args(["-data", str(tmp_path)]), Notes)
    assert not hasattr(found["train"], "fingerprint"), "three samples are read, which shows whether they change"
    assert "samples of train have no class, in NAME.cls (a NAME ends at its first" in refusal(tmp_path)
    write(tmp_path / "train-0.tar", {"0.cls": b"0", "0.txt": b""})
    assert "train-0.tar/0 has no jpg (it has cls, txt)" in usage_error(dataset(tmp_path)["train"].__getitem__, 0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("0.txt 1.txt 0.npy 1.npy", "the files of 0 do not lie together"),
        ("0.jpg 0.txt 1.txt", "1 has no image .1 such samples"),
        ("0.TXT ._0.npy 0.json README", "train-0.tar/0 has no npy .it has txt, json."),
        ("0.jpg 1.jpg 0.npy 1.npy", "train-0.tar/0 has no npy .it has jpg.; files of a sample .* lie together"),
    ],
)
def test_what_a_sample_of_ones_own_lacks_is_said(names, message, tmp_path):
    write(tmp_path / "train-0.tar", dict.fromkeys(names.split(), b"x"))
    read = lambda: tar.get_dataset(config.parse_args(["-data", str(tmp_path)]), Notes)["train"][0]  # noqa: E731
    assert re.search(message, usage_error(read))


def test_shards_may_be_named_by_a_pattern(shards, tmp_path):
    assert tar_index.expand("a{08..10}") == tar_index.expand("a{10..08}") == ["a08", "a09", "a10"]
    assert tar_index.expand("{x{1..2},y}") == ["x1", "y", "x2"]
    assert tar_index.expand("{x,y}/{1..2}.tar") == ["x/1.tar", "x/2.tar", "y/1.tar", "y/2.tar"]
    names = ("x-train-0.tar", "x-dev-0.tar", "a/valset-0.tar", "val/0.tar", "val/train-0.tar", "x/0.tar")
    assert [*map(tar_index.split_of, names)] == ["train", "val", "val", "val", "train", "train"]
    for root in ("file:///D", "/D", "s3://D/x"):
        assert tar_index.root_of(root + "/{train-0,val-1}.tar") == root
    whole = dataset(shards)
    assert whole["val"].sample_name(0).startswith("val/0.tar/")
    (shards / "val" / "0.tar").rename(shards / "val-0.tar")
    for part in (1, 2):
        (shards / f"val-{part}.tar").write_bytes((shards / "val-0.tar").read_bytes())
    named = dataset(f"{shards}/{{train,val}}-{{0..2}}.tar")
    assert named["train"].fingerprint == whole["train"].fingerprint and len(named["val"]) == 3 * len(whole["val"])
    assert {*dataset(shards / "train-1.tar")} == {"train"}
    assert "train-3.tar: cannot be read" in refusal(f"{shards}/train-{{0..3}}.tar")


def test_validation_shards_by_other_names_are_found_and_their_other_classes_are_named(shards, capsys):
    file = shards / "val" / "0.tar"
    for name in ("valid/0.tar", "dev-0.tar"):
        (shards / name).parent.mkdir(exist_ok=True)
        file = file.rename(shards / name)
        assert {*dataset(shards)} == {"train", "val"}
    write(file, {"1.jpg": jpeg(), "1.cls": b"7"})
    config.parse_args([*FLAGS.split(), "-data", str(shards)])
    assert "val has the class number 7, and train 0 to 1" in capsys.readouterr().err


def changed(shards):
    return {file: file.stat().st_mtime_ns for file in (shards / "index").glob("*.npy")}


def test_the_index_is_made_once_and_again_for_other_shards(shards, tmp_path, monkeypatch):
    (shards / "classes.txt").write_text("ant\nbee\n")
    config.parse_args([*FLAGS.split(), "-data", str(shards)])  # of all splits, before the watchdog looks
    before = changed(shards)
    dataset(shards)
    assert before == changed(shards) and len(before) == 2 and tqdm.monitor is None
    write(shards / "train-2.tar", pairs(9, 20))
    assert len(dataset(shards)["train"]) == 18 and len(changed(shards)) == 3
    error = OSError(30, "read-only", str(shards / "index"))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(error))
    assert len(dataset(shards)["train"]) == 18  # one that another user made
    write(shards / "val" / "0.tar", pairs(6, 2))
    assert "give a -cache_dir" in refusal(shards)
    monkeypatch.undo()
    assert len(dataset(shards, "-cache_dir", str(tmp_path / "cache"))["val"]) == 6


def test_a_damaged_index_is_named_and_other_code_makes_another(shards, monkeypatch):
    dataset(shards)
    [index] = (shards / "index").glob("train_*.npy")
    with monkeypatch.context() as edit:
        edit.setattr(tar_index, "label_of", lambda shard, key, text: int(text) % 2)
        assert dataset(shards)["train"].labels.max() < 2, "other code reads other labels: in another index"
    rows = np.load(index, mmap_mode="r+")
    rows["label"][0] ^= 1
    rows.flush()
    assert "npy: damaged (its checksum is wrong): remove it" in refusal(shards)
    index.unlink()
    index.mkdir()
    assert "npy: cannot be read (Is a directory): give a -cache_dir" in refusal(shards)


def test_several_processes_make_one_index_and_a_kill_leaves_none(shards):
    fork = multiprocessing.get_context("fork")
    sleepy = "find_samples", lambda shard: time.sleep(60)
    slow = fork.Process(target=lambda: (setattr(tar_index, *sleepy), dataset(shards)))
    slow.start()
    while not (shards / "index" / "train.lock").exists():
        time.sleep(0.01)
    os.kill(slow.pid, signal.SIGKILL)
    slow.join()
    assert not changed(shards)
    children = [fork.Process(target=dataset, args=(shards,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4 and len(changed(shards)) == 2


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "0000.jpg"
    return member


FAULTS = {
    "no image": ({"7.cls": b"1"}, "7 has no image .1 such"),
    "no class": ({"7.jpg": jpeg(), "8.jpg": jpeg()}, "7 has no cls .2 such"),
    "no number": ({"7.jpg": jpeg(), "7.cls": b"cat"}, "the class of 7 is no number from 0: b'cat'"),
    "two images": ({"7.jpg": jpeg(), "7.PNG": jpeg(), "7.cls": b"1"}, "two files are the image of 7"),
    "a class too large": ({"7.jpg": jpeg(), "7.cls": b"2147483647"}, "the class of 7 is 2147483647: at most 1,048"),
    "a long number": ({"7.jpg": jpeg(), "7.cls": b" " * 19 + b"12"}, "the class of 7 is no number from 0"),
    "a dot": ({"v.7.jpg": jpeg(), "v.7.cls": b"1"}, "v.7.jpg is left out: the name of a sample ends at its first"),
    "a link": ({"7.jpg": link("7.jpg"), "7.cls": b"1"}, "7.jpg is a link or a sparse file"),
}


@pytest.mark.parametrize(
    "how", ["in a file", "at a file", "in a header", "before the end", "compressed", "empty", "joined"]
)
def test_a_damaged_shard_is_named(shards, how):
    file = shards / "train-1.tar"
    data = file.read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    header = data.rindex(b"ustar") - 257
    cut = {"in a file": end - 700, "at a file": header - 512, "before the end": end, "empty": 0}
    broken = data[: cut[how]] if how in cut else data[:header] + b"?" * 200 + data[header + 200 :]
    file.write_bytes({"compressed": b"\x1f\x8b" + data, "joined": data + data}.get(how, broken))
    assert re.search(r"train-1.tar: (damaged, cut off|\S+ has no)", refusal(shards))


ODD = {  # a file in DATA: what makes it, and the message
    "train-3.tar": (os.mkfifo, "train-3.tar: cannot be read .not a regular file"),
    "train-5.tar": (lambda file: file.symlink_to("nowhere"), "train-5.tar: cannot be read .No such file"),
    "train-6.tar.GZ": (Path.touch, "train-6.tar.GZ: compressed .1 such"),
    "classes.txt": (lambda file: file.write_bytes(b"b\xe4r\n"), "classes.txt: cannot be read"),
    ".//classes.txt": (lambda file: file.write_text("ant\n"), "names 1 classes, and a sample has the class number 1"),
    "./classes.txt": (lambda file: file.write_bytes(b"ant\n\nbee\n"), "classes.txt: an empty line"),
}


@pytest.mark.parametrize("what", [*FAULTS, *ODD])
def test_what_is_no_sample_no_shard_and_no_list_of_classes_is_one_line(shards, what):
    given, message = {**FAULTS, **ODD}[what]
    if what in FAULTS:
        write(shards / "train-3.tar", pairs(2) | given)
    else:
        given(shards / what)
    assert re.search(f"train-3.tar: {message}" if what in FAULTS else message, refusal(shards))


def test_a_shard_that_changed_and_a_bad_image_are_named(shards, tmp_path):
    part = dataset(shards)["train"]
    data = (shards / "train-0.tar").read_bytes()
    (shards / "train-0.tar").write_bytes(data[:700] + b"?" + data[701:])
    assert dataset(shards)["train"].fingerprint != part.fingerprint
    write(shards / "train-0.tar", {**pairs(5, path="./"), "./0000.cls": b"1\n"}, format=tarfile.GNU_FORMAT)
    write(shards / "train-1.tar", {"7.jpg": bytes(99999), "7.cls": b"1"})
    for index, name in ((0, "train-0"), (6, "train-1")):
        assert f"{name}.tar: changed since its index was written" in usage_error(part.__getitem__, index)
    for change in (Path.unlink, Path.touch):  # it is gone, and then empty
        change(shards / "train-2.tar")
        said = usage_error(part.__getitem__, 11)
        assert "train-2.tar: shorter than when its index was written, or gone" in said
    write(shards / "train-2.tar", pairs(2) | {"7.jpg": jpeg()[:500], "7.cls": b"1"})
    said = usage_error(dataset(shards)["train"].__getitem__, 8)
    assert re.search("train-2.tar/7.jpg: not a readable image .*-skip_bad_files", said)
    run(tmp_path / "out", f"{FLAGS} -data {shards} -skip_bad_files -cpu 2")


# scripts/pack.py


@pytest.fixture
def photos(tmp_path):
    """Class folders with 12 photos, one of them turned and one with 16 bits."""
    tiny_data.make_folder(tmp_path / "photos", train=4, val=2)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(jpeg(9, (80, 60)))).save(tmp_path / "photos" / "val" / "ant" / "turned.jpg", exif=exif)
    Image.fromarray(np.full((40, 40), 40000, np.uint16)).save(tmp_path / "photos" / "val" / "bee" / "deep.png")
    return tmp_path / "photos"


def test_packed_photos_are_the_same_samples_and_the_same_bytes_each_time(photos, tmp_path):
    for out in ("a", "b"):
        assert pack.main([str(photos), "-o", str(tmp_path / out)]) == 0
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
    flags = config.parse_args(["-dataset", "folder", "-data", str(photos), "-image_size", "16", "-augment", "no"])
    for split, part in dataset(tmp_path / "a", "-augment", "no").items():
        loose = folder.get_dataset(flags)[split]
        both = [sorted((label, image.numpy().tobytes()) for image, label in some) for some in (part, loose)]
        assert both[0] == both[1] and part.classes == ["ant", "bee"]
    assert predict.load(str(run(tmp_path / "out", f"{FLAGS} -data {tmp_path / 'a'} -cpu 1"))) is not None


def test_a_killed_pack_goes_on_and_leaves_no_half_of_a_shard(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "shard_count", lambda *_: 3)
    assert pack.main([str(photos), "-o", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(pack, "verify", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        argv = [str(photos), "-o", str(tmp_path / "cut")]
        child = multiprocessing.get_context("fork").Process(target=pack.main, args=(argv,))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL and list((tmp_path / "cut").glob("*.partial"))
    assert pack.main([str(photos), "-o", str(tmp_path / "cut")]) == 0
    assert read_tree(tmp_path / "cut") == read_tree(tmp_path / "whole") and len(read_tree(tmp_path / "cut")) == 8


def test_what_was_written_is_compared_and_other_files_are_refused(photos, tmp_path, monkeypatch, script_error):
    pack.main([str(photos), "-o", str(tmp_path / "a")])
    written = pack.write
    with monkeypatch.context() as patch:
        patch.setattr(pack, "write", lambda *given: [one ^ 1 for one in written(*given)])
        assert "what was written is not what is there" in script_error(pack, photos, "-o", tmp_path / "b")
    assert not list((tmp_path / "b").glob("*.tar"))
    monkeypatch.setattr(pack, "shard_count", lambda *_: 2)
    assert "take an empty folder" in script_error(pack, photos, "-o", tmp_path / "a")
    (photos / "val" / "bee" / "deep.png").touch()
    monkeypatch.undo()
    assert "take an empty folder" in script_error(pack, photos, "-o", tmp_path / "a"), "a file was written again"


def test_the_samples_of_any_dataset_are_packed_by_their_types(tmp_path, script_error, capsys):
    images = torch.randint(256, (5, 3, 9, 8), dtype=torch.uint8)
    train, gray = Items([*zip(images, range(5))], classes="abcde"), Image.new("L", (9, 9))
    parts = {"train": train, "val": Items([(gray, 1, 7)])}  # as in training, the second is the target
    odd = {"a": torch.ones(2), "b/": 0.5, "c": "text", "d": ["x", 1], "e": b"1", "id": 7}
    given = {"any": parts, "odd": Items([odd] * 2), "bad": Items([{"a": torch.ones(1).bfloat16()}])}
    given["drawn"] = type("Drawn", (Items,), {"__getitem__": lambda self, index: torch.rand(9)})([0] * 9)
    given["other"] = {"train": Items([1], classes="ab"), "val": Items([1], classes="ba")}
    with plugins(dataset={name: lambda args, part=part: part for name, part in given.items()}):
        for words in (["-dataset", "any", "-flags=-seed 3", "-o", str(tmp_path / "any")],) * 2:
            assert pack.main(words) == 0
        assert "train: 1 of 1 shards were there, and stay as they are" in capsys.readouterr().err
        found = dataset(tmp_path / "any")
        assert found["val"].read(0)[1]["cls"] == b"1" and found["train"].classes == [*"abcde"]
        for _, one in map(found["train"].read, range(5)):
            assert torch.equal(pil_to_tensor(Image.open(io.BytesIO(one["png"]))), images[int(one["cls"])])
        pack.main(["-dataset", "odd", "-o", str(tmp_path / "odd")])
        said = capsys.readouterr().out
        assert "samples have b_.npy, bin, id.cls, json, npy, txt: a subclass of Shards reads" in said
        pack.main(["-dataset", "drawn", "-o", str(tmp_path / "drawn")])
        assert "samples of train are drawn at random" in capsys.readouterr().err
        assert "number them alike" in script_error(pack, "-dataset", "other", "-o", tmp_path / "x")
        said = script_error(pack, "-dataset", "bad", "-o", tmp_path / "x")
        assert "sample 0 of train has a Tensor that no file of a shard holds" in said
        assert "have no shares" in script_error(pack, "-dataset", "any", "-flags=-data a=1,b=1", "-o", tmp_path / "x")
        assert "give either" in script_error(pack, "x", "-dataset", "odd", "-o", tmp_path / "x")


def test_what_cannot_be_packed_is_one_line(photos, tmp_path, script_error):
    for split in ("train", "val"):
        (photos / split / "bee").rename(photos / split / "b\n\udcffe")
    assert "it is in" in script_error(pack, photos, "-o", photos / "train" / "x")
    packed = tmp_path / "packed"
    pack.main([str(photos), "-o", str(packed)])
    assert (packed / "classes.txt").read_text() == "ant\nb\\n\\udcffe\n"
    assert "take an empty folder" in script_error(pack, photos, "-o", packed, "-resize", "24")
    os.mkfifo(photos / "train" / "ant" / "9.jpg")
    assert "not a regular file" in script_error(pack, photos, "-o", tmp_path / "out")
    (photos / "dev").mkdir()
    assert "dev and val are both for val" in script_error(pack, photos, "-o", tmp_path / "out")


def test_resized_photos_are_upright_in_8_bits_and_of_the_splits_that_folders_say(photos, tmp_path, capsys):
    (photos / "val").rename(photos / "valid").with_name("extra").mkdir()
    pack.main([str(photos), "-o", str(tmp_path / "a"), "-resize", "24"])
    assert "extra left out: their names say no split" in capsys.readouterr().err
    with tarfile.open(tmp_path / "a" / "val-00000-of-00001.tar") as opened:
        images = [Image.open(io.BytesIO(opened.extractfile(one).read())) for one in opened if "jpg" in one.name]
    assert sorted(image.size for image in images) == [(24, 24), (24, 32), (24, 32), (24, 32), (24, 32), (24, 32)]
    assert 150 < np.array(next(image for image in images if image.size == (24, 24))).mean() < 160
