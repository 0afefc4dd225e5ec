"""Values of files, flags and variables to those of ``models.settings``.

msgspec checks words, numbers and switches, by the fields of the records. What else a text may be,
such as a size or a glob, is read here.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from pytest_negativa.devices import parse_archs
from pytest_negativa.errors import OptionError, did_you_mean, one_of
from pytest_negativa.models.settings import (
    GrowthLimit,
    Limits,
    Report,
    ReportFormat,
    Settings,
    Source,
)
from pytest_negativa.settings.options import REPORT_FILES, REPORT_FORMATS, Option
from pytest_negativa.storage.runs import is_run_id
from pytest_negativa.storage.urls import is_url, place_of

SWITCH_WORDS: Mapping[str, bool] = {
    form: word in ("yes", "on")
    for word in ("yes", "on", "no", "off")
    for form in (word, word.title(), word.upper())
}
"""Words for true and false as in YAML 1.1, beside those that msgspec knows."""

_GROWING = ("size", "code", "unused")
_UNTESTED = "new-kernels-untested"
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_Reader = Callable[[Any], Any]


class InvalidValue(OptionError):
    """A value that can't be used.

    Attributes:
        keys: keys and indices that lead to the fault inside the value.
    """

    def __init__(self, message: str, keys: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class Found(NamedTuple):
    """A value of an option, and where it comes from."""

    value: Any
    source: Source


def describe(value: Any) -> str:
    """What was found, in words."""
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    return f"the number {value}"


def anchor(path: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """``path`` as absolute as ``base``; symlinks stay, and so does ``~`` if there is no home."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 (Path's raises if there is no home)
    return os.path.normpath(os.path.join(base, expanded))


@cache
def type_of(name: str) -> Any:
    """The type of an option's field; without None, which is that the option is not set."""
    section, _, key = name.rpartition(".")
    record = get_type_hints(Settings)[section] if section else Settings
    found = get_type_hints(record, include_extras=True)[key]
    known = [part for part in get_args(found) if part is not type(None)]
    return known[0] if type(None) in get_args(found) else found


def value_of(name: str, given: Any) -> Any:
    """The value of an option.

    Args:
        name: of the option.
        given: a plain value of the file, or a text.

    Raises:
        OptionError: the option can't have it; an ``InvalidValue`` says where in the value.
    """
    wanted = type_of(name)
    if name in _READERS:
        return _READERS[name](given)
    if get_origin(wanted) is tuple:
        return _list_of(partial(_checked, get_args(wanted)[0]))(given)
    return _checked(wanted, given)


def value_of_flag(option: Option, given: Any) -> Any:
    """The value of what a command-line parser hands over.

    Raises:
        OptionError: the option can't have it; an ``InvalidValue`` says where in the value.
    """
    if option.is_repeated:
        texts = (given,) if isinstance(given, str) else given
        if option.has_commas:
            texts = [part for text in texts for part in text.split(",")]
        # An empty text is no value: a flag given as ``--flag=`` empties the file's list.
        given = [text.strip() for text in texts if text.strip()]
    return value_of(option.name, given)


def default_of(option: Option) -> Any:
    """The value that an option has if no source has one."""
    if option.default is None:
        return value_of(option.name, ()) if option.is_repeated else None
    return value_of(option.name, option.default)


def anchored(name: str, value: Any, base: str) -> Any:
    """The value of an option with relative paths taken from the folder ``base``."""
    if value is None or name not in _PATHS:
        return value
    if name == "paths":
        return {glob: anchor(path, base) for glob, path in value.items()}
    if name == "reports.formats":
        return tuple(msgspec.structs.replace(r, path=_anchored(r.path, base)) for r in value)
    # Else the folder of a run that is gone would lead to another one with its id.
    return value if name == "run" and is_run_id(value) else _anchored(value, base)


_PATHS = frozenset(
    (
        "run",
        "config",
        "directory",
        "paths",
        "trace.replay",
        "reports.formats",
        "compare.baseline",
        "cache.dir",
    )
)


def _anchored(path: str | None, base: str) -> str | None:
    return path if path in (None, "-") or is_url(path) else anchor(path or "", base)


def _refuse(given: Any, expected: str, hint: str = "") -> NoReturn:
    raise InvalidValue(f"found {describe(given)}, expected {expected}{hint}")


