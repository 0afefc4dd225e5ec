"""The kinds of value that an option can have: how each is read from a file and from a text.

A kind turns what a person wrote (a node of ``negativa.yaml``, the text of a flag or of an
environment variable) into plain values: str, bool, int, float, None, tuples and dicts of
them. It says what it expects in words, for messages, and in JSON Schema, for editors.

Every pytest session imports this module to add the flags: nothing but the standard library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_negativa.arch import SmArch
from pytest_negativa.errors import OptionError

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """One value as a file has it; ``line`` and ``column`` count from 1.

    ``value`` is a scalar, a tuple of ``Node`` (a list) or a dict of ``Entry`` by key.
    ``text`` is a scalar as it was typed: YAML 1.1 reads a plain ``off`` as false.
    """

    value: Any
    text: str
    line: int
    column: int

    @property
    def is_scalar(self) -> bool:
        return not isinstance(self.value, tuple | dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a mapping and its value."""

    key: Node
    value: Node


class InvalidValue(Exception):
    """A value that can't be used; ``at`` is the exact place where a file has it."""

    def __init__(self, message: str, at: Node | None = None) -> None:
        super().__init__(message)
        self.at = at


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest known word, or nothing when none is near."""
    import difflib  # only a fault needs it

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def describe(node: Node) -> str:
    """What was found, in words."""
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{node.text} (true or false)"
    if isinstance(value, int | float):
        return f"the number {node.text}"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


class ValueType:
    """Base of the kinds: a scalar that is written as a text."""

    expected: str
    metavar: str = "TEXT"
    repeated = False

    def read(self, node: Node) -> Any:
        """The value of a node of the file.

        Raises:
            InvalidValue: it is none of this kind.
        """
        if not isinstance(node.value, str):
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        try:
            return self.parse(node.value)
        except InvalidValue as problem:
            raise InvalidValue(str(problem), node) from None

    def parse(self, text: str) -> Any:
        """The value of a flag's or variable's text.

        Raises:
            InvalidValue: it is none of this kind.
        """
        raise NotImplementedError

    def parse_flag(self, value: Any) -> Any:
        """The value of what a command-line parser hands over."""
        return self.parse(value)

    def anchored(self, value: Any, base: str) -> Any:
        """``value`` with relative paths taken from the folder ``base``."""
        return value

    def show(self, value: Any) -> str:
        """``value`` for people."""
        return "" if value is None else str(value)

    def schema(self) -> Schema:
        """What an editor should accept in the file."""
        return {"type": "string", "minLength": 1}

    def bad(self, text: str) -> InvalidValue:
        return InvalidValue(f"found {_quoted(text)}, expected {self.expected}")


class Switch(ValueType):
    """True or false."""

    expected = "true or false"
    metavar = ""
    _WORDS: Mapping[str, bool] = {
        **dict.fromkeys(("1", "true", "yes", "on"), True),
        **dict.fromkeys(("0", "false", "no", "off"), False),
    }

    def read(self, node: Node) -> bool:
        if not isinstance(node.value, bool):
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        return node.value

    def parse(self, text: str) -> bool:
        try:
            return self._WORDS[text.strip().lower()]
        except KeyError:
            raise self.bad(text) from None

    def parse_flag(self, value: Any) -> bool:
        return value if isinstance(value, bool) else self.parse(value)

    def show(self, value: Any) -> str:
        return "true" if value else "false"

    def schema(self) -> Schema:
        return {"type": "boolean"}


class Choice(ValueType):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.expected = one_of(words)
        self.metavar = "{" + ",".join(words) + "}"

    def read(self, node: Node) -> str:
        # By the text as typed: a plain ``off`` is a truth value to YAML 1.1, a word to us.
        if node.is_scalar and node.text in self.words:
            return node.text
        found = InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        if not isinstance(node.value, str):
            raise found
        raise InvalidValue(f"{found}{did_you_mean(node.value, self.words)}", node)

    def parse(self, text: str) -> str:
        if text not in self.words:
            raise InvalidValue(f"{self.bad(text)}{did_you_mean(text, self.words)}")
        return text

    def schema(self) -> Schema:
        return {"enum": list(self.words)}


class Text(ValueType):
    """Any text but an empty one."""

    expected = "a text"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise self.bad(text)
        return text

    def schema(self) -> Schema:
        return {"type": "string", "pattern": r"\S"}


class Expression(Text):
    """What pytest takes after -m or -k; pytest itself judges it."""

    expected = "an expression like 'gpu and not slow'"
    metavar = "EXPR"


def anchor(path: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """``path`` as absolute as ``base``; symlinks stay, and so does the ``~`` of nobody."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 (Path's raises where there is no home)
    return os.path.normpath(os.path.join(base, expanded))


