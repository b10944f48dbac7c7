"""A ledger of a run, for comparing runs: its samples with a checksum of each, and the losses and weights after them.

Every rank appends to its own file, whose lines survive a kill -9. -check_resume and scripts/chaos.py
keep one; a usual run does not.
"""

import contextlib
import json
import math
import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lib.utils.checkpoint import run_folder, shards, state
from lib.utils.checkpoint.state import model_tensors
from lib.utils.data import tensors
from lib.utils.distributed import World

PAUSE = "pause"  # the file with the step at which a start waits
SAMPLES, DRAWN = "other samples, or in another order", "the same sample, drawn otherwise"
LOSS, WEIGHTS = "the same samples, another loss", "the same losses, another"


class Record(NamedTuple):
    """One micro-batch that was trained on."""

    epoch: int
    step: int  # of the run, from 0
    micro: int  # of the step, over all ranks
    indices: list[int]
    rows: list[int]  # a checksum of each sample with its random changes
    loss: float


@dataclass
class Start:
    """What one start of a run did, over all its ranks."""

    facts: dict  # of its first line: size, batch, micro, threads, names of the weights, ...
    records: dict[tuple[int, int], Record] = field(default_factory=dict)  # by (step, micro-batch)
    weights: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # checksums, by (step, place)

    @property
    def first_step(self) -> float:
        return min((step for step, _ in self.records), default=math.inf)


class Difference(NamedTuple):
    """Where two runs first differ."""

    step: int  # from 0
    sample: int | None  # its index in the dataset
    why: str

    def __str__(self):
        return f"step {self.step}{'' if self.sample is None else f', sample {self.sample}'}: {self.why}"