def _checked(wanted: Any, given: Any) -> Any:
    """What msgspec knows: a word of an enum, a switch, a number."""
    if wanted is bool and isinstance(given, str):
        given = SWITCH_WORDS.get(given, given)
    try:
        return msgspec.convert(given, wanted, strict=False)
    except msgspec.ValidationError:
        if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
            words = [str(word.value) for word in wanted]
            hint = did_you_mean(given, words) if isinstance(given, str) else ""
            _refuse(given, one_of(words), hint)
        _refuse(given, "true or false" if wanted is bool else "a whole number, 0 or more")


_count = partial(_checked, Annotated[int, msgspec.Meta(ge=0)])


def _text(form: str, expected: str, given: Any) -> str:
    """A text of this form, a regular expression, without the spaces around it."""
    if not isinstance(given, str) or re.fullmatch(form, given.strip()) is None:
        _refuse(given, expected)
    return given.strip()


# Control characters would reach terminals.
_LINE = r"[^\x00-\x1f\x7f-\x9f]+"
_path = partial(_text, r"(?s).+", "a path")
_glob = partial(_text, _LINE, "a glob with * and ?")
_LIBRARY = rf"(?!!|dist:\s*$|.*\[){_LINE}"
_path_glob = partial(_text, rf"(?=[/*]){_LIBRARY}", "an absolute path with * and ?")
_library_glob = partial(
    _text,
    _LIBRARY,
    "a glob on a path, a file name or a soname, or dist:NAME, where only * and ? are special",
)


def _place(given: Any) -> str:
    """A path, or a URL such as ``s3://bucket/name``."""
    place_of(path := _text(r"(?s).+", "a path or a URL", given))
    return path


