"""YAML, read strictly, and records from it: no tags or aliases, depth 8, plain words as in 1.2.

The files come from repositories, so reading is strict and bounded. Tags, aliases, second documents
and repeated keys are refused, and nesting depth is limited. Of the plain words only ``null``,
``true``, ``false`` and numbers have a meaning, as in YAML 1.2: ``off`` and ``no`` are texts.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.records import decode_hook, format_of

_T = TypeVar("_T")

_MAX_DEPTH = 8
# Longer than any number that a record takes.
_MAX_DIGITS = 30
# Texts that look like these PyYAML writes in quotes; "08" and "1e5" are texts to it.
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]+")
# The line breaks of YAML 1.1, and what separates items in a line.
_SEPARATORS = ",\n\r\x85\u2028\u2029"
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}

# libyaml does not name the character, and a tab is invisible. A glob begins with *, as aliases do.
_QUOTE_GLOB = "; quote a value that begins with * or &"
_ADVICE = {
    "did not find expected alphabetic or numeric character": _QUOTE_GLOB,
    "found character that cannot start any token": (
        "; indent with spaces, and quote a value that begins with @, % or `"
    ),
}

_MAX_TEXT = 400
_CONFLICT = re.compile(rb"^<<<<<<< ", re.MULTILINE)
# Of the path in msgspec's messages, as in "$.libraries[0].kept[3].offset".
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile("unknown field `(.+)`")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Position(NamedTuple):
    """A place in a text; both count from 1."""

    line: int
    column: int


class YamlError(Exception):
    """A text that is not YAML, or more than our files use of it.

    Attributes:
        place: where, as exactly as the parser knows.
    """

    def __init__(self, problem: str, place: Position) -> None:
        super().__init__(problem)
        self.place = place


@dataclass(slots=True)
class Node:
    """A value of the document.

    Attributes:
        value: None, a bool, int, float or str, a list of nodes, or a dict of nodes by key.
        place: where it begins.
        key_place: where its key begins if it is an entry of a mapping.
    """

    value: Any
    place: Position
    key_place: Position | None = None

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def nearest(self, path: Iterable[str | int]) -> Node:
        """The node at a path of keys and indices below this one, or the last that is there."""
        node = self
        for step in path:
            try:
                node = node.value[step]
            except (KeyError, IndexError, TypeError):
                break
        return node


def parse_document(data: bytes, max_items: int | None = None) -> Node | None:
    """The root of the document in ``data``; None if there is nothing in it.

    Args:
        max_items: how many commas and line breaks the text may have, which must be UTF-8 then.
            They are counted before it is parsed, which takes seconds for a million.

    Raises:
        YamlError: it is not YAML, or uses what our files don't.
    """
    try:
        if max_items is not None and sum(map(data.decode().count, _SEPARATORS)) > max_items:
            raise YamlError(f"more than {max_items:,} commas and lines", Position(1, 1))
        return _compose_document(yaml.parse(data, Loader=_Loader))
    except yaml.MarkedYAMLError as e:
        problem = str(e.problem or e.context)
        place = _place_of(e.problem_mark or e.context_mark)
        raise YamlError(problem + _ADVICE.get(problem, ""), place) from e
    except yaml.reader.ReaderError as e:
        raise YamlError(str(e.reason), _line_of(data, e.position)) from e
    except UnicodeDecodeError as e:
        raise YamlError(f"not UTF-8: {e.reason}", _line_of(data, e.start)) from e


def _compose_document(events: Iterator[yaml.Event]) -> Node | None:
    root = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if root is not None:
                raise YamlError(
                    "found a second document, expected one", _place_of(event.start_mark)
                )
            root = _compose(events, next(events))
    return root


def _compose(events: Iterator[yaml.Event], event: yaml.Event, depth: int = 0) -> Node:
    """The node that begins with an event. PyYAML's own composer has no limit, and takes aliases."""
    place = _place_of(event.start_mark)
    _check(event, place)
    if isinstance(event, yaml.ScalarEvent):
        return Node(_resolve(event), place)
    if depth >= _MAX_DEPTH:
        raise YamlError("nested too deep", place)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_compose(events, item, depth + 1))
        return Node(items, place)
    entries: dict[str, Node] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        key_place = _place_of(key.start_mark)
        _check(key, key_place)
        if not isinstance(key, yaml.ScalarEvent):
            raise YamlError("found a list or mapping, expected a key", key_place)
        if (twice := entries.get(key.value)) is not None and twice.key_place is not None:
            first = twice.key_place.line
            problem = f"the key {key.value!r} is there twice, first in line {first}"
            raise YamlError(problem, key_place)
        node = _compose(events, next(events), depth + 1)
        node.key_place = key_place
        entries[key.value] = node
    return Node(entries, place)


def _place_of(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)


def _line_of(data: bytes, position: int) -> Position:
    return Position(data.count(b"\n", 0, position) + 1, 1)


def _check(event: Any, place: Position) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise YamlError(f"found an alias, expected a value{_QUOTE_GLOB}", place)
    if event.tag is not None and event.tag != "!":
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")
        raise YamlError(f"found the tag {tag!r}, expected none", place)


def _resolve(event: yaml.ScalarEvent) -> Any:
    text = event.value
    # Quoted, or in a block: text, whatever it looks like.
    if event.style not in (None, "") or not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _MAX_DIGITS:
        if _INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


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