class Ledger:
    """The ledger of one rank."""

    def __init__(self, folder: Path, rank: int, **facts):
        folder.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.file = os.open(folder / f"rank_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.write(session=os.getsid(0), time=time.monotonic_ns(), **facts)  # one session for one start

    def write(self, **facts):
        """Write a line in one call. It starts with a line break, because a kill may have cut the line before."""
        os.write(self.file, ("\n" + json.dumps(facts)).encode())

    def micro_batch(self, state, key, batch, loss: Tensor):
        """Record a micro-batch that was trained on at this state."""
        rows = [checksum(row) for row in _rows(batch, key.count)]
        place = [state.epoch, state.step, key.number]
        self.write(at=place, indices=key.indices, rows=rows, loss=float(loss).hex())

    def step(self, step: int, weights: list[Tensor], world: World):
        """Record the weights after a step; of sharded weights, this rank's part."""
        sharded = any(hasattr(one, "placements") for one in weights)
        place = f"shard {world.rank} of {world.size}" if sharded else f"rank {world.rank}"
        self.write(step=step, place=place, weights=[checksum([one]) for one in weights])


def recording_trainer(chosen: type, folder: Path) -> type:
    """Return a subclass of the trainer class `chosen` that keeps a ledger in a folder."""

    class Keeper(chosen):
        def fit(self, past=None):
            named = model_tensors(self.model)
            self.weights = {name: one for name, one in named.items() if one.is_floating_point()}
            facts = {
                "size": self.world.size,
                "batch": self.plan.batch,
                "micro": self.plan.micro,
                "engine": self.plan.engine,
            }
            facts |= {"threads": torch.get_num_threads(), "names": [*self.weights]}
            self.ledger = Ledger(folder, self.world.rank, **facts)
            self.pause = float((folder / PAUSE).read_text()) if (folder / PAUSE).exists() else math.inf
            return super().fit(past)

        def call_training_step(self, batch, micro_batch):
            while self.state.step >= self.pause:
                time.sleep(0.01)
            loss = super().call_training_step(batch, micro_batch)
            if micro_batch.count:
                self.ledger.micro_batch(self.state, micro_batch, batch, loss.detach())
            return loss

        def optimizer_step(self):
            norm = super().optimizer_step()
            self.ledger.step(self.state.step, [*self.weights.values()], self.world)
            return norm

    return Keeper


def pause(folder: Path, step: int | None):
    """Make the next start of the run wait after this many steps until it is killed; None: it does not wait."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAUSE).write_text(str(math.inf if step is None else step))


def checksum(tensors: list[Tensor]) -> int:
    """CRC-32 of the bytes of tensors, one after the other; of sharded tensors, of this rank's part."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(shards.as_bytes(shards.local_part(tensor).cpu()), crc)
    return crc


def _rows(batch, count: int) -> list[list[Tensor]]:
    """The tensors of each sample of a collated batch."""
    whole = [part for _, part in tensors.named_tensors(batch) if part.ndim and len(part) == count]
    return [[part[row] for part in whole] for row in range(count)]


def progress(folder: Path, session: int, rank: int = 0) -> int | None:
    """Return how many steps a run has done, by a rank's ledger of the start with this session id.

    None before its first sample, 0 until a step is done.
    """
    file, mine, done = folder / f"rank_{rank}.jsonl", False, None
    for facts in _lines(file) if file.exists() else ():
        mine = facts.get("session", session if mine else None) == session
        if mine and "session" not in facts:
            done = facts["step"] + 1 if "weights" in facts else done or 0
    return done


def read(folder: Path) -> list[Start]:
    """The starts of a run, in order."""
    starts: dict[int, Start] = {}
    for file in sorted(folder.glob("rank_*.jsonl")):
        for facts in _lines(file):
            if "session" in facts:
                start = starts.setdefault(facts["session"], Start(facts))
            elif "at" in facts:
                record = Record(*facts["at"], facts["indices"], facts["rows"], float.fromhex(facts["loss"]))
                start.records[record.step, record.micro] = record
            else:
                start.weights[facts["step"], facts["place"]] = facts["weights"]
    return sorted(starts.values(), key=lambda start: start.facts["time"])


def _lines(file):
    """Yield the lines' contents, without those that a kill cut short."""
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def trained_on(starts: list[Start]) -> dict[tuple[int, int], list[int]]:
    """Return the samples, in order, of each (epoch, step) that led to the run's present state.

    If a later start repeated a step, only the repetition counts.
    """
    kept: dict[tuple[int, int], Record] = {}
    for start in starts:
        kept = {at: record for at, record in kept.items() if at[0] < start.first_step} | start.records
    steps: dict[tuple[int, int], list[int]] = {}
    for _, record in sorted(kept.items()):
        steps.setdefault((record.epoch, record.step), []).extend(record.indices)
    return steps


def first_difference(truth: list[Start], other: list[Start]) -> Difference | None:
    """Where any start of a run first differs from the true run, None if nowhere."""
    wanted = {at: record for start in truth for at, record in start.records.items()}
    weights = {at: value for start in truth for at, value in start.weights.items()}
    differences = []
    for start in other:
        pairs = [(wanted.get(at), record) for at, record in start.records.items()]
        differences += [difference for one, record in pairs if (difference := _difference(one, record))]
        for (step, place), values in start.weights.items():
            pairs = zip(start.facts["names"], values, weights.get((step, place), values), strict=True)
            names = [name for name, value, true in pairs if value != true]
            if names:
                why = f"{WEIGHTS} {names[0]} after it ({len(names)} of {len(values)} tensors)"
                differences.append(Difference(step, None, why))
    return min(differences, key=lambda one: (one.step, one.sample is None), default=None)


def _difference(wanted, record):
    step, first = record.step, record.indices[0]
    if wanted is None or wanted.indices != record.indices:
        return Difference(step, first, SAMPLES)
    for index, row, wanted_row in zip(record.indices, record.rows, wanted.rows):
        if row != wanted_row:
            return Difference(step, index, DRAWN)
    if record.loss == wanted.loss or (math.isnan(record.loss) and math.isnan(wanted.loss)):
        return None
    return Difference(step, first, LOSS)


class Distance(NamedTuple):
    """The distance between the newest checkpoints of two runs."""

    share: float  # the largest difference of a weight, as a share of the largest of its tensor
    names: list[str]  # of all tensors that differ in any bit, also of the optimizer's state


def distance(one: Path, other: Path) -> Distance:
    """Compare the newest checkpoints of two folders."""
    a, b = _newest(one), _newest(other)
    bits = [{name: (value.shape, checksum([value])) for name, value in tensors.items()} for tensors in (a, b)]
    names = [name for name in {**a, **b} if bits[0].get(name) != bits[1].get(name)]
    shares = [_share(a.get(name), b.get(name)) for name in names if name.startswith("model.")]
    return Distance(max(shares, default=0.0), names)


def _share(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    gap = torch.nan_to_num((one.double() - other.double()).abs(), nan=math.inf).max().item()
    return gap / max(one.double().abs().max().item(), 1e-30)


def _newest(folder: Path) -> dict[str, Tensor]:
    newest = next(iter(run_folder.list_checkpoints(folder)), None)
    manifest = state.read_manifest(newest)
    tensors = shards.make_empty(manifest["tensors"])
    shards.read(newest, [*manifest["shards"]], tensors)
    return tensors
