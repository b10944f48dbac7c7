"""Finds out where each sample lies in tar shards: python scripts/tar_index.py DATA.

-dataset tar does so by itself at its first start. An index is made once, by reading the headers of all files. It is
in the folder index/ next to the shards, or in -cache_dir, and is valid for shards of these names, sizes and times (or
what a URL's server has to tell versions apart). A run may be killed while it is made, and several may start at once.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import inspect
import io
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.utils import files
from lib.utils.checkpoint import atomic
from lib.utils.errors import UsageError, load_optional, printable
from lib.utils.files import is_debris

IMAGES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")  # as photos.IMG_EXTENSIONS
COMPRESSED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
MOST_CLASSES = 1 << 20
SLOW_S = 10  # until a line says what a start waits for
QUIET_S = 30  # between two lines of progress where stderr is no terminal
# Of an index: where the files of a sample lie, with their headers. Without a class, its label is -1.
ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("label", "<i4")])
CHECKSUM_BYTES = 4  # of the rows, at an index's end
SPLITS = ("train", "val", "test")


class Disk:
    """Shards on a disk. scripts/remote.py has the same for a URL."""

    map = map

    def glob(self, folder: str, pattern: str) -> list[str]:
        return [str(file) for file in Path(folder).glob(pattern)]

    def version(self, file: str) -> tuple:
        """Return what is another for another content."""
        about = Path(file).stat()
        return about.st_size, about.st_mtime_ns

    def open(self, file: str) -> BinaryIO:
        return files.open_regular(Path(file), "rb", follow=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="folder of the shards, or a pattern, as -data of train.py")
    parser.add_argument("-cache_dir", metavar="DIR", help="folder for the index, where DATA cannot be written")
    parser.add_argument("-json", action="store_true", help="print what was found for a program")
    args = parser.parse_args(argv)
    try:
        found = find_all(args.data, args.cache_dir)
        if args.json:
            print(json.dumps(found))
            return 0
        for split, (rows, shards) in open_index(found, with_classes=False).items():
            print(f"{split}: {len(rows):,} samples in {len(shards):,} shards")
    except (UsageError, OSError) as error:
        if not args.json:
            parser.exit(2, f"tar_index.py: {error}\n")
        print(json.dumps({"error": f"{error}"}))
    return 0


def find(data: str, cache_dir: str | None) -> dict[str, Any]:
    """Return what find_all does. A URL is read in another process: threads would be in the way of forks."""
    return find_remote(data, cache_dir) if is_url(data) else find_all(data, cache_dir)


@functools.cache  # for all processes of a run that are forked after the first call
def find_remote(data: str, cache_dir: str | None) -> dict[str, Any]:
    """Return what find_all does for a URL. Raises UsageError."""
    if re.search("://[^/]*:[^/]*@", data):
        raise UsageError("-data has a password: keep it where the programs of that storage look for one")
    if not cache_dir:
        raise UsageError(f"-data {data}: give a -cache_dir, for the index")
    command = [sys.executable, __file__, data, "-cache_dir", cache_dir, "-json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            answer = process.communicate(timeout=SLOW_S)[0]
        except subprocess.TimeoutExpired:
            print(f"tar_index.py: reading {data}, for its index", file=sys.stderr)
            answer = process.communicate()[0]
    found = json.loads(answer or '{"error": "scripts/tar_index.py was ended"}')
    if "error" in found:
        raise UsageError(found["error"])
    return found


def find_all(data: str, cache_dir: str | None) -> dict[str, Any]:
    """Return {"classes": their names, split: (file of its index, its shards)}. The first process makes the indexes.

    Raises UsageError for train without shards, what is wrong with a shard, or an index that cannot be written.
    """
    store: Any = Disk()
    if is_url(data):
        store = load_optional("scripts.remote", "-data URL").Storage(data)
    found: dict[str, Any] = {"classes": class_names(data, store)}
    for split in SPLITS:
        if shards := find_shards(data, split, store):
            found[split] = find_index(data, cache_dir, split, shards, store), shards
    if "train" not in found:
        raise UsageError(f"-data {data}: no train*.tar; scripts/pack.py makes shards of class folders")
    return found


def find_index(data: str, cache_dir: str | None, split: str, shards: list[str], store: Any) -> str:
    """Return the file of the index of these shards. Raises UsageError."""
    about = [*store.map(functools.partial(name_and_version, store=store), shards)]
    root = root_of(data)
    place = (root if is_url(data) else os.path.realpath(root)) if cache_dir else ""  # others may have theirs there
    code = "".join(map(inspect.getsource, (find_samples, choose_samples, name_of_member, kind_of, label_of)))
    text = repr((about, place, "samples, checksum", IMAGES, code))  # other rows need another name
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = Path(cache_dir or root) / "index" / f"{split}_{key}.npy"
    if not file.exists():  # its folder may be writable for others only
        make_index(file, shards, split, data, store)
    return str(file)


def name_and_version(shard: str, store: Any) -> tuple:
    with usage_errors(shard):
        return name_of(shard), *store.version(shard)


def open_index(found: dict[str, Any], with_classes: bool = True) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return where the samples of each split lie, rows of ROW, mapped, and its shards.

    Raises UsageError for an index that cannot be read, a split without samples, or (`with_classes`) without classes.
    """
    opened = {}
    for split in SPLITS:
        if split in found:
            file, shards = found[split]
            try:
                rows = np.load(file, mmap_mode="r")
                with Path(file).open("rb") as whole:
                    whole.seek(-CHECKSUM_BYTES, os.SEEK_END)
                    if int.from_bytes(whole.read(), "big") != zlib.crc32(rows):
                        raise ValueError("its checksum is wrong")
            except (ValueError, EOFError) as error:
                raise UsageError(f"{file}: damaged ({error}): remove it, and it is made again") from None
            except OSError as error:
                raise UsageError(f"{file}: cannot be read ({error.strerror}): give a -cache_dir") from None
            if not len(rows):
                raise UsageError(f"{root_of(shards[0])}: no sample in the shards of {split}")
            if with_classes and rows["label"].min() < 0:
                hint = "a dataset of your own can take their other files: docs/data.md"
                wanted = "in NAME.cls (a NAME ends at its first dot)"
                raise UsageError(f"{root_of(shards[0])}: samples of {split} have no class, {wanted}; {hint}")
            opened[split] = rows, shards
    return opened


