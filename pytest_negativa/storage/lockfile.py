"""The lock file: YAML on disk, ``Lock`` in memory.

People read and compare it: each thing that stays has a line, offsets are in hex, and the order is
fixed. Messages name line and key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import LOCK_VERSION, KeptCode, Lock
from pytest_negativa.storage.output import write_output
from pytest_negativa.storage.records import decode_hook, encode_hook
from pytest_negativa.storage.yaml_document import Node, YamlError, parse_document

MAX_BYTES = 64 << 20
"""A lock at kernel granularity of some thousand cubins has a few MB."""

_HEAD = b"""\
# What a test suite needs of the GPU code in these libraries, as proved on copies without the rest.
# Written by "negativa lock", applied by "negativa slim"; to be committed, not edited.
"""
_WIDTH = 1 << 24
# Of the path in msgspec's messages, as in "$.libraries[0].kept[3].offset".
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")

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
        raise StoreError(f"{origin}:{root.place.line}: not a lock file: it has no format_version")
    version = found.value
    if version != LOCK_VERSION:
        remedy = "update pytest-negativa" if version > LOCK_VERSION else "make the lock again"
        raise StoreError(
            f"{origin}:{found.place.line}: format_version {version}, this release reads "
            f"{LOCK_VERSION}; {remedy}"
        )
    try:
        return msgspec.convert(root.plain(), Lock, dec_hook=decode_hook)
    except msgspec.ValidationError as e:
        raise StoreError(f"{origin}:{_line_of(root, str(e))}: {e}") from e


def save_lock(lock: Lock, path: Path) -> None:
    """Write a lock to a file, or to standard output: see ``write_output``.

    Raises:
        StoreError: it can't be written; nothing is left behind.
    """
    write_output(path, encode_lock(lock))


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


def _compose(data: bytes, origin: str) -> Node:
    if len(data) > MAX_BYTES:
        raise StoreError(f"{origin}: larger than {MAX_BYTES:,} bytes; is this a lock file?")
    try:
        root = parse_document(data)
    except YamlError as e:
        raise StoreError(f"{origin}:{e.place.line}: not a lock file: {e}") from e
    if root is None:
        raise StoreError(f"{origin}:1: not a lock file: it is empty")
    return root


def _line_of(root: Node, message: str) -> int:
    """The line of what a message of msgspec is about, or of the nearest thing around it."""
    path = message.rpartition("`$")[2]
    steps = [int(index) if index else key or dots for key, index, dots in _STEP.findall(path)]
    return root.nearest(steps).place.line
