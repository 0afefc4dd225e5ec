"""Records from YAML files: messages with line, key and value; merge conflicts."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.records import decode_hook, format_of
from pytest_negativa.storage.yaml_document import Node, Position, YamlError, parse_document

_T = TypeVar("_T")

_MAX_TEXT = 400
_CONFLICT = re.compile(rb"^<<<<<<< ", re.MULTILINE)

# Of the path in msgspec's messages, as in "$.libraries[0].kept[3].offset".
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_KEY = re.compile(r"Object (contains unknown|missing required) field `(.+)`")
_TYPE = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


def decode_yaml(
    data: bytes,
    kind: type[_T],
    *,
    origin: object,
    max_items: int,
    what: str,
    remedy: str,
) -> tuple[_T, Node]:
    """A record from YAML, as ``records.decode_versioned`` from JSON, and the document's root.

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
        return _convert(root, kind), root
    except YamlError as e:
        merged = "; it holds the marks of a merge conflict" if _CONFLICT.search(data) else ""
        problem = f"not {what} of this release: {brief(str(e))}{merged}"
        raise StoreError(problem, f"{origin}:{e.place.line}", remedy) from e


def brief(text: str) -> str:
    """A text without the middle of a name that is megabytes long."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}...{text[-half:]}"


def _convert(root: Node, kind: type[_T]) -> _T:
    """The record that a document holds.

    Raises:
        YamlError: a key or a value is none of the record's.
    """
    try:
        return msgspec.convert(root.plain(), kind, dec_hook=decode_hook)
    except msgspec.ValidationError as e:
        problem, _, path = str(e).partition(" - at `$")
        steps = [int(index) if index else key or dots for key, index, dots in _STEP.findall(path)]
        if (key := _KEY.fullmatch(problem)) is not None:
            found = "unknown key" if key[1].endswith("unknown") else "lacks the key"
            problem = f"{found} {key[2]!r}"
            steps.append(key[2])
        else:
            problem = problem.replace("Invalid enum value", "unknown word").replace(
                ", got", ", found"
            )
            problem = _TYPE.sub(_name_types, problem[0].lower() + problem[1:])
        where = path.strip(".`")
        node = root.nearest(steps)
        raise YamlError(
            f"{where}: {problem}" if where else problem, node.key_place or node.place
        ) from e


def _name_types(types: re.Match[str]) -> str:
    return " or ".join(_TYPE_NAMES.get(name, name) for name in types[1].split(" | "))