def count_classes(data: str, cache_dir: str | None) -> int:
    """Return how many classes shards have, by classes.txt or else by all labels. Raises UsageError as `find`."""
    found = find(data, cache_dir)
    opened = open_index(found)
    highest = max(int(rows["label"].max()) for rows, _ in opened.values())
    if 0 < len(found["classes"]) <= highest:
        fault = f"classes.txt names {len(found['classes'])} classes, and a sample has the class number {highest}"
        raise UsageError(f"-data {data}: {fault}, from 0")
    labels = {split: rows["label"] for split, (rows, _) in opened.items()}
    known, lowest = int(labels["train"].max()), int(labels["train"].min())
    for split, one in labels.items() if not found["classes"] else ():
        if one.max() > known:
            warn(f"-data {data}: {split} has the class number {one.max()}, and train {lowest} to {known}")
    if lowest and not found["classes"]:
        warn(f"-data {data}: train has no class 0: class numbers count from 0")
    return len(found["classes"]) or highest + 1


def warn(text: str) -> None:
    """Print a line, once for all processes of torchrun."""
    if os.environ.get("RANK", "0") == "0":
        print(f"tar_index.py: {text}", file=sys.stderr)


def make_index(file: Path, shards: list[str], split: str, data: str, store: Any) -> None:
    """Write the index of shards into a file, unless another process does. Raises UsageError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = (file.parent / f"{split}.lock").open("a")
    except OSError as error:
        raise UsageError(f"-data {data}: the index cannot be written ({error}): give a -cache_dir") from None
    with lock:
        with contextlib.suppress(OSError):  # without locks, several make the same one
            fcntl.flock(lock, fcntl.LOCK_EX)
            atomic.sweep(file.parent, f"{split}_")  # of killed ones
        if file.exists():
            return
        rows = scan(shards, split, store)
        try:
            with atomic.new_version(file) as partial, partial.open("wb") as opened:
                np.save(opened, rows)
                opened.write(zlib.crc32(rows).to_bytes(CHECKSUM_BYTES, "big"))
        except OSError as error:
            raise UsageError(f"-data {data}: the index cannot be written ({error}): give a -cache_dir") from None


def find_shards(data: str, split: str, store: Any) -> list[str]:
    """Return the shards of a split, sorted: DATA/SPLIT*.tar, or else DATA/SPLIT/*.tar, or of a name as dev or valid.

    If DATA is a pattern, they are those of its files that begin with the split's name, or whose folder does if the
    file begins with no split's; train also has all others. Raises UsageError for a compressed one, which has no
    places to read at.
    """
    if is_pattern(data):
        return sorted(file for file in expand(data) if split_of(file) == split)
    for pattern in (f"{split}*", f"{split}/*"):
        with usage_errors(data):
            found = sorted(file for file in store.glob(data, pattern) if not is_debris(name_of(file)))
        if compressed := [file for file in found if file.lower().endswith(COMPRESSED)]:
            raise UsageError(f"{compressed[0]}: compressed ({len(compressed)} such files): unpack it to a .tar file")
        if shards := [file for file in found if file.lower().endswith(".tar")]:
            return shards
    if split == "train":
        return []
    with usage_errors(data):
        loose, inner = (sorted(store.glob(data, pattern)) for pattern in ("*.tar", "*/*.tar"))
    named = [file for file in loose if files.split_of(name_of(file)) == split]
    named = named or [file for file in inner if files.split_of(name_of(file.rpartition("/")[0])) == split]
    return [file for file in named if not is_debris(name_of(file))]


