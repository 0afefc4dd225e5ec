"""The lock file: YAML on disk, ``Lock`` in memory.

People read and compare it: each thing that stays has a line, offsets are in hex, and the order is
fixed. Messages name line and key. Digests in the file are checked when it is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import LOCK_VERSION, KeptCode, Lock, digest_of
from pytest_negativa.storage.output import write_output
from pytest_negativa.storage.records import encode_hook
from pytest_negativa.storage.urls import Url, read_input
from pytest_negativa.storage.yaml_document import Node, Place, YamlError, parse_document
from pytest_negativa.storage.yaml_records import convert

MAX_BYTES = 64 << 20
"""A lock at kernel granularity of some thousand cubins has a few MB."""

MAX_ITEMS = 1_000_000
"""Commas and line breaks. Reading 20,000 lines that keep code takes 0.9 s.

A lock that keeps all 46,400 elements of PyTorch 2.11 for CUDA 13 has 232,000.
"""

_HEAD = """\
# What a test suite needs of the GPU code in these libraries, {how}.
# Written by "negativa lock", applied by "negativa slim"; to be committed, not edited.
"""
_REMEDY = "restore the file from version control, or make it again with negativa lock"
_CHANGED = "its lines don't match their digest: one was lost, added or changed"
_OTHER_VERSION = "update pytest-negativa, or make the lock again (negativa lock)"
_MAX_TEXT = 400
_WIDTH = 1 << 24
_CONFLICT = re.compile(rb"^<<<<<<< ", re.MULTILINE)

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
    rows = (*document["libraries"], *document["files"])
    for library, plain in zip((*lock.libraries, *lock.files), rows, strict=True):
        plain["kept"] = [
            _kept_line(kept, as_plain)
            for kept, as_plain in zip(library.kept, plain["kept"], strict=True)
        ]
    if not lock.files:
        del document["files"]
    devices = document["proof"]["devices"]
    document["proof"]["devices"] = [_Line(device) for device in devices]
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    proved = lock.proof.proved
    how = "as proved on copies without the rest" if proved else "as traced: this is NOT PROVED"
    return (_HEAD.format(how=how) + text).encode()


def _kept_line(kept: KeptCode, plain: dict[str, Any]) -> dict[str, Any]:
    for key in ("offset", "region"):
        if plain.get(key) is not None:
            plain[key] = _Hex(plain[key])
    # Names of functions are long, so each gets its own line.
    return plain if kept.functions else _Line(plain)


def decode_lock(data: bytes, origin: str) -> Lock:
    """The lock in ``data``; ``origin`` (a path) is for messages.

    Raises:
        StoreError: not a lock, of a version that this release does not read, or a line of it was
            lost, added or changed.
    """
    root = _compose(data, origin)
    found = root.value.get("format_version") if isinstance(root.value, dict) else None
    if found is None or type(found.value) is not int:
        raise StoreError(f"{origin}:{root.place.line}: not a lock file: it has no format_version")
    if found.value != LOCK_VERSION:
        problem = f"format_version {found.value}, this release reads {LOCK_VERSION}"
        raise _error(origin, found.place, problem, _OTHER_VERSION)
    try:
        lock = convert(root, Lock)
    except YamlError as e:
        raise _error(origin, e.place, str(e)) from e
    _check_digests(lock, root, origin)
    return lock


def _check_digests(lock: Lock, root: Node, origin: str) -> None:
    """Compare digests with the lines.

    Raises:
        StoreError: a line was lost, added or changed.
    """
    for key, libraries in ("libraries", lock.libraries), ("files", lock.files):
        for index, library in enumerate(libraries):
            if library.digest != digest_of(library):
                where = root.nearest([key, index]).place
                raise _error(origin, where, f"{_brief(library.path)}: {_CHANGED}")
    if lock.digest != digest_of(lock):
        raise _error(
            origin,
            root.nearest(["digest"]).place,
            "the lines outside of the libraries, or the list of libraries, don't match their "
            "digest",
        )


def save_lock(lock: Lock, path: Path | Url) -> None:
    """Write a lock to a file, a URL, or standard output: see ``write_output``.

    Raises:
        StoreError: it can't be written; nothing is left behind.
    """
    write_output(path, encode_lock(lock))


def load_lock(path: Path | Url) -> Lock:
    """Read a lock file.

    Raises:
        StoreError: it can't be read, is no lock, or of another version.
    """
    return decode_lock(read_input(path, MAX_BYTES), str(path))


def _compose(data: bytes, origin: str) -> Node:
    try:
        root = parse_document(data, MAX_ITEMS)
    except YamlError as e:
        merged = "; it holds the marks of a merge conflict" if _CONFLICT.search(data) else ""
        raise StoreError(
            f"{origin}:{e.place.line}: not a lock file: {_brief(str(e))}{merged}"
        ) from e
    if root is None:
        raise StoreError(f"{origin}:1: not a lock file: it is empty")
    return root


def _error(origin: str, where: Place, problem: str, remedy: str = _REMEDY) -> StoreError:
    return StoreError(f"{origin}:{where.line}: {_brief(problem)}; {remedy}")


def _brief(text: str) -> str:
    """A text without the middle of a name that is megabytes long."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}...{text[-half:]}"