def _archs(given: Any) -> tuple[str, ...]:
    """SM archs of code, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(_list_of(_arch)(given))))


def _arch(given: Any) -> Iterator[str]:
    """What one entry stands for; to YAML a plain 90 or 9.0 is a number."""
    if type(given) in (int, float):
        given = str(given if given >= 20 else float(given))
    return map(str, parse_archs([_text(".*", "an arch like sm_90, or a GPU like H100", given)]))


def read_percent(given: Any, most: float = 100) -> float:
    """A share of 100: ``12.5`` or ``"12.5%"``.

    Raises:
        InvalidValue: it is none.
    """
    number = given if type(given) in (int, float) else None
    if isinstance(given, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)? ?%?", given.strip()):
        number = float(given.strip().removesuffix("%"))
    if number is None or not 0 <= number <= most:
        _refuse(given, "a percentage from 0 to 100")
    return float(number)


def read_size(given: Any) -> int:
    """A number of bytes: ``4096``, ``500 MB`` (10^6) or ``1.5 GiB`` (2^30).

    Raises:
        InvalidValue: it is none.
    """
    form = r"(?i)([0-9]{1,18})(?:\.([0-9]{1,9}))? ?(?:([kmgt]?)(i?)b)?"
    found = re.fullmatch(form, str(given).strip()) if type(given) in (int, str) else None
    size, rest = -1, 0
    if found is not None and not (found[4] and not found[3]):
        unit: int = (1024 if found[4] else 1000) ** _UNITS[(found[3] or "").lower()]
        decimals = found[2] or ""
        size, rest = divmod(int(found[1] + decimals) * unit, 10 ** len(decimals))
    if rest or not 0 <= size < 2**63:  # no parts of bytes
        _refuse(given, "a size like 4096, 500 MB or 1.5 GiB")
    return size


def _growths(given: Any) -> tuple[GrowthLimit, ...]:
    """What figures may grow by: ``size:5%,unused:1 MB``, ``new-kernels-untested:0``."""
    if isinstance(given, str):  # Its parts have no places in a file.
        return tuple(map(_growth, given.split(",")))
    growths: tuple[GrowthLimit, ...] = _list_of(_growth)(given)
    return growths


def _growth(given: Any) -> GrowthLimit:
    expected = "size:, code: or unused: with a percentage or size, or new-kernels-untested:N"
    figure, _, text = given.partition(":") if isinstance(given, str) else ("", "", "")
    figure, text = figure.strip(), text.strip()
    if figure not in (*_GROWING, _UNTESTED):
        _refuse(given, expected, did_you_mean(figure, (*_GROWING, _UNTESTED)))
    is_percent = figure != _UNTESTED and text.endswith("%")
    percent = partial(read_percent, most=999_999)
    read = _count if figure == _UNTESTED else percent if is_percent else read_size
    try:
        limit = float(read(text))
    except InvalidValue:
        _refuse(given, expected)
    return GrowthLimit(figure=figure, limit=limit, is_percent=is_percent)


def _list_of(read: _Reader) -> _Reader:
    """A reader of lists; an item alone is a list of one."""

    def read_list(given: Any) -> tuple[Any, ...]:
        if not isinstance(given, list | tuple):
            return (read(given),)
        return tuple(_at(index, read, item) for index, item in enumerate(given))

    return read_list


def _at(key: str | int, read: _Reader, given: Any) -> Any:
    """Read a value inside another one."""
    try:
        return read(given)
    except OptionError as e:
        raise InvalidValue(str(e), (key, *getattr(e, "keys", ()))) from None


def _by_glob(
    given: Any, read: _Reader, read_glob: _Reader = _library_glob
) -> Iterator[tuple[str, Any]]:
    """Values, each with its glob, or an empty one: ``[80, "libours.so=90"]``, or a mapping."""

    def entry(part: Any) -> tuple[str, Any]:
        glob, equals, text = part.rpartition("=") if isinstance(part, str) else ("", "", part)
        return (read_glob(glob) if equals else ""), read(text)

    if isinstance(given, dict):
        for glob, value in given.items():
            yield _at(glob, read_glob, glob), _at(glob, read, value)
    else:
        yield from _list_of(entry)(given)


def _limits(read: _Reader) -> _Reader:
    def read_limits(given: Any) -> Limits[Any]:
        found: dict[str, Any] = {}
        for glob, limit in _by_glob(given, read):
            # Figures have a limit each, and add up.
            found[glob] = found.get(glob, ()) + limit if isinstance(limit, tuple) else limit
        return Limits(overall=found.pop("", None), libraries=found)

    return read_limits


def _path_rules(given: Any) -> dict[str, str]:
    """Paths here by globs on paths of other machines; see ``globs.PathRules``."""
    rules = dict(_by_glob(given, _path, _path_glob))
    if "" in rules:
        _refuse(rules[""], "GLOB=PATH")
    return rules


def _reports(given: Any) -> tuple[Report, ...]:
    """A list of formats, ``json:PATH``, or a mapping of formats to paths or true."""
    if isinstance(given, dict):
        return tuple(_at(name, partial(_report, name), path) for name, path in given.items())
    return tuple(dict.fromkeys(_list_of(_report_of_text)(given)))


def _report_of_text(given: Any) -> Report:
    name, colon, path = given.strip().partition(":") if isinstance(given, str) else (given, "", "")
    return _report(name, path.strip() if colon else None, given)


def _report(name: Any, path: Any, given: Any = None) -> Report:
    if name not in REPORT_FORMATS:
        hint = did_you_mean(name, REPORT_FORMATS) if isinstance(name, str) else ""
        _refuse(name if given is None else given, one_of(REPORT_FORMATS), hint)
    if path is None or path is True:
        return Report(format=ReportFormat(name), path=None)
    has_path = name in REPORT_FILES
    if not (has_path and isinstance(path, str) and path.strip()):
        expected = f"{name} alone, or with a path" if has_path else f"{name} alone"
        _refuse(path if given is None else given, expected)
    return Report(format=ReportFormat(name), path=_place(path))


_READERS: Mapping[str, _Reader] = {
    "run": _place,
    "config": _path,
    "directory": _path,
    "paths": _path_rules,
    "libraries.include": _list_of(_library_glob),
    "libraries.exclude": _list_of(_library_glob),
    "keep.kernels": _list_of(_glob),
    "keep.libraries": _list_of(_library_glob),
    "keep.archs": _archs,
    "trace.replay": _path,
    "reports.formats": _reports,
    "coverage.libraries": _list_of(_library_glob),
    "coverage.fail_under": _limits(read_percent),
    "thresholds.max_unused_percent": _limits(read_percent),
    "thresholds.min_used_kernels": _limits(_count),
    "thresholds.max_gpu_code": _limits(read_size),
    "compare.baseline": _place,
    "compare.fail": _limits(_growths),
    "cache.dir": _path,
}