def copy_shards(found: dict[str, Any], data: str, cache_dir: str | None, limit_gb: float | None) -> None:
    """Let the shards of a URL be copied to `cache_dir` while this process runs, up to `limit_gb`; None: no copies."""
    if is_url(data) and cache_dir and limit_gb:
        splits = {split: found[split] for split in SPLITS if split in found}
        load_optional("scripts.shard_cache", "-cache_gb").start(Path(cache_dir, "shards"), limit_gb, splits)


def read(ranges: list[tuple[str, int, int]]) -> list[bytes]:
    """Return the bytes of each (shard, offset, size), b"" of a file that is gone; of a URL, all are fetched at once.

    Raises UsageError or OSError.
    """
    if is_url(ranges[0][0]):
        return load_optional("scripts.remote", "-data URL").read(ranges)
    found = []
    for shard, begin, size in ranges:
        try:
            with open(shard, "rb", buffering=0) as file:  # noqa: PTH123  # a fork shares no place in it
                found.append(os.pread(file.fileno(), size, begin))
        except FileNotFoundError:
            found.append(b"")
    return found


def prefetch(ranges: list[tuple[str, int, int]]) -> dict[tuple[str, int, int], bytes]:
    """Return the bytes of ranges of URLs; of files none: the system begins to read those while others are decoded."""
    if is_url(ranges[0][0]):
        return dict(zip(ranges, read(ranges)))
    with contextlib.suppress(OSError, AttributeError):  # a file that is gone is named by `read`; no Linux
        for shard, places in itertools.groupby(sorted(ranges), key=operator.itemgetter(0)):
            with open(shard, "rb", buffering=0) as file:  # noqa: PTH123
                for _, begin, size in places:
                    os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)
    return {}


def is_url(data: str) -> bool:
    return "://" in data


def name_of(shard: str) -> str:
    return shard.rpartition("/")[2]


def is_pattern(data: str) -> bool:
    """Whether -data names the shards themselves, as DIR/{train,val}-{0000..0127}.tar, and not their folder."""
    return data.lower().endswith(".tar")


def expand(pattern: str) -> list[str]:
    """Return the texts of a pattern as a shell does: {a,b} is a and b, {08..10} is 08, 09 and 10."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    if found[3] is None:
        low, high = sorted((found[1], found[2]), key=int)
        parts = [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    else:
        parts = found[3].split(",")
    texts = [text for part in parts for text in expand(pattern[: found.start()] + part + pattern[found.end() :])]
    return [*dict.fromkeys(texts)]  # {a{1..2},b} gives b twice


def split_of(file: str) -> str:
    """Return the split of a pattern's file: by a word of its name, or how that begins, or else by its folder's."""
    for name in reversed(file.lower().split("/")[-2:]):
        begin = [split for split in SPLITS if name.startswith(split)]
        if found := files.split_of(name) or "".join(begin):
            return found
    return "train"


def root_of(data: str) -> str:
    """Return the folder of the shards: -data, or what all files of a pattern have in common."""
    if not is_pattern(data):
        return data
    protocol, mark, _ = data.partition("://") if is_url(data) else ("", "", "")
    folders = [file.removeprefix(protocol + mark).rpartition("/")[0] or "." for file in expand(data)]
    return protocol + mark + os.path.commonpath(folders)


@dataclass(frozen=True)
class Found:
    """What is in a shard."""

    rows: list[tuple[int, int, int]]  # offset, size and class (or -1) of each sample, in the shard's order
    left_out: list[str]  # names of files that make no sample


def scan(shards: list[str], split: str, store: Any) -> np.ndarray:
    """Return the index of shards. Raises UsageError for what is wrong with one of them."""
    parts = []
    left_out, example = 0, ""
    pause = 0.1 if sys.stderr.isatty() else QUIET_S
    tqdm.monitor_interval = 0  # no thread that redraws: a run's processes are forked after this
    found = store.map(functools.partial(scan_shard, store=store), shards)
    about = {"desc": f"indexing {split}", "unit": "shard", "total": len(shards)}
    for number, one in enumerate(tqdm(found, mininterval=pause, maxinterval=pause, delay=pause, **about)):
        parts.append(np.array([(offset, size, number, label) for offset, size, label in one.rows], ROW))
        left_out += len(one.left_out)
        if one.left_out and not example:
            example = one_line(f"{name_of(shards[number])}/{one.left_out[0]}")
    if left_out:
        what = f"names without an image or a class, which are left out: {left_out:,}, as {example}"
        print(f"tar_index.py: {split}: {what}", file=sys.stderr)
    return np.concatenate(parts)


def scan_shard(shard: str, store: Any) -> Found:
    """Return what find_samples does. Raises UsageError naming the shard."""

    def read() -> Found:
        with store.open(shard) as file:
            return find_samples(shard, file)

    try:
        with usage_errors(shard):
            return files.retry(read)
    except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
        raise UsageError(f"{shard}: damaged, cut off or no uncompressed tar file ({error})") from None


@contextlib.contextmanager
def usage_errors(shard: str) -> Iterator[None]:
    """Raise UsageError for a shard that cannot be opened. An error of the disk stays an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in files.OF_DISK:
            raise
        raise UsageError(f"{shard}: cannot be read ({error.strerror or error})") from None


