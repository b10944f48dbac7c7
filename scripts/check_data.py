"""-check_data: opens every sample of every split, in parallel, and lists what is wrong; also for -skip_bad_files.

It names a split with samples of another one, too: figures of training samples are not those of new data.
"""

import contextlib
import logging
import sys
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from lib.utils import distributed, files, runtime, signals, watchdog
from lib.utils.checkpoint import run_folder
from lib.utils.checkpoint.resume import Past
from lib.utils.data import fetch, fingerprint
from lib.utils.data.fetch import MapDataset, stop_signals_blocked
from lib.utils.distributed import World
from lib.utils.errors import FAILED, FINISHED, UsageError, no_exit, printable
from scripts import model_input

if TYPE_CHECKING:
    from lib.config import Args

log = logging.getLogger(__name__)
QUIET_S = 30  # between two lines of progress where stderr is no terminal
Faults = dict[str, tuple[int, str]]  # by a sample's name: the number of the disk's error, or 0, and the message
TWINS = "{}: {:,} of {:,} samples are in another split, too; the first, {}, is {}"


def check(args: "Args") -> int:
    """Print a line for each sample that cannot be read. Returns the exit code."""
    with signals.exit_on_signal():
        splits = model_input.find_splits(args, args.overfit)
        faults = find_faults(splits, World(), args.seed, twins := {})
    for _, text in faults.values():
        print(printable(text))
    for split, pairs in twins.items() if not args.overfit else ():
        print(printable(TWINS.format(split, len(pairs), len(splits[split]), *pairs[0])))
    total = sum(map(len, splits.values()))
    advice = "; fix or remove them, or leave them out with -skip_bad_files" if faults else ""
    print(f"-check_data: {len(faults)} of {total:,} samples cannot be read{advice}")
    return FAILED if faults else FINISHED


def skip(splits: dict[str, MapDataset], args: "Args", world: World, past: Past | None) -> tuple[dict, dict]:
    """Return the splits without the samples that cannot be read, and the names of these for config.yaml.

    The list is that in the config.yaml of the run, or of the run that it continues; a new run makes it. All ranks
    call this.

    Raises:
        OSError: the disk failed, which says nothing about the samples.
        UsageError: nothing is left of a split.
    """
    folder = past.folder.parents[1] if past else run_folder.path_of(args)
    known = past or not run_folder.is_reset_due(args, world)
    read = (lambda: read_list(folder / "config.yaml")) if known and world.is_main else None
    bad = distributed.broadcast(distributed.attempt(read, world), world)
    if bad is None:
        parts = distributed.gather_results(lambda: find_faults(splits, world, args.seed), world)
        faults: Faults = {name: fault for part in parts for name, fault in part.items()}
        for number, text in faults.values():
            if number:
                raise OSError(number, text)
        bad = sorted(faults)
    if not bad:
        return splits, {"skipped": []}
    kept, names = {}, set(bad)
    for split, part in splits.items():
        named = [name_of(split, part, index) for index in range(len(part))]
        # Lists of older versions have samples of DATA/train/0.tar without the folder.
        good = [at for at, name in enumerate(named) if not {name, name.partition("/")[2]} & names]
        if twice := [name for name, times in Counter(named).items() if times > 1 and name in names]:
            raise UsageError(f"-skip_bad_files: {twice[0]} is the name of several samples of {split}: rename files")
        if not good:
            raise UsageError(f"-skip_bad_files: no sample of {split} can be read")
        kept[split] = part
        if len(good) < len(part):
            if split == "train" and args.shuffle and fetch.option(part, "sampler") is not None:
                fault = "a file is bad, and the training samples have a sampler, which draws it, too"
                raise UsageError(f"-skip_bad_files: {fault}: fix it (-check_data)")
            kept[split] = Subset(part, good)
            names_kept = [named[index] for index in good]  # a file that is left out may change
            is_known = fetch.option(part, "fingerprint") is not None  # as shards, whose names may change
            vars(kept[split])["listing"] = None if is_known else zlib.crc32(repr(names_kept).encode())
        labels, classes = getattr(part, "labels", None), getattr(part, "classes", None)
        labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
        are_classes = isinstance(labels, list) and isinstance(classes, list) and {*labels} <= {*range(len(classes))}
        if are_classes and (lost := {*labels} - {labels[index] for index in good}):
            raise UsageError(f"-skip_bad_files: no sample of the class {classes[min(lost)]} in {split} can be read")
    if bad and world.is_main:
        log.warning(
            "-skip_bad_files: %d files are left out, listed in config.yaml; the first is %s", len(bad), bad[0]
        )
    return kept, {"skipped": bad}


