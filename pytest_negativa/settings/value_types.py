"""The types of value that an option can have: each parses what a file, flag or variable has.

A type takes plain values (str, bool, int, float, None, lists and dicts of them) and gives plain
values. It says what it expects in words, for messages, and in JSON Schema, for editors.

Every pytest session imports this module to add the flags: nothing but the standard library, and
no regular expression is compiled before it is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_negativa.arch import KNOWN_DEVICES, parse_arch, require_known
from pytest_negativa.errors import OptionError, did_you_mean
from pytest_negativa.storage.urls import is_url, place_of

Schema = dict[str, Any]


class InvalidValue(Exception):
    """A value that can't be used.

    Attributes:
        path: keys and indices that lead to the fault inside the value.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


def describe(value: Any) -> str:
    """What was found, in words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value if len(value) <= 80 else value[:77] + "...")


def one_of(words: Sequence[str]) -> str:
    """The words, with commas and an "or"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


class ValueType:
    """Base of the types.

    Attributes:
        expected: what it takes, in words.
        metavar: stands for the value in help.
        repeated: whether a flag may be given several times.
    """

    expected: str
    metavar: str = "TEXT"
    repeated = False

    def parse(self, value: Any) -> Any:
        """The option's value.

        Args:
            value: a plain value of the file, or the text of a flag or variable.

        Raises:
            InvalidValue: it is none of this type.
        """
        raise NotImplementedError

    def parse_variable(self, text: str) -> Any:
        """The value of an environment variable.

        Raises:
            InvalidValue: it is none of this type.
        """
        return self.parse_flag(text)

    def parse_flag(self, value: Any) -> Any:
        """The value of what a command-line parser hands over.

        Raises:
            InvalidValue: it is none of this type.
        """
        return self.parse(value)

    def anchored(self, value: Any, base: str) -> Any:
        """``value`` with relative paths taken from the folder ``base``."""
        return value

    def show(self, value: Any) -> str:
        """``value`` for people."""
        return "" if value is None else str(value)

    def schema(self) -> Schema:
        """What an editor should accept in the file."""
        return {"type": "string", "pattern": r"\S"}

    def invalid(self, value: Any, hint: str = "") -> InvalidValue:
        """An error that says what was found and what is expected."""
        return InvalidValue(f"found {describe(value)}, expected {self.expected}{hint}")


