"""Time per step of Baton, of a bare PyTorch loop, of Lightning, Accelerate and a usual template, side by side.

    uv sync --group bench; python scripts/bench/peers.py [-rounds 9] [-procs 1 2] [-busy] [-json FILE]

All loops train the same model on the same samples, an epoch each in turn, each in processes of its own: to import
Lightning makes every step of a process slower. The figures are medians over the rounds, and of each round's ratio to
the bare loop. A peer that is not installed is left out.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import contenders
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import Case
from torch.utils.data import DataLoader
from torchvision import transforms

from lib.utils.data import loader
from lib.utils.data.plan import Plan
from lib.utils.data.tensors import Tensors
from lib.utils.data.transforms import Pixels
from lib.utils.distributed import World

CASES = {
    "tiny MLP (64-64-10), batch 32": "-dataset random -random_samples 16000 -image_size 8 -num_classes 10 -arch mlp "
    "-mlp_width 64 -mlp_depth 1 -batch_size 32",
    "ResNet-18 at 64x64, batch 8": "-dataset fake -fake_samples 24 -image_size 64 -num_classes 10 -arch resnet "
    "-resnet_depth 18 -batch_size 8",
    "GPT 4 x 128, 8 x 128 bytes": "-dataset text -text_samples 64 -batch_size 8",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-rounds", type=int, default=9, help="epochs of each loop")
    parser.add_argument("-procs", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("-case", type=int, nargs="+", choices=range(len(CASES)), help="only these")
    parser.add_argument("-busy", action="store_true", help="count the process's CPU time, not the clock's: for a "
                        "machine with other work")  # fmt: skip
    parser.add_argument("-json", help="write the figures to this file")
    asked = parser.parse_args()
    names = compare.installed(contenders.ALL)
    clock = time.process_time if asked.busy else time.perf_counter
    found = {"absent": sorted(set(contenders.ALL) - set(names)), "torch": torch.__version__, "steps": {}}
    for procs in asked.procs:
        for number, (case, words) in enumerate(CASES.items()):
            if asked.case is None or number in asked.case:
                seconds = measured(words, procs, asked.rounds, names, clock)
                title = f"{case}, {procs} process(es)"
                found["steps"][f"{case}, {procs} proc."] = compare.show(title, seconds, unit="us a step", scale=1e6)
    found["images"] = images(asked.rounds, clock)
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n")


def measured(
    words: str, procs: int, rounds: int, names: list[str], clock=time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per step by name, one for each round after a first that does not count."""
    seconds = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        loops = {name: [begun(rank, procs, words, name, f"{folder}/{number}", clock) for rank in range(procs)]
                 for number, name in enumerate(names)}  # fmt: skip
        for turn in range(rounds + 1):
            for name in compare.in_turn(names, turn):
                for pipe, _ in loops[name]:
                    pipe.send("run")
                values = [pipe.recv() for pipe, _ in loops[name]]
                seconds[name] += values[:1] if turn else []
        for pipe, process in itertools.chain(*loops.values()):
            pipe.send("end")
            process.join()
    return seconds


def begun(rank: int, procs: int, words: str, name: str, folder: str, clock):
    """Starts one process of a loop: a pipe to it, and the process."""
    context = mp.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=work, args=(its, rank, procs, words, name, folder, clock), daemon=True)
    process.start()
    its.close()
    return mine, process


def work(pipe, rank: int, procs: int, words: str, name: str, folder: str, clock):
    """One process: builds its loop, and runs an epoch whenever told to."""
    torch.set_num_threads(1)
    Path(folder).mkdir(exist_ok=True)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": procs, "LOCAL_WORLD_SIZE": procs, "GROUP_RANK": rank}
    if procs > 1:
        os.environ.update({place: str(value) for place, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=procs)
    world = World(rank=rank, local_rank=rank, size=procs, local_size=procs)
    with contenders.hushed():
        run = contenders.ALL[name](Case(words, folder, world, clock))
        while pipe.recv() == "run":
            pipe.send(run())


def images(rounds: int, clock) -> dict:
    """Images a second through the data path alone: moved by up to 4 pixels, mirrored, normalized, 128 at once."""
    pixels, labels = torch.randint(256, (2560, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (2560,))
    mean, deviation = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    held = Tensors(pixels, labels, on_device=Pixels(mean, deviation, pad=4, mirror=True))
    plan = Plan(len(held), 128, 128)
    mine = loader.Loader(held, plan, World(), seed=0, shuffle=True, workers=0)
    steps = [transforms.ToPILImage(), transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    one_by_one = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(mean, deviation)])
    stock = DataLoader(Each(pixels, labels, one_by_one), batch_size=128, shuffle=True)

    def rate(batches):
        began = clock()
        count = sum(1 for _ in batches)
        return 128 * count / (clock() - began)

    torch.set_num_threads(1)
    pairs = [(rate(mine.epoch(turn)), rate(stock)) for turn in range(rounds + 1)][1:]
    row = {"ours": statistics.median(a for a, _ in pairs), "stock": statistics.median(b for _, b in pairs),
           "ratio": statistics.median(a / b for a, b in pairs)}  # fmt: skip
    print(f"\nCIFAR-sized images a second, augmented: Baton {row['ours']:.0f}, DataLoader with torchvision's "
          f"transforms {row['stock']:.0f}, ratio {row['ratio']:.1f}")  # fmt: skip
    return row


class Each(torch.utils.data.Dataset):
    """Images one at a time, through a transform."""

    def __init__(self, pixels, labels, transform):
        self.pixels, self.labels, self.transform = pixels, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.pixels[index]), self.labels[index]


if __name__ == "__main__":
    main()
