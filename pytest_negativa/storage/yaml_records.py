"""Records from YAML documents: messages name keys and values as the text has them."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from pytest_negativa.storage.records import decode_hook
from pytest_negativa.storage.yaml_document import Node, Place, YamlError

_T = TypeVar("_T")

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


def convert(root: Node | None, kind: type[_T]) -> _T:
    """The record that a document holds.

    Raises:
        YamlError: a key or a value is none of the record's.
    """
    try:
        plain = None if root is None else root.plain()
        return msgspec.convert(plain, kind, dec_hook=decode_hook)
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
        node = (root or Node(None, Place(1, 1))).nearest(steps)
        text = f"{where}: {problem}" if where else problem
        raise YamlError(text, node.key_place or node.place) from e


def _name_types(types: re.Match[str]) -> str:
    return " or ".join(_TYPE_NAMES.get(name, name) for name in types[1].split(" | "))
