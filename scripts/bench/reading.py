"""How fast photos are read: -dataset folder, -dataset tar, and WebDataset's pipeline over the same shards.

    uv pip install --group bench          # and mosaicml-streaming and litdata, to compare with these from a disk
    python scripts/bench/reading.py [-photos 2000] [-workers 0 1 2] [-rounds 3] [-data DIR] [-latency_ms 20 [-s3]]

A round reads all photos once in each way, in a random order of ways: "cold" after their pages were dropped from
memory, "warm" right after that. "decoded": each photo becomes the tensor that a model sees, drawn as in training;
"bytes": it is read only. The time counts from the first request to the last batch, without the start of processes.
Figures are samples per second: medians and ranges over the rounds. With -latency_ms, a web server on this machine
gives the shards, and waits so long before each answer; "tar, 64" is tar with -shuffle_block 64. With -s3 it is an S3
server (moto's), from which tar reads s3://, and WebDataset the same objects by curl. MosaicML's Streaming and LitData
read the same JPEGs from files of their own, as large as the shards, shuffled, as their pages do.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import io
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lib import config
from lib.dataset import folder, tar
from lib.utils.data import fetch, plan
from scripts import pack

SIZE, BATCH = (500, 375), 64  # pixels of a photo; photos
SHARD_BYTES = 16 << 20
PACKAGES = ("torch", "pillow", "webdataset", "mosaicml-streaming", "litdata")  # whose versions are said
SHUFFLE = 1000  # samples in WebDataset's buffer, from which it draws
BLOCKS = {"tar, 16": 16, "tar, 64": 64}  # -shuffle_block, by way
S3 = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
SLOW_S3 = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
s3 = DomainDispatcherApplication(create_backend_app)
def slow(environ, start):
    time.sleep(float(sys.argv[1]) / 1000)
    return s3(environ, start)
server = make_server("127.0.0.1", 0, slow, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
FILL = """
import s3fs, sys
s3 = s3fs.S3FileSystem()
s3.mkdir("bench")
s3.put(*sys.argv[1:], recursive=True, ACL="public-read")
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-photos", type=int, default=2000, help="how many are made (2000)")
    parser.add_argument(
        "-workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of loader processes (0 1 2)"
    )
    parser.add_argument("-rounds", type=int, default=3, help="readings of each kind (3)")
    parser.add_argument("-data", type=Path, help="where the photos are made (a temporary folder)")
    parser.add_argument("-latency_ms", type=int, help="read from a web server that waits so long (from the disk)")
    parser.add_argument("-s3", action="store_true", help="that server is one of S3: uv pip install --group s3")
    options = parser.parse_args(argv)
    print(describe(sys.argv[1:] if argv is None else argv))
    with contextlib.ExitStack() as stack:
        root = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_photos(root / "photos", options.photos)
        pack.main([str(root / "photos"), "-o", str(root / "shards"), "-shard_mb", "16"])
        ways, address = {"folder": read_ours, "tar": read_ours, "WebDataset": read_webdataset}, ("", "")
        peers = {"streaming": ("Streaming", read_streaming), "litdata": ("LitData", read_litdata)}
        ways |= dict(way for package, way in peers.items() if importlib.util.find_spec(package))
        if options.latency_ms is not None:
            ways = {**dict.fromkeys(["tar", *BLOCKS], read_ours), "WebDataset": read_webdataset}
            address = stack.enter_context((serving_s3 if options.s3 else serving)(root, options.latency_ms))
        for workers in options.workers:
            print(table(workers, measure(root, ways, address, options.rounds, workers)), flush=True)
    return 0


