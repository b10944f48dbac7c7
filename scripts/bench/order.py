"""Which samples are in each step of an epoch, on 1 to 5 processes: -dataset tar next to libraries that stream data.

    uv pip install --group bench mosaicml-streaming litdata     # what is not there is left out
    python scripts/bench/order.py [-samples 1200]

The same weights on another number of processes need the same samples in each step. Each library reads the same
samples as its pages do for training: shuffled, with a seed, a step's 60 samples shared out to the processes. A cell
says in how many of the epoch's steps all processes together have the samples that one process has.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch.utils.data import DataLoader

from lib import config
from lib.dataset import tar
from lib.utils.data.loader import Loader
from lib.utils.data.plan import Plan
from lib.utils.distributed import World

SIZES, BATCH, SHARDS = (1, 2, 3, 4, 5), 60, 20  # processes; samples of a step
WAYS = {"tar": "torch", "WebDataset": "webdataset", "Streaming": "streaming", "LitData": "litdata"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-samples", type=int, default=1200, help="how many are made (1200)")
    parser.add_argument("-ways", nargs="+", choices=[*WAYS], default=[*WAYS], help="which (all that are installed)")
    options = parser.parse_args()
    packages = {"torch", "webdataset", "mosaicml-streaming", "litdata"}
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name in packages}
    print(f"{datetime.date.today()}, {', '.join(f'{name} {version}' for name, version in versions.items())}\n")
    ways = [way for way in options.ways if importlib.util.find_spec(WAYS[way])]
    print("| | " + " | ".join(map(str, SIZES)) + " |\n" + "| --- " * (len(SIZES) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder), options.samples)
        for way in ways:
            steps = [steps_of(way, folder, size) for size in SIZES]
            same = [sum(one == other for one, other in zip(steps[0], found, strict=False)) for found in steps]
            print(f"| {way} | " + " | ".join(f"{count} of {len(steps[0])}" for count in same) + " |", flush=True)
    return 0


def make_shards(folder: Path, samples: int) -> None:
    """Write samples, each with its number as its class, in shards of equal size."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:02d}.tar", "w") as opened:
            for number in range(shard, samples, SHARDS):
                text = str(number).encode()
                about = tarfile.TarInfo(f"{number:06d}.cls")
                about.size = len(text)
                opened.addfile(about, io.BytesIO(text))


def steps_of(way: str, folder: str, size: int) -> list[list[int]]:
    """Return the samples of each step, sorted, of `size` processes together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    for rank in range(size):
        variables = {name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
        command = [sys.executable, "-c", f"import order; order.child({way!r}, {folder!r})"]
        variables["PYTHONPATH"] = str(Path(__file__).parent)
        children.append(subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True))
    lines = [child.communicate()[0].splitlines() for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"{way} on {size} processes failed")
    parts = [json.loads(line[-1]) for line in lines]
    steps = itertools.zip_longest(*parts, fillvalue=())
    return [sorted(itertools.chain(*shares)) for shares in steps]


def child(way: str, folder: str) -> None:
    """Print what this process reads in each step."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    reader = {"tar": read_tar, "WebDataset": read_webdataset, "Streaming": read_streaming, "LitData": read_litdata}[
        way
    ]
    found = [[int(sample) for sample in batch] for batch in reader(folder, rank, size)]
    torch.distributed.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)


class Numbers(tar.Shards):
    """The number of each sample."""

    def __getitem__(self, index: int) -> int:
        return int(self.read(index)[1]["cls"])


def read_tar(folder: str, rank: int, size: int) -> Iterable:
    args = config.parse_args(["-dataset", "tar", "-data", folder, "-num_classes", "10", "-augment", "no"])
    data = tar.get_dataset(args, Numbers)["train"]
    data.on_device = None
    loader = Loader(
        data, Plan(len(data), BATCH, BATCH // 10), World(rank=rank, size=size), seed=0, shuffle=True, workers=0
    )
    step: list[int] = []
    for micro_batch, batch in loader.epoch(0):
        step += batch[: micro_batch.count].tolist()
        if micro_batch.last:
            yield step
            step = []


def read_webdataset(folder: str, rank: int, size: int) -> Iterable:
    import webdataset

    shards = sorted(map(str, Path(folder).glob("*.tar")))
    split = webdataset.split_by_node
    data = webdataset.WebDataset(shards, shardshuffle=len(shards), nodesplitter=split, empty_check=False, seed=0)
    for batch in data.shuffle(1000).to_tuple("cls").batched(BATCH // size):
        yield batch[0]


def read_streaming(folder: str, rank: int, size: int) -> Iterable:
    import streaming

    place = Path(folder, "mds")
    if rank == 0 and not place.exists():
        with streaming.MDSWriter(out=str(place), columns={"number": "int"}, size_limit=2000) as writer:
            for number in numbers(folder):
                writer.write({"number": number})
    torch.distributed.barrier()
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=str(place), shuffle=True, batch_size=BATCH // size)
    for batch in DataLoader(data, BATCH // size):
        yield batch["number"].tolist()


def read_litdata(folder: str, rank: int, size: int) -> Iterable:
    import litdata

    place = Path(folder, "litdata")
    if rank == 0 and not place.exists():
        litdata.optimize(int, numbers(folder), str(place), chunk_size=60, num_workers=1, start_method="fork")
    torch.distributed.barrier()
    data = litdata.StreamingDataset(str(place), shuffle=True)
    for batch in litdata.StreamingDataLoader(data, batch_size=BATCH // size, num_workers=0):
        yield batch.tolist()


def numbers(folder: str) -> list[int]:
    """Return the numbers of all samples, in the shards' order."""
    found = []
    for shard in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(shard) as opened:
            found += [int(name.partition(".")[0]) for name in opened.getnames()]
    return found


if __name__ == "__main__":
    sys.exit(main())