def read_list(config: Path) -> list[str] | None:
    """Return the files that a run leaves out, by its config.yaml; None if it has made no list."""
    try:
        names = yaml.safe_load(files.read_bytes(config).decode())["about"].get("skipped")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise UsageError(f"{config} cannot be read ({' '.join(str(error).split())})") from None
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise UsageError(f"{config}: about.skipped is no list of names")
    return names


def find_faults(
    splits: dict[str, MapDataset], world: World, seed: int = 0, twins: dict[str, list[tuple[str, str]]] | None = None
) -> Faults:
    """Return what is wrong with this rank's share of all samples, found in processes on this rank's cores.

    `twins` gets, by split, the names of samples with the content of one in an earlier split, and those of these.
    """
    faults, known = {}, {}
    for split, part in splits.items():
        if not (share := range(world.rank, len(part), world.size)):
            continue
        results = DataLoader(
            Attempts(part, seed, twins is not None),
            batch_size=None,
            sampler=share,
            num_workers=min(len(share), max(1, runtime.cores_per_process(world))),
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        pause = 0.1 if sys.stderr.isatty() else QUIET_S
        title, quiet = f"checking {split}", not world.is_main
        watchdog.begin(f"checking the samples of {split}")
        with stop_signals_blocked():  # in the worker processes
            answers = iter(results)
        try:
            for answer in tqdm(answers, title, len(share), disable=quiet, mininterval=pause, maxinterval=pause):
                watchdog.moved()
                index, number, text, digest = answer
                if text is not None:
                    name = name_of(split, part, index)
                    faults[name] = (number, text if name in text else f"{name}: {text}")
                elif twins is not None and digest:
                    first_split, first = known.setdefault(digest, (split, index))
                    if first_split != split:
                        names = name_of(split, part, index), name_of(first_split, splits[first_split], first)
                        twins.setdefault(split, []).append(names)
        finally:
            answers._shutdown_workers()
            for worker in answers._workers:
                worker.kill()  # one that did not end by itself: SIGTERM is blocked in it
    return faults


class Attempts(Dataset):
    """Of each sample its index, the number of the error, what is wrong with it or None, a digest of it or None."""

    def __init__(self, dataset: MapDataset, seed: int, with_digests: bool):
        self.dataset, self.fetch, self.disk_failed = dataset, fetch.Fetch(dataset, seed), False
        self.with_digests = with_digests

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, int, str | None, str | None]:
        read = lambda: self.fetch._read(0, [index], [index])  # noqa: E731  # as in training
        try:
            with no_exit():
                self.fetch.set_epoch(0)
                items = read() if self.disk_failed else files.retry(read)  # a disk that is gone is waited for once
        except BaseException as error:  # noqa: BLE001  # whatever it is, as a panic of Rust's, it is listed
            number = error.errno if isinstance(error, OSError) else None
            self.disk_failed |= number in files.OF_DISK
            text = traceback.format_exception_only(error)[0].strip()
            return index, number or 0, str(error) if isinstance(error, UsageError) else text, None
        digest = None
        with contextlib.suppress(Exception):  # of an object that has none
            digest = self.with_digests and fingerprint.digest_batch([content_of(self.dataset, index, items)], len, "")
        return index, 0, None, digest or None


def content_of(dataset: MapDataset, index: int, items: Any) -> Any:
    """Return what a sample is known again by: its file, of which training may draw a crop, else its inputs."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    tar = sys.modules.get("lib.dataset.tar")  # not in each project
    if tar and isinstance(dataset, tar.Shards):
        return {ending: data for ending, data in dataset.read(index)[1].items() if ending != "cls"}
    for name in ("files", "samples", "paths"):
        entries = getattr(dataset, name, ())
        entry = entries[index] if isinstance(entries, list) and len(entries) == len(dataset) else None
        path = entry[0] if isinstance(entry, tuple) else entry
        if isinstance(path, str | Path) and Path(path).is_file():
            return Path(path).read_bytes()
    sample = items[0] if isinstance(items, list) else items
    return sample[0] if isinstance(sample, list | tuple) else sample


def name_of(split: str, dataset: MapDataset, index: int) -> str:
    """Return the name that the dataset gives a sample, else its split and number."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset.sample_name(index) if hasattr(dataset, "sample_name") else f"{split} {index}"