class FilePath(Text):
    """A path; ``~`` is the home folder."""

    expected = "a path"
    metavar = "PATH"

    def anchored(self, value: Any, base: str) -> Any:
        return None if value is None else anchor(value, base)


class Count(ValueType):
    """A whole number, not below zero."""

    expected = "a whole number, 0 or more"
    metavar = "N"

    def read(self, node: Node) -> int:
        if type(node.value) is not int or not 0 <= node.value < 2**63:
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        return node.value

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
            raise self.bad(text)
        return int(text)

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": 0}


class Percent(ValueType):
    """A share of 100: ``12.5`` or ``"12.5%"``."""

    expected = "a percentage from 0 to 100"
    metavar = "PERCENT"
    _FORM = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%?")

    def read(self, node: Node) -> float:
        if type(node.value) not in (int, float):
            return super().read(node)  # type: ignore[no-any-return]
        # Written so that NaN, which is neither above nor below anything, fails too.
        if not 0 <= node.value <= 100:
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        return float(node.value)

    def parse(self, text: str) -> float:
        match = self._FORM.fullmatch(text.strip())
        if not match or float(match[1]) > 100:
            raise self.bad(text)
        return float(match[1])

    def show(self, value: Any) -> str:
        return "" if value is None else f"{value:g}%"

    def schema(self) -> Schema:
        text = r"^\s*(100(\.0{1,9})?|[0-9]{1,2}(\.[0-9]{1,9})?) ?%?\s*$"
        return {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 100},
                {"type": "string", "pattern": text},
            ]
        }


