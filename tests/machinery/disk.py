"""A disk that is full for some shards, and a model of one that loses power: what may be found after a list of calls.

Only fsync promises anything. Of what was written to a file since its last fsync all may be there, half or nothing, or
zeros, or the old content; what was made, renamed or removed in a folder since the folder's last fsync may be there or
not, each by itself. A rename is one change: both of its names or neither.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lib.utils.checkpoint import shards

ARRIVED = ("all", "half", "none", "zeros", "old")


def read_tree(folder: Path) -> dict:
    """The content of a folder: {relative path: bytes of a file, str of a link's target, None of a folder}."""
    return {str(path.relative_to(folder)): _read(path) for path in sorted(Path(folder).rglob("*"))}


def _read(path):
    if path.is_symlink():
        return str(path.readlink())
    return None if path.is_dir() else path.read_bytes()


def write_tree(tree: dict, folder: Path):
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    for name, content in tree.items():
        path = Path(folder) / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


@dataclass(eq=False)
class Node:
    """A file, folder or link: its state on disk, and its changes that are not synced."""

    content: bytes | str | None  # as in a tree
    writes: list = field(default_factory=list)  # since the last fsync: (offset, bytes); (length, None): cut
    entries: dict = field(default_factory=dict)  # of a folder: name -> Node, at present
    synced: dict = field(default_factory=dict)  # the same on disk


class Disk:
    """A tree, the calls that change it, and what a loss of power would leave."""

    def __init__(self, tree: dict):
        self.root, self.opened = Node(None), {}
        self.pending = []  # renames that are not synced: each a tuple of (folder, name, Node or None)
        for path, content in tree.items():
            folder, name = self.place(path)
            folder.entries[name] = folder.synced[name] = Node(content)

    def place(self, path):
        *folders, name = Path(path).parts or (".",)
        node = self.root
        for folder in folders:
            node = node.entries[folder]
        return node, name

    def find(self, path):
        folder, name = self.place(path)
        return self.root if path == "." else folder.entries[name]

    def apply(self, call: tuple):
        match call:
            case ("open" | "read", path, handle, flags):
                folder, name = self.place(path)
                if flags & os.O_CREAT and name not in folder.entries:
                    self.change((folder, name, Node(b"")))
                self.opened[handle] = self.find(path)
                if flags & os.O_TRUNC:
                    self.opened[handle].writes.append((0, None))
            case ("write", _, handle, offset, data):
                self.opened[handle].writes.append((offset, data))
            case ("fsync", _, handle):
                self.sync(self.opened[handle])
            case ("rename", old, new):
                self.change((*self.place(old), None), (*self.place(new), self.find(old)))
            case ("symlink", path, target):
                self.change((*self.place(path), Node(target)))
            case ("mkdir", path):
                self.change((*self.place(path), Node(None)))
            case ("unlink" | "rmdir", path):
                self.change((*self.place(path), None))

    def change(self, *changes):
        _enter(changes, lambda folder: folder.entries)
        self.pending.append(changes)

    def sync(self, node):
        if node.content is None:
            for changes in [changes for changes in self.pending if any(folder is node for folder, _, _ in changes)]:
                _enter(changes, lambda folder: folder.synced)
                self.pending.remove(changes)
        else:
            node.content = _written(node, "all")
            node.writes.clear()

    def now(self) -> dict:
        return self.tree(self.pending, {})

    def states(self) -> Iterator[dict]:
        dirty = [node for node in dict.fromkeys(self.opened.values()) if node.writes]
        losses = [dict.fromkeys(dirty, arrived) for arrived in ARRIVED]
        losses += [{node: arrived} for node in dirty for arrived in ARRIVED[1:]]
        for kept in _subsets(self.pending):
            for arrived in losses:
                yield self.tree(kept, arrived)

    def tree(self, kept, arrived) -> dict:
        names = {}
        _enter(itertools.chain.from_iterable(kept), lambda folder: names.setdefault(folder, dict(folder.synced)))
        tree = {}

        def walk(folder, path):
            for name, node in names.get(folder, folder.synced).items():
                whole = f"{path}{name}"
                tree[whole] = _written(node, arrived.get(node, "all")) if node.writes else node.content
                if node.content is None:
                    walk(node, f"{whole}/")

        walk(self.root, "")
        return tree


def fail_writes(monkeypatch, when):
    """Make the write of a shard fail half way if when(rank, step) is true."""
    real = shards.write

    def write(path, *blocks):
        rank, step = os.environ["RANK"], path.parent.name.removesuffix(".partial").partition("_step_")[2]
        if "shard" in path.name and when(int(rank), int(step)):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *blocks)

    monkeypatch.setattr(shards, "write", write)


def _enter(changes, names_of):
    for folder, name, node in changes:
        names = names_of(folder)
        names.pop(name, None)
        if node is not None:
            names[name] = node


def _written(node, arrived):
    """The content of a file if this much of the bytes that were not synced has arrived."""
    if arrived == "old":
        return node.content
    content, total = bytearray(node.content), sum(len(data or b"") for _, data in node.writes)
    left = {"none": 0, "half": total // 2}.get(arrived, total)
    for at, data in node.writes:
        if data is None:
            content[:] = content[:at].ljust(at, b"\0")
            continue
        part = bytes(len(data)) if arrived == "zeros" else data[:left]
        left -= len(part)
        content.extend(bytes(max(0, at - len(content))) if part else b"")
        content[at : at + len(part)] = part
    return bytes(content)


def _subsets(pending):
    """All subsets of up to 5 changes. Of more: each prefix, each suffix, each change by itself, and all but each."""
    if len(pending) <= 5:
        return [list(itertools.compress(pending, bits)) for bits in itertools.product((0, 1), repeat=len(pending))]
    cuts = range(len(pending) + 1)
    ends = [pending[:at] for at in cuts] + [pending[at:] for at in cuts]
    return ends + [[change] for change in pending] + [pending[:at] + pending[at + 1 :] for at in cuts]
