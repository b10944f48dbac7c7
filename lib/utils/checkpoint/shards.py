"""The files of a checkpoint: a safetensors file of each rank, read on any number of ranks.

The file format is safetensors' (https://github.com/huggingface/safetensors, "Format"): the length of a JSON header,
the header, the bytes. Read by the library. Written here, with its checksum: files of the library's writer
(0.8) have mode 600 and metadata in any order, and its errors have no number.
"""

import concurrent.futures
import functools
import json
import os
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as TYPES
from torch import Tensor

from lib.utils import files, watchdog
from lib.utils.distributed import World
from lib.utils.errors import UsageError

FILE_NAME = "shard_{:04d}.safetensors"  # of a rank
CHUNK = 1 << 20  # bytes
CHECKSUMS = "crc32_of_tensors"  # in a weights file's metadata, JSON
KINDS = {name: TYPES[name] for name in "F64 F32 F16 BF16 C64 I64 I32 I16 I8 U8 BOOL".split() if name in TYPES}
DTYPES = {kind: name for name, kind in KINDS.items()}


class Damaged(Exception):
    """A checkpoint differs from what was written; the message names the file and the reason."""


def schema(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Return the type and shape of every tensor, as JSON has it. Raises UsageError for a type that DTYPES lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UsageError(f"{name} is of {tensor.dtype}, which no file holds: convert it or take persistent=False")
    return {name: [DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}


def blocks_of_rank(tensors: dict[str, Tensor], world: World) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what this rank writes: its own blocks of sharded tensors; a writer also all whole ones.

    The metadata for its file, the second, says where they begin in their tensors, if not at 0 (JSON).
    """
    own = {name: _local_and_offset(one) for name, one in tensors.items() if world.is_writer or is_sharded(one)}
    blocks = {name: block for name, (block, _) in own.items() if block.numel()}  # the last ranks may have none
    return blocks, {"starts": json.dumps({name: start for name, (_, start) in own.items() if any(start)})}


def copy_to_cpu(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies on the CPU, by name; those of a GPU's in pinned memory, which torch keeps for the next copies."""
    copies = {}
    for name, one in tensors:
        copies[name] = torch.empty_like(one, device="cpu", pin_memory=one.is_cuda)
        copies[name].copy_(one, non_blocking=one.is_cuda)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # once for all
    return copies


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict:
    """Write CPU tensors to a new safetensors file; it is on disk when this returns {"bytes": n, "crc32": n}."""
    header: dict = {"__metadata__": metadata or {}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = len(text).to_bytes(8, "little"), text, *map(as_bytes, tensors.values())
    with path.open("xb") as file, concurrent.futures.ThreadPoolExecutor(1) as thread:
        file.writelines(parts)
        file.flush()
        synced = thread.submit(os.fsync, file.fileno())  # the disk works while the checksum is computed
        crc = functools.reduce(lambda crc, data: zlib.crc32(data, crc), parts, 0)
        synced.result()
        return {"bytes": file.tell(), "crc32": crc}


def write_weights(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Write whole CPU tensors, with checksums, to a new file for readers of safetensors (Transformers: "format")."""
    write(path, tensors, {"format": "pt", CHECKSUMS: json.dumps(checksums(tensors)), **(about or {})})


def read_weights(path: Path, step: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises Damaged if a checksum is wrong, or it is of another `step`."""
    files.open_regular(path, "rb", follow=True).close()  # no pipe, which the library would wait for
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
            sums = json.loads(about.get(CHECKSUMS, "{}"))
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"{path}: cut off or changed ({error})") from error
    if sums and sums != checksums(tensors):
        raise Damaged(f"{path}: a checksum of its tensors is wrong")
    if step is not None and about.get("step", str(step)) != str(step):
        raise Damaged(f"{path} is of step {about['step']}, not of step {step}")
    return tensors


def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor's bytes."""
    return {name: zlib.crc32(as_bytes(values.detach().cpu())) for name, values in tensors.items()}


def verify(path: Path, wanted: dict) -> None:
    """Raise Damaged unless the file is what `write` wrote; OSError if it is missing, or the disk does not answer."""
    crc = 0
    with files.open_regular(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != wanted["bytes"]:
            raise Damaged(f"{path}: its size is wrong")
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            watchdog.moved()
    if crc != wanted["crc32"]:
        raise Damaged(f"{path}: its checksum is wrong")


def make_empty(schema: dict[str, list]) -> dict[str, Tensor]:
    """Return tensors of these types and shapes, with any values."""
    return {name: torch.empty(shape, dtype=KINDS[kind]) for name, (kind, shape) in schema.items()}


@torch.no_grad()
def read(folder: Path, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, from the files of a checkpoint. Raises Damaged if all lack a part of one."""
    targets = {name: _local_and_offset(tensor) for name, tensor in tensors.items()}
    missing = {name: target.numel() for name, (target, _) in targets.items() if target.numel()}
    for file in names:
        if not missing:
            return
        with safe_open(folder / file, framework="pt") as blocks:
            starts = json.loads((blocks.metadata() or {}).get("starts", "{}"))
            for name in missing.keys() & blocks.keys():
                start = starts.get(name, [0] * tensors[name].ndim)
                missing[name] -= _fill(*targets[name], blocks.get_slice(name), start)
        missing = {name: count for name, count in missing.items() if count}
    if missing:
        raise Damaged(f"{folder}: its files lack a part of {', '.join(sorted(missing)[:4])}")


def _fill(target: Tensor, origin: Sequence[int], block: Any, start: Sequence[int]) -> int:
    """Copy the overlap of a block and the target, two parts of a tensor. Return its number of elements."""
    low = [max(a, b) for a, b in zip(origin, start)]
    high = [min(a + n, b + m) for a, n, b, m in zip(origin, target.shape, start, block.get_shape())]
    if any(a >= b for a, b in zip(low, high)):
        return 0
    place = target[tuple(slice(a - b, c - b) for a, b, c in zip(low, origin, high))]
    place.copy_(block[tuple(slice(a - b, c - b) for a, b, c in zip(low, start, high))])
    return place.numel()


@torch.no_grad()
def copy_whole(tensor: Tensor, whole: Tensor) -> None:
    """Give a tensor, or the local block of a sharded one, the values of a whole one."""
    target, start = _local_and_offset(tensor)
    target.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, target.shape))])


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the whole tensor if it is not sharded."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def _local_and_offset(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what `local_part` returns, and where in the whole tensor it begins, by torch's own arithmetic."""
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_part(tensor), tuple(start)


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Return whether a tensor is one of FSDP's. Only FSDP imports their module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def as_bytes(values: Tensor) -> memoryview | bytes:
    """Return the bytes of a tensor on the CPU; a single value of any stride counts as contiguous."""
    count = values.numel()
    return values.contiguous().as_strided((count,), (1,)).view(torch.uint8).numpy().data if count else b""
