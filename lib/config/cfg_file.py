"""The -cfg file: `flag: value` lines in YAML, read as text. Whatever else a file holds is refused, and at once."""

import re
import stat
from pathlib import Path

import yaml

from lib.utils.errors import UsageError

SIZE, WORDS, DEPTH = 1 << 16, 2000, 3  # limits: characters, keys and values, levels
KEY = re.compile(r"[A-Za-z]\w*", re.ASCII)


def read(path: str) -> dict[str, list[str]]:
    """The values of each key in a YAML file of flags, as text; the key `about`, which a run writes for people, is
    passed over."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # a pipe may never end, and is read twice
            raise UsageError(f"-cfg {path!r}: cannot be read (it is no regular file)")
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(SIZE + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"-cfg {path!r}: cannot be read ({error})") from None
    if len(text) > SIZE:
        raise UsageError(f"-cfg {path}: larger than {SIZE:,} characters, which no file of flags is")
    try:
        _check_plain(path, text)
        root = yaml.compose(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"-cfg {path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"-cfg {path}: {'empty' if root is None else 'no mapping'}; `flag: value` lines are wanted")
    entries = {}
    for key, node in root.value:
        name = _key(path, key)
        if name in entries:
            raise UsageError(f"-cfg {path}: the key {name!r} stands there twice")
        entries[name] = [] if name == "about" else _values(path, name, node)
    entries.pop("about", None)
    return entries


def _check_plain(path, text):
    depth = 0
    for count, event in enumerate(yaml.parse(text, yaml.BaseLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or depth > DEPTH:
            raise UsageError(f"-cfg {path}: holds YAML tags, aliases or nests; plain `flag: value` lines are wanted")
        if count > WORDS:
            raise UsageError(f"-cfg {path}: more than {WORDS} keys and values, which no file of flags has")


def _key(path, node):
    if isinstance(node, yaml.ScalarNode) and KEY.fullmatch(node.value) and node.value != "cfg":
        return node.value
    told = repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
    raise UsageError(f"-cfg {path}: {told} is no key: the names of flags are, but for cfg, as in `epochs: 3`")


def _values(path, name, node):
    values = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(value, yaml.ScalarNode) for value in values):
        raise UsageError(f"-cfg {path}: {name!r} must be a plain value or a list of them")
    if any(value.style is None and value.value.lower() in ("", "~", "null") for value in values):
        raise UsageError(f"-cfg {path}: {name!r} has no value: give one, or leave the line out")
    return [value.value for value in values]
