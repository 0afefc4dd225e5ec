"""``negativa.yaml`` -> plain values by option name, with the line and column of each.

The file is composed to YAML's node graph, never constructed into objects: nodes know their
place, which every message names. All problems of a file are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from pytest_negativa.errors import OptionError
from pytest_negativa.settings.options import FILE_OPTIONS, SECTIONS
from pytest_negativa.settings.value_types import Entry, InvalidValue, Node, describe, did_you_mean

# A configuration is written by people; far below this, somebody named the wrong file.
MAX_BYTES = 1 << 20

_STANDARD = "tag:yaml.org,2002:"
# What YAML tells apart and we do; and what it makes of plain words that are texts to us:
# dates, "<<" and "=".
_SCALARS = frozenset(_STANDARD + name for name in ("null", "bool", "int", "float", "str"))
_TEXTS = frozenset(_STANDARD + name for name in ("timestamp", "merge", "value"))
_TAGS = _SCALARS | _TEXTS | {_STANDARD + "seq", _STANDARD + "map"}


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value of the file; ``where`` and ``items`` (for lists) are ``FILE:LINE:COLUMN``."""

    value: Any
    where: str
    items: tuple[str, ...]


def read_yaml(path: str) -> dict[str, FileValue]:
    """The options that the file sets, by name.

    Raises:
        OptionError: the file can't be read or has faults; the message lists each with its
            place.
    """
    root = _compose(path)
    if root is None:
        return {}
    problems: list[InvalidValue] = []
    found: dict[str, FileValue] = {}
    try:
        document = _Reader(problems).read(root)
    except RecursionError:
        raise OptionError(f"{path}: nested too deep") from None
    for name, given in _iter_options(document, problems):
        try:
            value = FILE_OPTIONS[name].type.read(given)
        except InvalidValue as problem:
            problems.append(InvalidValue(f"{name}: {problem}", problem.at or given))
        else:
            found[name] = FileValue(value, _place(path, given), _item_places(path, given))
    if problems:
        problems.sort(key=lambda p: (p.at.line, p.at.column) if p.at else (0, 0))
        raise OptionError("\n".join(f"{_place(path, p.at)}: {p}" for p in problems))
    return found


def _compose(path: str) -> yaml.Node | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (a str all the way, as in messages)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise OptionError(f"{path}: larger than {MAX_BYTES} bytes, expected a configuration")
    try:
        loader = yaml.SafeLoader(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise OptionError(f"{path}:{line}:{column}: not UTF-8: {error.reason}") from error
    except yaml.reader.ReaderError as error:
        raise OptionError(
            f"{path}: character {error.position + 1}, U+{error.character:04X}: {error.reason}"
        ) from error
    try:
        # get_single_node is what yaml.compose calls; here it has types.
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        text = ", ".join(part for part in (error.context, error.problem) if part)
        raise OptionError(f"{where}: {text}") from error
    except RecursionError:
        raise OptionError(f"{path}: nested too deep") from None
    else:
        return node
    finally:
        loader.dispose()


def _place(path: str | os.PathLike[str], given: Node | None) -> str:
    return f"{path}:{given.line}:{given.column}" if given else str(path)


def _item_places(path: str, given: Node) -> tuple[str, ...]:
    if isinstance(given.value, dict):
        return tuple(_place(path, entry.key) for entry in given.value.values())
    if isinstance(given.value, tuple):
        return tuple(_place(path, item) for item in given.value)
    return ()


class _Reader:
    """Nodes -> ``Node``. Aliases share one ``Node``, so that they can't multiply."""

    def __init__(self, problems: list[InvalidValue]) -> None:
        self._problems = problems
        self._done: dict[int, Node | None] = {}
        self._constructor = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node) -> Node:
        key = id(node)
        if key not in self._done:
            self._done[key] = None
            self._done[key] = self._read_new(node)
        given = self._done[key]
        if given is None:  # still being read: it contains itself
            given = _given(node, None)
            self._problems.append(InvalidValue("an alias inside of what it stands for", given))
        return given

    def _read_new(self, node: yaml.Node) -> Node:
        if node.tag not in _TAGS:
            tag = node.tag.replace(_STANDARD, "!!")
            self._problems.append(
                InvalidValue(f"found the tag {tag}, expected none", _given(node, ""))
            )
        if isinstance(node, yaml.SequenceNode):
            return _given(node, tuple(map(self.read, node.value)))
        if isinstance(node, yaml.MappingNode):
            return _given(node, self._read_mapping(node))
        if node.tag not in _SCALARS:
            return _given(node, str(node.value))
        try:
            value = self._constructor.construct_object(node)
        except ValueError:  # e.g. "!!int nine", or more digits than Python converts
            value = str(node.value)
        return _given(node, value)

    def _read_mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key = _given(key_node, str(key_node.value))
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(InvalidValue("found a list or mapping, expected a key", key))
            elif key.text in entries:
                first = entries[key.text].key.line
                self._problems.append(
                    InvalidValue(f"{key.text} is there twice, see line {first}", key)
                )
            else:
                entries[key.text] = Entry(key, self.read(value_node))
        return entries


def _given(node: yaml.Node, value: Any) -> Node:
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    return Node(value, text, node.start_mark.line + 1, node.start_mark.column + 1)


def _iter_options(document: Node, problems: list[InvalidValue]) -> Iterable[tuple[str, Node]]:
    """The values of known options; what is unknown goes to ``problems``."""
    top_level = dict.fromkeys(name.partition(".")[0] for name in FILE_OPTIONS)
    for key, entry in _iter_known(document, "", top_level, problems):
        if key not in SECTIONS:
            yield key, entry.value
            continue
        below = [name.partition(".")[2] for name in FILE_OPTIONS if name.startswith(f"{key}.")]
        for inner, inner_entry in _iter_known(entry.value, key, below, problems):
            yield f"{key}.{inner}", inner_entry.value


def _iter_known(
    given: Node, section: str, known: Iterable[str], problems: list[InvalidValue]
) -> Iterable[tuple[str, Entry]]:
    known = list(known)
    if given.value is None:  # a section of which all lines are comments
        return
    if not isinstance(given.value, dict):
        name = f"{section}: " if section else ""
        problems.append(
            InvalidValue(
                f"{name}found {describe(given)}, expected a mapping with the keys "
                f"{', '.join(known)}",
                given,
            )
        )
        return
    for key, entry in given.value.items():
        if key in known:
            yield key, entry
        else:
            problems.append(InvalidValue(_unknown_key(key, section, known), entry.key))


def _unknown_key(key: str, section: str, known: list[str]) -> str:
    text = f"unknown key {key!r}" + (f" in {section}" if section else "")
    if near := did_you_mean(key, known):
        return text + near
    # Right word, wrong place: the commonest fault after a slip of the finger.
    if places := [name for name in FILE_OPTIONS if key in (name, name.partition(".")[2])]:
        return f"{text}; did you mean {places[0]}?"
    return f"{text}; expected one of {', '.join(known)}"