def find_samples(shard: str, file: BinaryIO) -> Found:
    """Return the samples in a shard.

    Raises UsageError, OSError, or, as tarfile does, TarError, EOFError, OverflowError or ValueError.
    """
    places: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)  # of the files, by the sample's name and kind
    labels: dict[str, bytes] = {}
    pieces: Counter[str] = Counter()  # of samples whose files lie together: 1
    before = None
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while member := tar.next():
            tar.members = []  # or all of them stay in memory
            if not (named := name_of_member(member)):
                continue
            key, ending = named
            kind = kind_of(ending)
            if not member.isreg() or member.issparse():
                if kind not in ("image", "cls"):
                    continue
                raise UsageError(f"{shard}: {one_line(member.name)} is a link or a sparse file: store it as it is")
            if kind in places[key]:
                hint = ": a mask may be called NAME.mask.png" if kind == "image" else ""
                raise UsageError(f"{shard}: two files are the {kind} of {one_line(key)}{hint}")
            places[key][kind] = member.offset, end_of(member)
            pieces[key] += key != before
            before = key
            if kind == "cls":  # read while a URL's reader is here
                file.seek(member.offset_data)
                labels[key] = file.read(min(member.size, 21))
        check_end(file, tar.offset)
    rows = []
    chosen = choose_samples(shard, places)
    for key in chosen:
        begin, size = span_of(shard, key, places[key], together=pieces[key] == 1)
        rows.append((begin, size, label_of(shard, key, labels.get(key))))
    return Found(rows, [key for key in places if key not in chosen])


def choose_samples(shard: str, places: dict[str, dict[str, tuple[int, int]]]) -> dict[str, dict]:
    """Return those of the places that are samples. Raises UsageError if some of them lack an image or a class.

    They are those with an image or a class. Where none has a class, they are those with a kind of file that samples
    with an image have; where none has either, all.
    """
    with_image = [one for one in places.values() if "image" in one]
    kinds = {"image", "cls"} if any("cls" in one for one in places.values()) else {*itertools.chain(*with_image)}
    chosen = {key: one for key, one in places.items() if one.keys() & kinds or not kinds}
    for kind in ("image", "cls"):
        lacking = [key for key, one in chosen.items() if kind not in one]
        if 0 < len(lacking) < len(chosen):
            raise UsageError(f"{shard}: {one_line(lacking[0])} has no {kind} ({len(lacking)} such samples)")
    check_dots(shard, places, chosen)
    return chosen


def check_dots(shard: str, places: dict[str, dict], chosen: dict[str, dict]) -> None:
    """Raise UsageError for an image or a class that is left out as its name has a dot, as v.17.jpg.

    An ending that samples have, too, is none of these, as seg.png.
    """
    known = {*itertools.chain(*chosen.values())}
    for key, one in places.items():
        for ending in one if key not in chosen else ():
            if ending not in known and ending.rpartition(".")[2] in (*IMAGES, "cls"):
                file = one_line(f"{key}.{ending}")
                fault = f"the name of a sample ends at its first dot, and {one_line(key)} has no image or class"
                raise UsageError(f"{shard}: {file} is left out: {fault}: rename its files, as with _ for the dot")