class Switch(ValueType):
    """True or false; in texts also yes and no, on and off, 1 and 0, as in YAML 1.1."""

    expected = "true or false"
    metavar = ""
    _WORDS: Mapping[str, bool] = {
        form: word in ("1", "true", "yes", "on")
        for word in ("1", "true", "yes", "on", "0", "false", "no", "off")
        for form in (word, word.title(), word.upper())
    }

    def parse(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value in self._WORDS:
            return self._WORDS[value]
        raise self.invalid(value)

    def show(self, value: Any) -> str:
        return "true" if value else "false"

    def schema(self) -> Schema:
        return {"enum": [True, False, *self._WORDS]}


class Choice(ValueType):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.expected = one_of(words)
        self.metavar = "{" + ",".join(words) + "}"

    def parse(self, value: Any) -> str:
        if value not in self.words:
            hint = did_you_mean(value, self.words) if isinstance(value, str) else ""
            raise self.invalid(value, hint)
        return str(value)

    def schema(self) -> Schema:
        return {"enum": list(self.words)}


class Text(ValueType):
    """Any text but an empty one."""

    expected = "a text"

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.invalid(value)
        return value


def anchor(path: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """``path`` as absolute as ``base``; symlinks stay, and so does ``~`` if there is no home."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 (Path's raises if there is no home)
    return os.path.normpath(os.path.join(base, expanded))


class FilePath(Text):
    """A path; ``~`` is the home folder."""

    expected = "a path"
    metavar = "PATH"

    def anchored(self, value: Any, base: str) -> Any:
        return None if value is None else anchor(value, base)


class PathOrUrl(FilePath):
    """A path, or a URL such as ``s3://bucket/name``."""

    expected = "a path or a URL"

    def parse(self, value: Any) -> str:
        path: str = super().parse(value)
        try:
            place_of(path)
        except OptionError as e:
            raise InvalidValue(str(e)) from None
        return path

    def anchored(self, value: Any, base: str) -> Any:
        return value if is_url(value) else super().anchored(value, base)


class RunName(PathOrUrl):
    """A run's folder, the URL of one, or the id of a run."""

    def anchored(self, value: Any, base: str) -> Any:
        from pytest_negativa.storage.runs import is_run_id  # most commands name no run

        # Else the folder of a run that is gone would lead to another one with its id.
        return value if value is not None and is_run_id(value) else super().anchored(value, base)


class OutputPath(PathOrUrl):
    """The path or URL of a file to write; ``-`` is standard output."""

    def anchored(self, value: Any, base: str) -> Any:
        return value if value == "-" else super().anchored(value, base)


class Count(ValueType):
    """A whole number, not below zero."""

    expected = "a whole number, 0 or more"
    metavar = "N"

    def parse(self, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            return int(value)
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.invalid(value)
        return value

    def schema(self) -> Schema:
        text = {"type": "string", "pattern": "^[0-9]{1,18}$"}
        return {"anyOf": [{"type": "integer", "minimum": 0}, text]}


class Percent(ValueType):
    """A share of 100: ``12.5`` or ``"12.5%"``."""

    expected = "a percentage from 0 to 100"
    metavar = "PERCENT"
    _FORM = r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%?"

    def parse(self, value: Any) -> float:
        if isinstance(value, str):
            match = re.fullmatch(self._FORM, value.strip())
            number = float(match[1]) if match else None
        else:
            number = value if type(value) in (int, float) else None
        if number is None or not 0 <= number <= 100:
            raise self.invalid(value)
        return float(number)

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
    _FORM = r"(?i)([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([kmgt]?)(i?)b)?"
    _POWER: Mapping[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

    def parse(self, value: Any) -> int:
        size = self._of_text(value) if isinstance(value, str) else value
        if type(size) is not int or not 0 <= size < 2**63:
            raise self.invalid(value)
        return size

    def _of_text(self, text: str) -> int | None:
        match = re.fullmatch(self._FORM, text.strip())
        if not match or (match[3] and not match[2]):
            return None
        unit: int = (1024 if match[3] else 1000) ** self._POWER[(match[2] or "").lower()]
        whole, _, decimals = match[1].partition(".")
        size, rest = divmod(int(whole + decimals) * unit, 10 ** len(decimals))
        return None if rest else size  # no parts of bytes

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


class Glob(Text):
    """A pattern with ``*`` and ``?``; see ``globs`` for what it is matched with."""

    expected = "a glob with * and ?"
    metavar = "GLOB"

    def parse(self, value: Any) -> str:
        text = super().parse(value)
        if not text.isprintable():
            raise self.invalid(value)
        return text.strip()


class LibraryGlob(Glob):
    """A glob on a path, on a base name or soname, or after ``dist:`` on a distribution."""

    expected = "a glob on a path, a file name or a soname, or dist:NAME"

    def parse(self, value: Any) -> str:
        glob = super().parse(value)
        if "[" in glob or glob.startswith("!"):
            raise self.invalid(value, "; only * and ? are special")
        if glob.startswith("dist:") and not glob[len("dist:") :].strip():
            raise self.invalid(value)
        return glob

    def schema(self) -> Schema:
        return {"type": "string", "pattern": r"^\s*(?!dist:\s*$)[^\s!\[][^\[]*$"}


class Arch(ValueType):
    """An SM arch of code."""

    expected = "the SM arch of a known GPU, like sm_90, sm_90a or 9.0"
    metavar = "ARCH,..."

    def parse(self, value: Any) -> str:
        if isinstance(value, str):
            text = value.strip()
        elif type(value) in (int, float):
            # To YAML a plain 90 or 9.0 is a number, and JSON Schema can't tell 9 from 9.0.
            text = str(value if value >= 20 else float(value))
        else:
            raise self.invalid(value)
        try:
            arch = parse_arch(text)
        except OptionError:
            raise self.invalid(value) from None
        try:
            return str(require_known(arch))
        except OptionError as e:
            # A typing mistake would keep nothing.
            raise InvalidValue(str(e)) from None

    def schema(self) -> Schema:
        devices = sorted(KNOWN_DEVICES)
        whole = [10 * device.major + device.minor for device in devices]
        decimal = [float(str(device)) for device in devices]
        numbers = "|".join(map(str, whole))
        points = "|".join(str(device).replace(".", r"\.") for device in devices)
        text = rf"^\s*(((sm|compute|lto)_)?({numbers})[af]?|{points})\s*$"
        return {"anyOf": [{"type": "string", "pattern": text}, {"enum": [*whole, *decimal]}]}


class ListOf(ValueType):
    """Any number of values of one type.

    A flag is repeated, one value each time. An environment variable holds values with ``;`` or a
    line end between them. Both may hold commas between them if no value can contain one
    (``commas``).
    """

    repeated = True

    def __init__(self, item: ValueType, *, commas: bool = False) -> None:
        self.item = item
        self.commas = commas
        self.expected = f"a list whose entries are each {item.expected}"
        self.metavar = item.metavar

    def parse(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise self.invalid(value)
        return tuple(self._parse_item(i, item) for i, item in enumerate(value))

    def _parse_item(self, index: int, value: Any) -> Any:
        try:
            return self.item.parse(value)
        except InvalidValue as e:
            raise InvalidValue(str(e), (index, *e.path)) from None

    def parse_variable(self, text: str) -> tuple[Any, ...]:
        return self.parse_flag(re.split(r"[;\n]", text))

    def parse_flag(self, value: Any) -> tuple[Any, ...]:
        texts = (value,) if isinstance(value, str) else value
        if self.commas:
            texts = [part.strip() for text in texts for part in text.split(",")]
        # An empty text is no value: a flag given as ``--flag=`` empties the file's list.
        return self.parse([text for text in texts if text.strip()])

    def show(self, value: Any) -> str:
        return "; ".join(map(self.item.show, value))

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


class GrowthLimit(ValueType):
    """The most that a figure may grow: ``size:5%``, ``unused:1 MB``, ``new-kernels-untested:0``."""

    expected = "size:, code: or unused: with a percentage or size, or new-kernels-untested:N"
    metavar = "FIGURE:LIMIT"
    SIZES = ("size", "code", "unused")
    COUNT = "new-kernels-untested"

    def parse(self, value: Any) -> dict[str, Any]:
        figure, _, text = value.partition(":") if isinstance(value, str) else ("", "", "")
        figure, text = figure.strip(), text.strip()
        if figure == self.COUNT:
            limit, is_percent = self._limit(Count(), text, value), False
        elif figure in self.SIZES:
            is_percent = text.endswith("%")
            limit = self._limit(_Growth() if is_percent else Size(), text, value)
        else:
            raise self.invalid(value, did_you_mean(figure, (*self.SIZES, self.COUNT)))
        return {"figure": figure, "limit": float(limit), "is_percent": is_percent}

    def _limit(self, kind: ValueType, text: str, value: Any) -> float:
        try:
            limit: float = kind.parse(text)
        except InvalidValue:
            raise self.invalid(value) from None
        return limit

    def show(self, value: Any) -> str:
        return f"{value['figure']}:{value['limit']:g}{'%' if value['is_percent'] else ''}"

    def schema(self) -> Schema:
        sizes = "|".join(self.SIZES)
        return {"type": "string", "pattern": rf"^\s*(({sizes})\s*:.*\S|{self.COUNT}\s*:.*\d)\s*$"}


class _Growth(Percent):
    """A percentage that may exceed 100."""

    def parse(self, value: Any) -> float:
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?) ?%", value)
        if match is None:
            raise self.invalid(value)
        return float(match[1])


class PerLibrary(ValueType):
    """A value for each of several library globs: a mapping, or ``GLOB=VALUE`` in flags."""

    repeated = True

    def __init__(self, item: ValueType) -> None:
        self.item = item
        self.expected = f"a mapping of library globs to {item.expected}"
        self.metavar = f"GLOB={item.metavar}"

    def parse(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.invalid(value)
        return dict(self._parse_entry(glob, limit) for glob, limit in value.items())

    def _parse_entry(self, glob: str, value: Any) -> tuple[str, Any]:
        try:
            # Of a flag, the value is a text, which a list takes apart.
            parse = self.item.parse_flag if isinstance(value, str) else self.item.parse
            return LibraryGlob().parse(glob), parse(value)
        except InvalidValue as e:
            raise InvalidValue(str(e), (glob, *e.path)) from None

    def parse_variable(self, text: str) -> dict[str, Any]:
        return self.parse_flag(re.split(r"[;\n]", text))

    def parse_flag(self, value: Any) -> dict[str, Any]:
        texts = (value,) if isinstance(value, str) else value
        entries = {}
        for text in texts:
            glob, equals, limit = text.rpartition("=")
            if text.strip() and not equals:
                raise InvalidValue(f"found {describe(text)}, expected {self.metavar}")
            if text.strip():
                entries[glob] = limit
        return self.parse(entries)

    def show(self, value: Any) -> str:
        return "; ".join(f"{glob}={self.item.show(limit)}" for glob, limit in value.items())

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": self.item.schema()}


class Limits(PerLibrary):
    """A limit over all libraries, limits of single ones, or both: ``[80, "libours.so=90"]``."""

    def __init__(self, item: ValueType) -> None:
        super().__init__(item)
        self.expected = f"{item.expected}, also of a library: GLOB={item.metavar}"
        self.metavar = f"[GLOB=]{item.metavar}"

    def parse(self, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {"overall": None, "libraries": super().parse(value)}
        found: dict[str, Any] = {"overall": None, "libraries": {}}
        if not isinstance(value, list | tuple):
            self._add(found, value)
            return found
        for index, part in enumerate(value):
            try:
                self._add(found, part)
            except InvalidValue as e:
                raise InvalidValue(str(e), (index, *e.path)) from None
        return found

    def _add(self, found: dict[str, Any], part: Any) -> None:
        glob, equals, limit = part.rpartition("=") if isinstance(part, str) else ("", "", part)
        if equals:
            limits = found["libraries"]
            [(key, value)] = super().parse({glob: limit}).items()
        else:
            limits, key = found, "overall"
            parse = self.item.parse_flag if isinstance(part, str) else self.item.parse
            value = parse(limit)
        limits[key] = (*(limits.get(key) or ()), *value) if self.item.repeated else value

    def parse_flag(self, value: Any) -> dict[str, Any]:
        texts = (value,) if isinstance(value, str) else value
        return self.parse([text for text in texts if text.strip()])

    def anchored(self, value: Any, base: str) -> Any:
        return value or {"overall": None, "libraries": {}}

    def show(self, value: Any) -> str:
        return ""

    def schema(self) -> Schema:
        text = {"type": "string", "pattern": "=.*\\S"}
        item = self.item.schema()
        one = {"anyOf": [item.get("items", item), text]}
        limits = {"type": "object", "additionalProperties": item}
        return {"anyOf": [one, {"type": "array", "items": one}, limits]}


class PathRules(PerLibrary):
    """Paths here by globs on paths of other machines; see ``globs.PathRules``."""

    def __init__(self) -> None:
        super().__init__(FilePath())
        self.expected = "a mapping of globs on paths to paths"

    def _parse_entry(self, glob: str, value: Any) -> tuple[str, Any]:
        glob, path = super()._parse_entry(glob, value)
        if not glob.startswith(("/", "*")):
            raise InvalidValue(f"found {describe(glob)}, expected an absolute path with * and ?")
        return glob, path

    def anchored(self, value: Any, base: str) -> Any:
        return {glob: anchor(path, base) for glob, path in value.items()}


class Report(ValueType):
    """A format of report, with a path if the report is a file: ``json:build/gpu.json``."""

    metavar = "TYPE[:PATH]"

    def __init__(self, *, pathless: Sequence[str], to_file: Sequence[str]) -> None:
        self.pathless = tuple(pathless)
        self.to_file = tuple(to_file)
        self.formats = (*pathless, *to_file)
        self.expected = one_of(self.formats)

    def parse(self, value: Any) -> dict[str, str | None]:
        if not isinstance(value, str):
            raise self.invalid(value)
        name, colon, path = value.strip().partition(":")
        if name not in self.formats:
            raise self.invalid(value, did_you_mean(name, self.formats))
        if colon and (name in self.pathless or not path.strip()):
            wanted = f"{name} alone" if name in self.pathless else f"a path after {name}:"
            raise InvalidValue(f"found {describe(value)}, expected {wanted}")
        return {"format": name, "path": PathOrUrl().parse(path.strip()) if colon else None}

    def parse_entry(self, name: str, value: Any) -> dict[str, str | None]:
        """A report of a mapping of formats to paths, in which true is the path by default."""
        if name not in self.formats:
            raise self.invalid(name, did_you_mean(name, self.formats))
        if value is None or value is True:
            return {"format": name, "path": None}
        if name in self.pathless or not isinstance(value, str):
            wanted = "true" if name in self.pathless else "a path or true"
            raise InvalidValue(f"found {describe(value)}, expected {wanted}")
        return {"format": name, "path": PathOrUrl().parse(value)}

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

    def parse(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, dict):
            return tuple(self._parse_entry(name, path) for name, path in value.items())
        reports = super().parse(value)
        for index, report in enumerate(reports):
            if report in reports[:index]:
                raise InvalidValue(f"{self.report.show(report)} is there twice", (index,))
        return reports

    def _parse_entry(self, name: str, value: Any) -> dict[str, str | None]:
        try:
            return self.report.parse_entry(name, value)
        except InvalidValue as e:
            raise InvalidValue(str(e), (name,)) from None

    def anchored(self, value: Any, base: str) -> Any:
        return tuple({**r, "path": OutputPath().anchored(r["path"], base)} for r in value)

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