@contextlib.contextmanager
def serving(root: Path, latency_ms: int) -> Iterator[tuple[str, str]]:
    """Serve a folder by the tests' web server in the block; yield its address, for ours and for WebDataset."""
    server = Path(__file__).resolve().parents[2] / "tests/machinery/data/web.py"
    command = [sys.executable, server, root, str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        address = f"http://127.0.0.1:{int(process.stdout.readline())}/good"
        try:
            yield address, address
        finally:
            process.kill()


@contextlib.contextmanager
def serving_s3(root: Path, latency_ms: int) -> Iterator[tuple[str, str]]:
    """Serve the shards by moto's S3 server while the block runs; yield as `serving` does."""
    command = [sys.executable, "-c", SLOW_S3, str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        os.environ.update(S3, AWS_ENDPOINT_URL=url)
        try:
            subprocess.run([sys.executable, "-c", FILL, f"{root}/shards/", "bench/shards"], check=True)
            yield "s3://bench", f"{url}/bench"
        finally:
            process.kill()


def make_photos(place: Path, count: int) -> None:
    """Make JPEGs of about 50 kB in ten classes, as many as are not there yet."""
    for number in range(count):
        file = place / "train" / f"class_{number % 10}" / f"{number:06d}.jpg"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            coarse = np.random.default_rng(number).integers(0, 256, (SIZE[1] // 5, SIZE[0] // 5, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(file, quality=85)
    for name in range(10):  # -dataset folder wants a val split
        file = place / "val" / f"class_{name}" / "0.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE).save(file)


def measure(root: Path, ways: dict, address: tuple, rounds: int, workers: int) -> dict[tuple, list[float]]:
    """Return samples per second by way, work and state of the memory."""
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(rounds):
        cases = [(way, work) for way in ways for work in ("decoded", "bytes")]
        for way, work in random.sample(cases, len(cases)):
            for state in ("cold", "warm"):
                if state == "cold":
                    drop_pages(root)
                speeds.setdefault((way, work, state), []).append(
                    ways[way](root, address, way, work == "decoded", workers)
                )
    return speeds


def flags(root: Path, address: str, way: str) -> config.Args:
    if way == "folder":
        return config.parse_args(["-dataset", "folder", "-data", str(root / "photos")])
    given = ["-dataset", "tar", "-data", f"{address or root}/shards", "-cache_dir", str(root / "cache")]
    return config.parse_args([*given, "-shuffle_block", str(BLOCKS.get(way, 1))])


def read_ours(root: Path, address: tuple, way: str, decoded: bool, workers: int) -> float:
    """Read as a run does: the micro-batches of an epoch in its order, by its loader's processes."""
    args = flags(root, address[0], way)
    data = (folder if way == "folder" else tar).get_dataset(args)["train"]
    if not decoded:
        data = Bytes(data)
    order = plan.order(len(data), args.seed, epoch=0, block=args.shuffle_block).tolist()
    keys = [
        plan.MicroBatch(step, 0, order[first : first + BATCH], BATCH, BATCH, 1, first=True, last=True)
        for step, first in enumerate(range(0, len(order), BATCH))
    ]
    with contextlib.closing(fetch.Fetcher(data, args.seed, workers, pin=False)) as fetcher:
        return speed((batch for _, batch in fetcher(0, keys)), len(data))


class Bytes(torch.utils.data.Dataset):
    """The size and the class of each photo of a dataset, whose file is read and not decoded."""

    def __init__(self, data: folder.Images):
        self.data = data

    def __len__(self):
        return len(self.data)

    def prefetch_samples(self, indices):
        fetch.prefetch(self.data, indices)

    def __getitem__(self, index):
        if isinstance(self.data, tar.Shards):
            return len(self.data.read_bytes(index)), int(self.data.labels[index])
        file, label = self.data.files[index]
        return len(Path(file).read_bytes()), label


def read_webdataset(root: Path, address: tuple, way: str, decoded: bool, workers: int) -> float:
    """Read from front to back, shuffled in a buffer, as WebDataset's pages do for training."""
    data = folder.Images([], [], flags(root, "", "folder"), drawn=True)
    image = functools.partial(decode, data.to_tensor) if decoded else len
    shards = sorted(map(str, (root / "shards").glob("train*.tar")))
    if address[1]:
        shards = [f"pipe:curl -s {address[1]}/shards/{Path(shard).name}" for shard in shards]
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=0).shuffle(SHUFFLE)
    pairs = samples.to_tuple("jpg", "cls").map_tuple(image, int).batched(BATCH)
    loader = webdataset.WebLoader(pairs, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    count = len(folder.get_dataset(flags(root, "", "folder"))["train"])
    return speed(iter(loader), count)


def read_streaming(root: Path, address: tuple, way: str, decoded: bool, workers: int) -> float:
    """Read MosaicML Streaming's shards, which the first call writes, as its quick start does."""
    import streaming

    images, place = folder.get_dataset(flags(root, "", "folder"))["train"], root / "mds"
    if not (place / "index.json").exists():
        columns = {"jpg": "bytes", "cls": "int"}
        with streaming.MDSWriter(out=str(place), columns=columns, size_limit=SHARD_BYTES) as writer:
            for file, label in images.files:
                writer.write({"jpg": Path(file).read_bytes(), "cls": int(label)})
    streaming.base.util.clean_stale_shared_memory()  # of a reading before

    class Photos(streaming.StreamingDataset):
        def __getitem__(self, index):
            return pair_of(super().__getitem__(index), images.to_tensor, decoded)

    data = Photos(local=str(place), shuffle=True, batch_size=BATCH)
    loader = torch.utils.data.DataLoader(data, BATCH, num_workers=workers, persistent_workers=workers > 0)
    return speed(iter(loader), len(images))


def read_litdata(root: Path, address: tuple, way: str, decoded: bool, workers: int) -> float:
    """Read LitData's chunks, which the first call writes, as its quick start does."""
    import litdata

    images, place = folder.get_dataset(flags(root, "", "folder"))["train"], root / "litdata"
    if not (place / "index.json").exists():
        pairs = [(str(file), int(label)) for file, label in images.files]
        litdata.optimize(read_file, pairs, str(place), chunk_bytes=SHARD_BYTES, num_workers=1, start_method="fork")

    class Photos(litdata.StreamingDataset):
        def __getitem__(self, index):
            return pair_of(super().__getitem__(index), images.to_tensor, decoded)

    data = Photos(str(place), shuffle=True)
    context = {"multiprocessing_context": "fork"} if workers else {}
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, **context)
    return speed(iter(loader), len(images))


def read_file(pair: tuple[str, int]) -> dict:
    return {"jpg": Path(pair[0]).read_bytes(), "cls": pair[1]}


def pair_of(sample: dict, to_tensor, decoded: bool) -> tuple:
    return (decode(to_tensor, sample["jpg"]) if decoded else len(sample["jpg"])), sample["cls"]


def decode(to_tensor, data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return to_tensor(image)


def speed(batches: Iterator, count: int) -> float:
    """Return how many samples a second come. Raises RuntimeError if they are not `count`."""
    began, found = time.perf_counter(), 0
    for _, labels in batches:
        found += len(labels)
    if found != count:
        raise RuntimeError(f"{found} of {count} samples came")
    return count / (time.perf_counter() - began)


def drop_pages(root: Path) -> None:
    """Let the system forget what it has of these files in memory."""
    os.sync()
    for file in [file for ending in ("jpg", "tar", "mds", "bin") for file in root.rglob(f"*.{ending}")]:
        number = os.open(file, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def is_there(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


def describe(words: list[str]) -> str:
    command = " ".join(["python scripts/bench/reading.py", *words])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if is_there(name))
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
    return f"`{command}` on {datetime.date.today()}, {machine}."


def table(workers: int, speeds: dict[tuple[str, str, str], list[float]]) -> str:
    columns = [(work, state) for work in ("decoded", "bytes") for state in ("warm", "cold")]
    lines = [f"\n{workers} loader processes, samples/s\n"]
    lines += ["| | " + " | ".join(f"{work}, {state}" for work, state in columns) + " |", "| --- " * 5 + "|"]
    for way in dict.fromkeys(way for way, _, _ in speeds):
        cells = [speeds[way, work, state] for work, state in columns]
        texts = [f"{statistics.median(one):,.0f} ({min(one):,.0f} to {max(one):,.0f})" for one in cells]
        lines.append(f"| {way} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
