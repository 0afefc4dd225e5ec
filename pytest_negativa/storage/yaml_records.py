"""Records from YAML files: messages with line and key; merge conflicts."""

from __future__ import annotations

import re
import textwrap
from typing import TypeVar

import msgspec

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.records import decode_hook, format_of
from pytest_negativa.storage.yaml_document import Node, Position, YamlError, parse_document

_T = TypeVar("_T")

_MAX_TEXT = 400
_CONFLICT = re.compile(rb"^<<<<<<< ", re.MULTILINE)
# Of the path in msgspec's messages, as in "$.libraries[0].kept[3].offset".
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile("unknown field `(.+)`")


def decode_yaml(
    data: bytes,
    kind: type[_T],
    *,
    origin: object,
    max_items: int,
    what: str,
    remedy: str,
) -> _T:
    """A record from YAML, as ``records.decode_versioned`` from JSON.

    Args:
        max_items: see ``parse_document``.

    Raises:
        StoreError: it is something else, or of another format.
    """
    try:
        root = parse_document(data, max_items) or Node(None, Position(1, 1))
        found, ours = root.nearest(["format"]), format_of(kind)
        if found is root and isinstance(root.value, dict):
            raise YamlError("lacks the key 'format'", root.place)
        if found is not root and type(found.value) is int and found.value != ours:
            raise YamlError(f"format {found.value}, this release reads {ours}", found.place)
        return _convert(root, kind)
    except YamlError as e:
        merged = "; it holds the marks of a merge conflict" if _CONFLICT.search(data) else ""
        # A stranger's file may have a name of megabytes.
        why = textwrap.shorten(str(e), _MAX_TEXT)
        problem = f"not {what} of this release: {why}{merged}"
        raise StoreError(problem, f"{origin}:{e.place.line}", remedy) from e


def _convert(root: Node, kind: type[_T]) -> _T:
    """The record that a document holds.

    Raises:
        YamlError: a key or a value is none of the record's.
    """
    try:
        return msgspec.convert(root.plain(), kind, dec_hook=decode_hook)
    except msgspec.ValidationError as e:
        problem, _, path = str(e).partition(" - at `$")
        steps = [int(index) if index else key for key, index in _STEP.findall(path)]
        node = root.nearest([*steps, *_UNKNOWN.findall(problem)])
        raise YamlError(str(e), node.key_place or node.place) from e
