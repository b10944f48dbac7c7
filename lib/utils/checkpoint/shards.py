"""Tensors in safetensors files, each rank its own share, and back on any number of ranks.

The file format is safetensors' (https://github.com/huggingface/safetensors, "Format"): the length of a JSON header,
the header, the bytes. Written here, in one pass with its checksum: safetensors' own writer would hold up the training
thread. Read by the library.
"""

import heapq
import json
import logging
import math
import os
import sys
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.utils.checkpoint import run_folder
from lib.utils.distributed import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)
CHUNK = 1 << 20  # bytes
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Piece(NamedTuple):
    """A block of a tensor that one rank holds and writes: its values, and where in the whole it begins."""

    name: str
    values: Tensor
    start: tuple[int, ...]


class Damaged(Exception):
    """A checkpoint that is not what was written; the message names the file and the reason."""


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"shard_{rank:04d}.safetensors"


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is one of FSDP's. Only FSDP imports their module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def pieces(tensors: dict[str, Tensor], world: World, first: Collection[str] = ()) -> list[Piece]:
    """Return this rank's share of the tensors: its own blocks of sharded ones, and some of those that all ranks have.

    Each rank gets about as many bytes of the latter; those named in `first` are rank 0's. Next to sharded tensors
    they are few and small, and all rank 0's: a reader then needs its own file and that one.
    """
    whole = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    mine = [piece for name, tensor in tensors.items() if name not in whole for piece in _block(name, tensor)]
    first = whole if len(whole) < len(tensors) else first
    given = sum(tensor.nbytes for name, tensor in whole.items() if name in first)
    load = [(given if rank == 0 else 0, rank) for rank in range(world.size)]
    heapq.heapify(load)
    for name, tensor in sorted(whole.items(), key=lambda item: (-item[1].numel(), item[0])):
        rank = 0
        if name not in first:
            least, rank = load[0]
            heapq.heapreplace(load, (least + tensor.nbytes, rank))
        if rank == world.rank:
            mine.append(Piece(name, tensor.detach(), (0,) * tensor.ndim))
    return mine


def _block(name, tensor):
    """Return a DTensor's local block, on one rank of those that hold copies of it."""
    copies = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if any(tensor.device_mesh.get_coordinate()[i] for i in copies):
        return []
    local, start = _local(tensor)
    return [Piece(name, local, start)] if local.numel() else []


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, sharded or not."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def _local(tensor):
    """Return the same, and where in the whole it begins, by torch's own arithmetic."""
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local(tensor), tuple(start)


def write(path: Path, blocks: list[tuple[str, Tensor]], starts: dict[str, list] | None = None) -> dict:
    """Write CPU tensors to a safetensors file; it is on disk when this returns {"bytes": n, "crc32": n}.

    `starts`: where blocks begin in their tensors, if not at 0.
    """
    header: dict = {"__metadata__": {"starts": json.dumps(starts)}} if starts else {}
    end = 0
    for name, values in blocks:
        begin, end = end, end + values.nbytes
        kind = DTYPES[values.dtype]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little"), text, *(raw(values) for _, values in blocks)):
            for begin in range(0, len(data), CHUNK):
                chunk = memoryview(data)[begin : begin + CHUNK]
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "crc32": crc}


def checksum(chunks) -> int:
    """Return the CRC-32 of these pieces of bytes, one after the other."""
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


def raw(values: Tensor) -> memoryview | bytes:
    """Return the bytes of a tensor on the CPU."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data if values.numel() else b""


def verify(path: Path, wanted: dict):
    """Raise Damaged unless the file is, byte for byte, what `write` wrote; OSError where it cannot be read."""
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise Damaged(f"{path}: {size:,} bytes instead of {wanted['bytes']:,}")
        with path.open("rb") as file:
            crc = checksum(iter(lambda: file.read(CHUNK), b""))
    except OSError as error:
        if error.errno not in run_folder.MISSING:
            raise
        raise Damaged(f"{path}: is missing ({error.strerror})") from None
    if crc != wanted["crc32"]:
        raise Damaged(f"{path}: its checksum is {crc:08x} instead of {wanted['crc32']:08x}")


def whole(folder: Path, manifest: dict, start: str = "") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names start so, in one piece on the CPU. See `read`."""
    kinds = {word: kind for kind, word in DTYPES.items()}
    facts = {name: about for name, about in manifest["tensors"].items() if name.startswith(start)}
    tensors = {name: torch.empty(shape, dtype=kinds[kind]) for name, (kind, shape) in facts.items()}
    read(folder, [*manifest["shards"]], tensors)
    return tensors


@torch.no_grad()
def read(folder: Path, files: list[str], tensors: dict[str, Tensor]):
    """Fill the tensors, whole or sharded, in place, from the files of a checkpoint, which were verified.

    No more files are opened, in the order given, than it takes.

    Raises:
        Damaged: a file holds something else, or none holds a part of a tensor.
    """
    targets = {name: _local(tensor) for name, tensor in tensors.items()}
    missing = {name: target.numel() for name, (target, _) in targets.items() if target.numel()}
    for file in files:
        if not missing:
            return
        try:
            with safe_open(folder / file, framework="pt") as blocks:
                starts = json.loads((blocks.metadata() or {}).get("starts", "{}"))
                for name in missing.keys() & blocks.keys():
                    target, origin = targets[name]
                    block, start = blocks.get_slice(name), starts.get(name, [0] * target.ndim)
                    kind, shape = block.get_dtype(), block.get_shape()
                    if kind != DTYPES[target.dtype] or len(shape) != target.ndim:
                        raise Damaged(f"{folder / file}: {name} is {kind} {shape} there")
                    missing[name] -= _fill(target, origin, block, start)
        except SafetensorError as error:
            raise Damaged(f"{folder / file}: cannot be read ({error})") from None
        missing = {name: count for name, count in missing.items() if count}
    if missing:
        raise Damaged(f"{folder}: its files lack a part of {', '.join(sorted(missing)[:4])}")


def _fill(target, origin, block, start) -> int:
    """Copy what a block and the target, both somewhere in the whole tensor, have in common. Returns its numbers."""
    if not target.ndim:
        target.copy_(block[...])
        return 1
    low = [max(a, b) for a, b in zip(origin, start)]
    high = [min(a + n, b + m) for a, n, b, m in zip(origin, target.shape, start, block.get_shape())]
    if any(a >= b for a, b in zip(low, high)):
        return 0
    source = block[tuple(slice(a - b, c - b) for a, b, c in zip(low, start, high))]
    target[tuple(slice(a - b, c - b) for a, b, c in zip(low, origin, high))].copy_(source)
    return source.numel()


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor):
    """Give a tensor, or the local block of a sharded one, the values of a whole one."""
    target, start = _local(tensor)
    target.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, target.shape))] if whole.ndim else whole)


def total_bytes(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of all tensors, each counted whole."""
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors.values())
