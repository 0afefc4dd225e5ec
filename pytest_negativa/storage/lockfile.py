"""The lock file: YAML on disk, ``Lock`` in memory.

It is made to be read and compared by people: a line for each thing that stays, offsets in hex,
everything in a fixed order. And it comes from a repository, so reading it is strict and bounded:
no tags, no aliases, no key twice, little depth. Messages name line and key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import LOCK_VERSION, KeptCode, Lock
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import decode_hook, encode_hook

DEFAULT_NAME = "negativa.lock"

MAX_BYTES = 64 << 20
"""A lock at kernel granularity of some thousand cubins has a few MB."""

_MAX_DEPTH = 8
# Longer than any number that a record takes.
_MAX_DIGITS = 30
_HEAD = b"""\
# What a test suite needs of the GPU code in these libraries, as proved on copies without the rest.
# Written by "negativa lock", applied by "negativa slim"; to be committed, not edited.
"""
_WIDTH = 1 << 24
_INT = re.compile(r"[-+]?[0-9]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
# Of the path in msgspec's messages, as in "$.libraries[0].kept[3].offset".
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Hex(int):
    """A number that is written in hex."""


class _Line(dict[str, Any]):
    """A mapping that takes one line."""


class _Dumper(_SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_hex(dumper: Any, number: _Hex) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:int", hex(number))


def _write_line(dumper: Any, line: _Line) -> Any:
    return dumper.represent_mapping("tag:yaml.org,2002:map", line.items(), flow_style=True)


_Dumper.add_representer(_Hex, _write_hex)
_Dumper.add_representer(_Line, _write_line)


def encode_lock(lock: Lock) -> bytes:
    """The text of the file. The same lock gives the same bytes."""
    document = msgspec.to_builtins(lock, enc_hook=encode_hook)
    for library, plain in zip(lock.libraries, document["libraries"], strict=True):
        plain["kept"] = [
            _kept_line(kept, as_plain)
            for kept, as_plain in zip(library.kept, plain["kept"], strict=True)
        ]
    devices = document["proof"]["devices"]
    document["proof"]["devices"] = [_Line(device) for device in devices]
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    return _HEAD + text.encode()


def _kept_line(kept: KeptCode, plain: dict[str, Any]) -> dict[str, Any]:
    for key in ("offset", "region"):
        if plain.get(key) is not None:
            plain[key] = _Hex(plain[key])
    # Names of functions are long, so each gets its own line.
    return plain if kept.functions else _Line(plain)


def decode_lock(data: bytes, origin: str) -> Lock:
    """The lock in ``data``; ``origin`` (a path) is for messages.

    Raises:
        StoreError: not a lock, or of a version that this release does not read.
    """
    root = _compose(data, origin)
    found = root.value.get("format_version") if isinstance(root.value, dict) else None
    if found is None or type(found.value) is not int:
        raise StoreError(f"{origin}:{root.line}: not a lock file: it has no format_version")
    version = found.value
    if version != LOCK_VERSION:
        remedy = "update pytest-negativa" if version > LOCK_VERSION else "make the lock again"
        raise StoreError(
            f"{origin}:{found.line}: format_version {version}, this release reads "
            f"{LOCK_VERSION}; {remedy}"
        )
    try:
        return msgspec.convert(root.plain(), Lock, dec_hook=decode_hook)
    except msgspec.ValidationError as e:
        raise StoreError(f"{origin}:{_line_of(root, str(e))}: {e}") from e


def save_lock(lock: Lock, path: Path) -> None:
    """Write a lock file.

    Raises:
        StoreError: it can't be written; nothing is left behind.
    """
    write_atomically(path, encode_lock(lock))


def load_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        StoreError: it can't be read, is no lock, or of another version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise StoreError(f"{path}: cannot be read: {e.strerror}") from e
    return decode_lock(data, os.fspath(path))


@dataclass(slots=True)
class _Node:
    """A value of the document and the line that it begins in."""

    value: Any
    line: int

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def _compose(data: bytes, origin: str) -> _Node:
    if len(data) > MAX_BYTES:
        raise StoreError(f"{origin}: larger than {MAX_BYTES:,} bytes; is this a lock file?")
    try:
        root = _Composer(origin).compose(yaml.parse(data, Loader=_Loader))
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark else 1
        raise StoreError(f"{origin}:{line}: not YAML: {e.problem or e.context}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise StoreError(f"{origin}: not YAML: {' '.join(str(e).split())}") from e
    if root is None:
        raise StoreError(f"{origin}:1: not a lock file: it is empty")
    return root


class _Composer:
    """YAML's events to nodes. PyYAML's own composer has no limit of depth, and takes aliases."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._root: _Node | None = None
        self._open: list[_Node] = []
        self._keys: list[str | None] = []

    def compose(self, events: Iterator[yaml.Event]) -> _Node | None:
        for event in events:
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.MappingStartEvent):
                self._begin(_Node({}, line), event)
            elif isinstance(event, yaml.SequenceStartEvent):
                self._begin(_Node([], line), event)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._open.pop()
                self._keys.pop()
            elif isinstance(event, yaml.ScalarEvent):
                self._check_tag(event, line)
                self._add_scalar(event, line)
            elif isinstance(event, yaml.AliasEvent):
                self._fail(line, "an alias, which lock files don't have")
            elif isinstance(event, yaml.DocumentStartEvent) and self._root is not None:
                self._fail(line, "a second document")
        return self._root

    def _begin(self, node: _Node, event: yaml.CollectionStartEvent) -> None:
        self._check_tag(event, node.line)
        if len(self._open) >= _MAX_DEPTH:
            self._fail(node.line, "nested too deep")
        self._add(node)
        self._open.append(node)
        self._keys.append(None)

    def _add_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        if self._open and isinstance(self._open[-1].value, dict) and self._keys[-1] is None:
            if event.value in self._open[-1].value:
                self._fail(line, f"the key {event.value!r} is there twice")
            self._keys[-1] = event.value
        else:
            self._add(_Node(_resolve(event), line))

    def _add(self, node: _Node) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1].value
        if isinstance(parent, list):
            parent.append(node)
            return
        key = self._keys[-1]
        if key is None:
            self._fail(node.line, "found a list or mapping, expected a key")
        parent[key] = node
        self._keys[-1] = None

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag is not None and event.tag != "!":
            self._fail(line, f"found the tag {event.tag!r}, expected none")

    def _fail(self, line: int, problem: str) -> Any:
        raise StoreError(f"{self._origin}:{line}: not a lock file: {problem}")


def _resolve(event: yaml.ScalarEvent) -> Any:
    text = event.value
    # Quoted, or in a block: text, whatever it looks like.
    if event.style not in (None, "") or not event.implicit[0]:
        return text
    if text in _PLAIN:
        return _PLAIN[text]
    if len(text) <= _MAX_DIGITS:
        if _INT.fullmatch(text):
            return int(text)
        if _HEX.fullmatch(text):
            return int(text, 16)
    return text


def _line_of(root: _Node, message: str) -> int:
    """The line of what a message of msgspec is about, or of the nearest thing around it."""
    node = root
    for key, index, _any in _STEP.findall(message.rpartition("`$")[2]):
        if key and isinstance(node.value, dict) and key in node.value:
            node = node.value[key]
        elif index and isinstance(node.value, list) and int(index) < len(node.value):
            node = node.value[int(index)]
        else:
            break
    return node.line
