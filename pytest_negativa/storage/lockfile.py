"""``negativa.lock`` as YAML: order, hex offsets, digest, limits (64 MiB, 1,000,000 items).

People read and compare it: each thing that stays has a line, offsets are in hex, and the order is
fixed. Messages name line and key. Digests in the file are checked when it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import Lock, digest_of
from pytest_negativa.storage.records import encode_hook
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import read_input, write_output
from pytest_negativa.storage.yaml_document import decode_yaml

MAX_BYTES = 64 << 20
"""A lock at kernel granularity of some thousand cubins has a few MB."""

MAX_ITEMS = 1_000_000
"""Commas and line breaks. Reading 20,000 lines that keep code takes 0.9 s.

A lock that keeps all 46,400 elements of PyTorch 2.11 for CUDA 13 has 232,000.
"""

_HEAD = """\
# What a test suite needs of these libraries, {how}.
# Written by "negativa lock", applied by "negativa slim"; to be committed, not edited.
"""
_REMEDY = (
    "restore the file from version control, update pytest-negativa, or make it again with negativa "
    "lock"
)
_CHANGED = "its lines don't match their digest: one was lost, added or changed"
_WIDTH = 1 << 24

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
    for row in (*document["libraries"], *document["files"]):
        row |= {"kept": [*map(_kept_line, row["kept"])]} if "kept" in row else {}
    proof = document["proof"]
    proof["devices"] = [_Line(device) for device in proof["devices"]]
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    how = "as proved" if proof["proved"] else "as traced: this is NOT PROVED"
    return (_HEAD.format(how=how) + text).encode()


def _kept_line(plain: dict[str, Any]) -> dict[str, Any]:
    for key in ("offset", "region"):
        if plain.get(key) is not None:
            plain[key] = _Hex(plain[key])
    # Names of functions are long, so each gets its own line.
    return plain if plain.get("functions") else _Line(plain)


def decode_lock(data: bytes, origin: str) -> Lock:
    """The lock in ``data``; ``origin`` (a path) is for messages.

    Raises:
        StoreError: not a lock, of a version that this release does not read, or a line of it was
            lost, added or changed.
    """
    lock = decode_yaml(
        data, Lock, origin=origin, max_items=MAX_ITEMS, what="a lock file", remedy=_REMEDY
    )
    if lock.digest != digest_of(lock):
        raise StoreError(_CHANGED, origin, _REMEDY)
    return lock


def save_lock(lock: Lock, path: Path | Url) -> None:
    """Write a lock to a file, a URL, or standard output: see ``write_output``.

    Raises:
        StoreError: it can't be written; nothing is left behind.
    """
    write_output(path, encode_lock(lock))


def load_lock(path: Path | Url) -> Lock:
    """Read a lock file.

    Raises:
        StoreError: it can't be read, is no lock, or of another format.
    """
    return decode_lock(read_input(path, MAX_BYTES), str(path))