class Size(ValueType):
    """A number of bytes: ``4096``, ``500 MB`` (10^6) or ``1.5 GiB`` (2^30)."""

    expected = "a size like 4096, 500 MB or 1.5 GiB"
    metavar = "SIZE"
    _FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([kmgt]?)(i?)b)?", re.IGNORECASE)
    _POWER: Mapping[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

    def read(self, node: Node) -> int:
        if type(node.value) is not int:
            return super().read(node)  # type: ignore[no-any-return]
        if not 0 <= node.value < 2**63:
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        return node.value

    def parse(self, text: str) -> int:
        match = self._FORM.fullmatch(text.strip())
        if not match or (match[3] and not match[2]):
            raise self.bad(text)
        unit: int = (1024 if match[3] else 1000) ** self._POWER[(match[2] or "").lower()]
        whole, _, decimals = match[1].partition(".")
        scale: int = 10 ** len(decimals)
        value, rest = divmod(int(whole + decimals) * unit, scale)
        if rest or value >= 2**63:  # no parts of bytes
            raise self.bad(text)
        return value

    def show(self, value: Any) -> str:
        if value is None:
            return ""
        for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value and value % 1024**power == 0:
                return f"{value // 1024**power} {unit}"
        return f"{value} bytes"

    def schema(self) -> Schema:
        text = r"^\s*[0-9]{1,18}(\.[0-9]{1,9})? ?([kKmMgGtT][iI]?[bB]|[bB])?\s*$"
        return {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": text}]}


class Glob(ValueType):
    """A pattern with ``*`` and ``?``; see ``config_globs`` for what it is matched with."""

    expected = "a glob with * and ?"
    metavar = "GLOB"

    def parse(self, text: str) -> str:
        if not text.strip() or not text.isprintable():
            raise self.bad(text)
        return text.strip()

    def schema(self) -> Schema:
        return {"type": "string", "pattern": r"\S"}


class LibraryGlob(Glob):
    """A glob on a path, on a base name or soname, or after ``dist:`` on a distribution."""

    expected = "a glob on a path, a file name or a soname, or dist:NAME"

    def parse(self, text: str) -> str:
        glob: str = super().parse(text)
        if "[" in glob or glob.startswith("!"):
            raise InvalidValue(f"{self.bad(text)}; only * and ? are special")
        if glob.startswith("dist:") and not glob[len("dist:") :].strip():
            raise self.bad(text)
        return glob

    def schema(self) -> Schema:
        return {"type": "string", "pattern": r"^\s*(?!dist:\s*$)[^\s!\[][^\[]*$"}


class Arch(ValueType):
    """An SM arch of code."""

    expected = "an SM arch like sm_90 or sm_90a"
    metavar = "ARCH"

    def parse(self, text: str) -> str:
        try:
            return str(SmArch.parse(text.strip()))
        except OptionError:
            raise self.bad(text) from None

    def schema(self) -> Schema:
        return {"type": "string", "pattern": r"^\s*(sm|compute|lto)_[0-9]{2,}[af]?\s*$"}


class ListOf(ValueType):
    """Any number of values of one kind.

    A flag is repeated, one value each time; an environment variable holds values with ``;``
    or a line end between them, and with commas where no value can contain one (``commas``).
    """

    repeated = True

    def __init__(self, item: ValueType, *, commas: bool = False) -> None:
        self.item = item
        self.commas = commas
        self.expected = f"a list, each of it {item.expected}"
        self.metavar = item.metavar

    def read(self, node: Node) -> tuple[Any, ...]:
        if not isinstance(node.value, tuple):
            raise InvalidValue(f"found {describe(node)}, expected {self.expected}", node)
        return tuple(map(self.item.read, node.value))

    def parse(self, text: str) -> tuple[Any, ...]:
        return self._parse_all(re.split(r"[;\n,]" if self.commas else r"[;\n]", text))

    def parse_flag(self, value: Any) -> tuple[Any, ...]:
        texts = (value,) if isinstance(value, str) else value
        if self.commas:
            texts = [part for text in texts for part in text.split(",")]
        return self._parse_all(texts)

    def _parse_all(self, texts: Iterable[str]) -> tuple[Any, ...]:
        # An empty text is no value: a flag node as ``--flag=`` empties the file's list.
        return tuple(self.item.parse(text) for text in texts if text.strip())

    def show(self, value: Any) -> str:
        return "; ".join(map(self.item.show, value))

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


class Report(ValueType):
    """A format of report, with a path where the report is a file: ``json:build/gpu.json``."""

    metavar = "FORMAT[:PATH]"

    def __init__(self, *, to_screen: Sequence[str], to_file: Sequence[str]) -> None:
        self.to_screen = tuple(to_screen)
        self.to_file = tuple(to_file)
        self.formats = (*to_screen, *to_file)
        self.expected = one_of(self.formats)

    def parse(self, text: str) -> dict[str, str | None]:
        name, colon, path = text.strip().partition(":")
        if name not in self.formats:
            raise InvalidValue(f"{self.bad(text)}{did_you_mean(name, self.formats)}")
        if colon and (name in self.to_screen or not path.strip()):
            wanted = f"{name} alone" if name in self.to_screen else f"a path after {name}:"
            raise InvalidValue(f"found {_quoted(text)}, expected {wanted}")
        return {"format": name, "path": path.strip() or None}

    def show(self, value: Any) -> str:
        return ":".join(filter(None, (value["format"], value["path"])))


class Reports(ListOf):
    """Reports by format: a list of formats, or a mapping of formats to paths."""

    def __init__(self, item: Report) -> None:
        super().__init__(item, commas=True)
        self.report = item
        self.expected = (
            f"a list of formats, or a mapping of formats to paths; formats: {item.expected}"
        )

    def read(self, node: Node) -> tuple[Any, ...]:
        if isinstance(node.value, dict):
            return tuple(map(self._read_entry, node.value.values()))
        reports: tuple[Any, ...] = super().read(node)
        self._refuse_twice(reports, node)
        return reports

    def _read_entry(self, entry: Entry) -> dict[str, str | None]:
        report: dict[str, str | None] = self.report.read(entry.key)
        if report["path"]:
            raise InvalidValue(
                f"found {describe(entry.key)}, expected {self.report.expected}", entry.key
            )
        value = entry.value
        if value.value is None or value.value is True:
            return report
        if report["format"] in self.report.to_screen or not isinstance(value.value, str):
            wanted = "true" if report["format"] in self.report.to_screen else "a path or true"
            raise InvalidValue(f"found {describe(value)}, expected {wanted}", value)
        return {**report, "path": FilePath().read(value)}

    def _parse_all(self, texts: Iterable[str]) -> tuple[Any, ...]:
        reports = super()._parse_all(texts)
        self._refuse_twice(reports)
        return reports

    def _refuse_twice(self, reports: Sequence[Mapping[str, Any]], at: Node | None = None) -> None:
        names = [report["format"] for report in reports]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidValue(f"{name} is there twice", at.value[index] if at else None)

    def anchored(self, value: Any, base: str) -> Any:
        return tuple({**r, "path": FilePath().anchored(r["path"], base)} for r in value)

    def schema(self) -> Schema:
        path = {"type": "string", "pattern": r"\S"}
        default_path: Schema = {"enum": [True, None]}
        with_path = rf"^\s*({'|'.join(self.report.to_file)}):.*\S\s*$"
        return {
            "anyOf": [
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {"enum": list(self.report.formats)},
                            {"type": "string", "pattern": with_path},
                        ]
                    },
                },
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        name: {"anyOf": [path, default_path]}
                        if name in self.report.to_file
                        else default_path
                        for name in self.report.formats
                    },
                },
            ]
        }
