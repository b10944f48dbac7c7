"""Reads shards that a URL names, as s3://bucket/shards or https://host/train-{0000..0127}.tar, for -dataset tar.

fsspec knows the kinds of URLs; most need a package of their own, as s3fs, which also finds the credentials.
"""

import bisect
import contextlib
import errno
import functools
import glob
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.utils import merge_offset_ranges

from lib.utils import files
from lib.utils.errors import UsageError
from scripts import shard_cache

WAIT_S = 20  # for an answer of a web server, and for more of it; aiohttp's 5 minutes are for whole files
AT_ONCE = 8  # shards of which an index is made
BLOCK = 4 << 20  # bytes of a request then: a shard is read as a whole, since its headers lie between the images
GAP, MOST = 1 << 16, 1 << 23  # samples so near to each other are one request, of so many bytes at most
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "mtime", "created")  # as servers call them


class Storage:
    """What tar_index.Disk does, for a URL."""

    def __init__(self, url: str):
        """Raise UsageError for a kind of URL that fsspec does not know, or whose package is missing."""
        try:
            self.fs = file_system(url, os.getpid())
        except (ImportError, ValueError) as error:
            raise UsageError(f"-data {url}: {error}") from None

    def glob(self, folder: str, pattern: str) -> list[str]:
        found = files.retry(lambda: call(self.fs.glob, f"{glob.escape(folder.rstrip('/'))}/{pattern}"))
        return [self.fs.unstrip_protocol(file) for file in found]

    def version(self, file: str) -> tuple:
        """Return what is another for another content, as far as the server says so."""
        about = files.retry(lambda: call(self.fs.info, file))
        return about["size"], str(next((about[name] for name in VERSIONS if about.get(name)), ""))

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[BinaryIO]:
        with os_errors(), self.fs.open(file, "rb", block_size=BLOCK, cache_type="readahead") as opened:
            yield opened

    def copy(self, shard: str, file: Path, size: int) -> None:
        """Copy a shard of so many bytes. Raises OSError, also if others come."""
        files.retry(lambda: call(self.fs.get_file, shard, str(file)))
        if file.stat().st_size != size:
            raise OSError(errno.EIO, f"{file.stat().st_size:,} bytes came for {size:,}", shard)

    def map(self, function: Callable[[str], Any], shards: Iterable[str]) -> Iterator[Any]:
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            yield from pool.map(function, shards)
        finally:
            pool.shutdown(cancel_futures=True)


@functools.cache
def file_system(url: str, process: int) -> fsspec.AbstractFileSystem:
    """Return what reads a URL in this process: a fork leaves fsspec's threads behind.

    Those of the process that forked this one are kept here: as they go, they close its connections, which takes
    them out of the epoll instance that both processes share, and it would wait for ever.
    """
    options = {}
    if url.startswith("http"):
        import aiohttp

        given = fsspec.config.conf.get(url.partition(":")[0], {}).get("client_kwargs", {})
        timeout = aiohttp.ClientTimeout(sock_connect=WAIT_S, sock_read=WAIT_S)
        options["client_kwargs"] = {"timeout": timeout, **given}
    return fsspec.core.url_to_fs(url, **options)[0]


def read(ranges: list[tuple[str, int, int]]) -> list[bytes]:
    """Return the bytes of each (shard, offset, size), of a copy on this node if there is one. Raises as `fetch`."""
    found = {one: shard_cache.read(*one) for one in ranges}
    if missing := [one for one, data in found.items() if not data]:
        found |= zip(missing, fetch(missing))
    return [found[one] or b"" for one in ranges]


def fetch(ranges: list[tuple[str, int, int]]) -> list[bytes]:
    """Return the bytes of each (shard, offset, size): all are fetched at once, neighbours by one request.

    Raises UsageError if a server gives another number of bytes, and OSError.
    """
    fs = file_system(ranges[0][0], os.getpid())
    shards, begins, sizes = (list(column) for column in zip(*ranges))
    ends = [begin + size for begin, size in zip(begins, sizes)]
    merged = merge_offset_ranges(shards, begins, ends, max_gap=GAP, max_block=MOST)
    try:
        answers = files.retry(lambda: call(fs.cat_ranges, *merged, on_error="raise"))
    except OSError as error:
        number = error.errno or errno.ENOENT
        raise OSError(number, error.strerror or os.strerror(number), ", ".join(sorted({*shards}))) from error
    blocks = sorted((shard, begin, data) for shard, begin, _, data in zip(*merged, answers))
    for shard, begin, end, data in zip(*merged, answers):
        wanted = (end or 0) - begin
        if len(data) != wanted:
            fault = f"{len(data):,} bytes came for {wanted:,} from {begin:,} on"
            raise UsageError(f"{shard}: {fault}: it changed, or the server cannot read a part of a file")
    places = [block[:2] for block in blocks]
    found = []
    for shard, offset, size in ranges:
        _, begin, data = blocks[bisect.bisect(places, (shard, offset)) - 1]
        found.append(bytes(data[offset - begin : offset - begin + size]))
    return found


def call(function: Callable, *args: Any, **options: Any) -> Any:
    with os_errors():
        return function(*args, **options)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Raise errors of a connection, which each package has of its own, as OSErrors that are worth another attempt."""
    try:
        yield
    except (UsageError, PermissionError, tarfile.TarError, EOFError, OverflowError):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # fsspec's FileNotFoundError may be a server that is busy
        if isinstance(error, FileNotFoundError) and (cause is error or getattr(cause, "status", 0) == 404):
            raise
        raise OSError(errno.EIO, f"{type(cause).__name__}: {cause}") from error