def name_of_member(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the name of the sample that a file belongs to, and its ending, in lower case; None for other files."""
    name = member.name.rpartition("/")[2]
    ending = name.partition(".")[2]
    if not ending or is_debris(name) or member.isdir():
        return None
    return member.name.removesuffix(f".{ending}"), ending.lower()


def kind_of(ending: str) -> str:
    return "image" if ending in IMAGES else ending


def end_of(member: tarfile.TarInfo) -> int:
    """Return where the next header begins."""
    return member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def span_of(shard: str, key: str, places: dict[str, tuple[int, int]], together: bool) -> tuple[int, int]:
    """Return where a sample's files begin, and their size; those of the image alone if they do not lie `together`."""
    if not together and "image" not in places:
        hint = "tar --sort=name makes shards whose samples do"
        raise UsageError(f"{shard}: the files of {one_line(key)} do not lie together: {hint}")
    used = places.values() if together else [places["image"]]
    begin, end = min(begin for begin, _ in used), max(end for _, end in used)
    if end - begin >= 1 << 32:
        raise UsageError(f"{shard}: the files of {one_line(key)} have {end - begin:,} bytes: no sample has 4 GB")
    return begin, end - begin


def label_of(shard: str, key: str, text: bytes | None) -> int:
    """Return the class that a sample's file says, -1 without one."""
    if text is None:
        return -1
    if len(text) > 20 or not text.strip().isdigit():
        raise UsageError(f"{shard}: the class of {one_line(key)} is no number from 0: {text!r}")
    if int(text) >= MOST_CLASSES:
        raise UsageError(f"{shard}: the class of {one_line(key)} is {int(text)}: at most {MOST_CLASSES - 1:,}")
    return int(text)


def check_end(file: BinaryIO, offset: int) -> None:
    """Raise ReadError unless a shard has only zeros from `offset` on, a block of them at least."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no end at byte {offset:,}")
    while data := file.read(1 << 20):
        if any(data):
            raise tarfile.ReadError(f"it goes on after its end at byte {offset:,}: tar -A joins shards, cat does not")


class Files(dict):
    """The files of a sample by their endings, as bytes."""

    name = ""  # the shard, and the sample's name in it

    def __missing__(self, ending: str) -> bytes:
        """Raise UsageError, which names the sample."""
        hint = "; files of a sample with an image that do not lie together are left out (tar --sort=name)"
        raise UsageError(f"{self.name} has no {ending} (it has {', '.join(self)}){hint if len(self) == 1 else ''}")


def read_files(data: bytes, shard: str, label: int) -> tuple[str, Files]:
    """Return the shard and the name of a sample, and its files, from the bytes at its place.

    Raises UsageError if these are not whole files of one sample, or say another class than its index, `label`.
    """
    keys, found, end = set(), Files(), 0
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            end = end_of(member)
            if (named := name_of_member(member)) and member.isreg():
                keys.add(named[0])
                found[named[1]] = data[member.offset_data : member.offset_data + member.size]
    if end != len(data) or len(keys) != 1 or label_of(shard, *keys, found.get("cls")) not in (-1, label):
        raise UsageError(f"{shard}: changed since its index was written: remove that, and copies of -cache_gb")
    *_, inner, name = f"/{shard}".split("/")
    place = f"{inner}/{name}" if inner in SPLITS else name  # train/0.tar and val/0.tar are two
    found.name = one_line(f"{place}/{keys.pop()}")
    return found.name, found


def class_names(data: str, store: Any) -> list[str]:
    """Return the names of the classes, by their numbers: none without DATA/classes.txt. Raises UsageError."""
    file = f"{root_of(data)}/classes.txt"
    try:
        names = files.retry(lambda: read_all(file, store)).decode("utf-8-sig").rstrip("\n\r").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        status = getattr(error.__cause__, "status", 0)
        if is_url(data) and (isinstance(error, PermissionError) or status == 403):  # of S3, also if it is not there
            print(f"tar_index.py: {file}: no permission, or not there: classes are numbers", file=sys.stderr)
            return []
        raise UsageError(f"{file}: cannot be read ({error})") from None
    if not all(name.strip() for name in names):
        raise UsageError(f"{file}: an empty line: it must have a name in each line")
    return names


def read_all(file: str, store: Any) -> bytes:
    with store.open(file) as opened:
        return opened.read()


def one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main())
