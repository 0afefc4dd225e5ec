"""``negativa.yaml`` or ``pyproject.toml``: which file is found, and which keys it may have.

All faults of a file are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pytest_negativa.errors import OptionError, did_you_mean, refusing
from pytest_negativa.settings.options import CONFIG_NAME, FILE_OPTIONS, SECTIONS
from pytest_negativa.settings.values import (
    Found,
    anchor,
    anchored,
    describe,
    join_items,
    read_item,
)

if TYPE_CHECKING:
    from pytest_negativa.storage.yaml_document import Node, Position

PROJECT_NAME = "pyproject.toml"
TABLE = "[tool.negativa]"

# People write configurations; a file far beyond this is another one, named by mistake.
MAX_BYTES = 1 << 20


class ConfigFile(NamedTuple):
    """Settings of one file.

    Attributes:
        path: absolute.
        was_searched: found from the root folder upwards, not named by the user.
        values: what it sets, by the option's name; its paths start at the file's folder. Places
            are ``FILE:LINE:COLUMN``, of ``pyproject.toml`` the file and the table.
    """

    path: str
    was_searched: bool
    values: Mapping[str, Found]


def find_config(start: str | os.PathLike[str]) -> str | None:
    """The nearest file with settings in ``start`` or above, inside the same repository.

    That is a ``negativa.yaml``, or a ``pyproject.toml`` with a table ``[tool.negativa]``. The
    folder that holds ``.git`` is the last one searched: what lies above belongs to another project.

    Raises:
        OptionError: a folder has both, or a file ``negativa.yml``, or its ``pyproject.toml`` can't
            be read.
    """
    nearest = Path(anchor(start, Path.cwd()))
    for folder in (nearest, *nearest.parents):
        own, shared = folder / CONFIG_NAME, folder / PROJECT_NAME
        has_table = shared.is_file() and _table_of(str(shared)) is not None
        if own.is_file():
            if has_table:
                raise OptionError(f"{own} and {TABLE} in {shared}: write all settings into one")
            return str(own)
        if has_table:
            return str(shared)
        if (path := folder / "negativa.yml").is_file():
            raise OptionError(f"{path}: rename it to {CONFIG_NAME}, else it has no effect")
        if (folder / ".git").exists():
            break
    return None


def load_config(path: str | os.PathLike[str], *, was_searched: bool = False) -> ConfigFile:
    """Read and check a file.

    Raises:
        OptionError: it can't be read or has faults; the message lists each with its place.
    """
    path = anchor(path, Path.cwd())
    root = _table_of(path) if path.endswith(".toml") else _document_of(path, _bytes_of(path))
    values: dict[str, Found] = {}
    faults: list[tuple[Position, str]] = []
    for name, node in _iter_options(root, faults):
        option, items = FILE_OPTIONS[name], []
        has_items = option.is_repeated and isinstance(node.value, list)
        for item in node.value if has_items else [node]:
            try:
                items.append(read_item(name, item.plain()))
            except OptionError as problem:
                faults.append((item.place, f"{name}: {problem}"))
        if not faults:
            values[name] = Found(
                anchored(name, join_items(option, items), Path(path).parent),
                _where(path, node.place),
            )
    if faults:
        raise OptionError("\n".join(f"{_where(path, at)}: {text}" for at, text in sorted(faults)))
    return ConfigFile(path=path, was_searched=was_searched, values=values)


def _document_of(path: str, data: bytes) -> Node | None:
    # yaml takes 15 ms to import, which a command without a file does not need.
    from pytest_negativa.storage.yaml_document import YamlError, parse_document

    try:
        return parse_document(data)
    except YamlError as error:
        raise OptionError(f"{_where(path, error.place)}: {error}") from error


def _table_of(path: str) -> Node | None:
    """Our table in a ``pyproject.toml``; None if it has none."""
    data = _bytes_of(path)
    if b"negativa" not in data:
        return None
    try:
        # By tomllib, or by tomli, which pytest requires for Python 3.10.
        tools = msgspec.toml.decode(data).get("tool")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as TOML: {error}") from error
    if not isinstance(tools, dict) or "negativa" not in tools:
        return None
    # JSON is YAML. A parser of TOML gives no places, so those of its nodes mean nothing.
    return _document_of(path, msgspec.json.encode(tools["negativa"]))


def _bytes_of(path: str) -> bytes:
    with refusing(path, "read", OptionError), open(path, "rb") as file:  # noqa: PTH123
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OptionError(f"{path}: larger than {MAX_BYTES} bytes, expected a configuration")
    return data


def _where(path: str, place: Position) -> str:
    return f"{path}: {TABLE}" if path.endswith(".toml") else f"{path}:{place.line}:{place.column}"


def _iter_options(
    node: Node | None, faults: list[tuple[Position, str]], section: str = ""
) -> Iterator[tuple[str, Node]]:
    """The values of known options in a section; what is unknown goes to ``faults``."""
    prefix = f"{section}." if section else ""
    below = [name.removeprefix(prefix) for name in FILE_OPTIONS if name.startswith(prefix)]
    known = list(dict.fromkeys(name.partition(".")[0] for name in below))
    if node is None or node.value is None:  # all lines are comments
        return
    if not isinstance(node.value, dict):
        title = f"{section}: " if section else ""
        expected = f"expected a mapping with the keys {', '.join(known)}"
        faults.append((node.place, f"{title}found {describe(node.plain())}, {expected}"))
        return
    for key, inner in node.value.items():
        if key not in known:
            faults.append((inner.key_place or inner.place, _unknown_key(key, section, known)))
        elif prefix + key in SECTIONS:
            yield from _iter_options(inner, faults, key)
        else:
            yield prefix + key, inner


def _unknown_key(key: str, section: str, known: list[str]) -> str:
    text = f"unknown key {key!r}" + (f" in {section}" if section else "")
    if near := did_you_mean(key, known):
        return text + near
    # The right word in the wrong place: the commonest fault after a slip of the finger.
    if places := [name for name in FILE_OPTIONS if key in (name, name.partition(".")[2])]:
        is_top = places[0] == key
        return (
            f"{text}; {'it belongs to the top level' if is_top else f'did you mean {places[0]}?'}"
        )
    return f"{text}; expected one of {', '.join(known)}"
