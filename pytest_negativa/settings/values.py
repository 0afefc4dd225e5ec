"""Values as text: sizes, percent, archs, globs, limits, growth, reports; relative paths.

msgspec checks words, numbers and switches, by the fields of the records. What else a text may be,
such as a size or a glob, is read here.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
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
)
from pytest_negativa.settings.options import REPORT_FILES, Option
from pytest_negativa.storage.runs import is_run_id
from pytest_negativa.storage.urls import is_url, place_of

_GROWING = ("size", "code", "unused")
_UNTESTED = "new-kernels-untested"
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_Reader = Callable[[Any], Any]


class Found(NamedTuple):
    """A value of an option; ``where`` is as in ``Settings.sources``."""

    value: Any
    where: str


def describe(value: Any) -> str:
    """A found value in words."""
    words = {dict: "a mapping", list: "a list", tuple: "a list", type(None): "nothing"}
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    text = str(value).lower() if isinstance(value, bool) else f"the number {value}"
    return words.get(type(value), text)


def anchor(path: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """``path`` as absolute as ``base``; symlinks stay, and so does ``~`` if there is no home."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 (Path's raises if there is no home)
    return os.path.normpath(os.path.join(base, expanded))


def type_of(name: str) -> Any:
    """The type of an option's field, or of its items; None, which is no value, left out."""
    section, _, key = name.rpartition(".")
    found = _types(_types(Settings)[section] if section else Settings)[key]
    if get_origin(found) is tuple or type(None) in get_args(found):
        return get_args(found)[0]
    return found


# A command asks for each field of a record, and the annotations of all are compiled each time.
@cache
def _types(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def read_item(name: str, given: Any) -> Any:
    """The value of an option, or an item of one that has several.

    Args:
        name: of the option.
        given: a plain value of the file, or a text.

    Raises:
        OptionError: the option can't have it.
    """
    return _READERS.get(name, partial(_checked, type_of(name)))(given)


def join_items(option: Option, items: Iterable[Any]) -> Any:
    """The value of an option with these items; None if it has none and takes one."""
    if not option.is_repeated:
        return next(iter(items), None)
    if option.name == "paths":
        return dict(items)
    if get_origin(type_of(option.name)) is Limits:
        return _limits(items)
    if option.name == "keep.archs":
        items = itertools.chain.from_iterable(items)
    return tuple(dict.fromkeys(items))


def value_of(option: Option, given: Any) -> Any:
    """The value of a default, a variable, or what a command-line parser hands over.

    Raises:
        OptionError: the option can't have it.
    """
    texts = given if isinstance(given, tuple | list) else () if given is None else (given,)
    if option.is_repeated:
        if option.has_commas:
            texts = [part for text in texts for part in text.split(",")]
        # An empty text is no value: a flag given as ``--flag=`` empties the file's list.
        texts = [text.strip() for text in texts if text.strip()]
    return join_items(option, [read_item(option.name, text) for text in texts])


def anchored(name: str, value: Any, base: str | os.PathLike[str]) -> Any:
    """The value of an option with relative paths taken from the folder ``base``."""
    if name == "paths":
        return {glob: anchor(path, base) for glob, path in value.items()}
    if name == "reports.formats":
        return tuple(msgspec.structs.replace(r, path=_anchored(r.path, base)) for r in value)
    # Else the folder of a run that is gone would lead to another one with its id.
    is_id = name == "run" and value is not None and is_run_id(value)
    return value if is_id or _READERS.get(name) not in (_path, _place) else _anchored(value, base)


def _anchored(path: str | None, base: str | os.PathLike[str]) -> str | None:
    return path if path in (None, "-") or is_url(path) else anchor(path or "", base)


def _refuse(given: Any, expected: str, hint: str = "") -> NoReturn:
    raise OptionError(f"found {describe(given)}, expected {expected}{hint}")


def _checked(wanted: Any, given: Any) -> Any:
    """A value that msgspec reads: a word of an enum, a switch, a number."""
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
    """Archs that one item stands for; to YAML a plain 90 or 9.0 is a number."""
    text = str(given) if type(given) in (int, float) else given
    return tuple(
        map(str, parse_archs([_text(".*", "an arch like sm_90, or a GPU like H100", text)]))
    )


def read_percent(given: Any, most: float = 100) -> float:
    """A share of 100: ``12.5`` or ``"12.5%"``.

    Raises:
        OptionError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(\.[0-9]+)?) ?%?", str(given).strip())
    if found is None or float(found[1]) > most:
        _refuse(given, "a percentage from 0 to 100")
    return float(found[1])


def read_size(given: Any) -> int:
    """A number of bytes: ``4096``, ``500 MB`` (10^6) or ``1.5 GiB`` (2^30).

    Raises:
        OptionError: it is none.
    """
    form = r"(?i)([0-9]{1,18})(?:\.([0-9]{1,9}))? ?(?:([kmgt]?)(i?)b)?"
    found = re.fullmatch(form, str(given).strip())
    size, rest = -1, 0
    if found is not None and not (found[4] and not found[3]):
        unit: int = (1024 if found[4] else 1000) ** _UNITS[(found[3] or "").lower()]
        decimals = found[2] or ""
        size, rest = divmod(int(found[1] + decimals) * unit, 10 ** len(decimals))
    if rest or not 0 <= size < 2**63:  # no parts of bytes
        _refuse(given, "a size like 4096, 500 MB or 1.5 GiB")
    return size


def _growths(given: Any) -> tuple[GrowthLimit, ...]:
    """Limits of growth: ``size:5%,unused:1 MB``, ``new-kernels-untested:0``."""
    return tuple(map(_growth, given.split(",") if isinstance(given, str) else (given,)))


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
    except OptionError:
        _refuse(given, expected)
    return GrowthLimit(figure=figure, limit=limit, is_percent=is_percent)


def _limit(read: _Reader) -> _Reader:
    """A reader of limits: ``80``, or for a library ``libours.so=90``."""

    def read_limit(given: Any) -> tuple[str, Any]:
        glob, equals, text = given.rpartition("=") if isinstance(given, str) else ("", "", given)
        return (_library_glob(glob) if equals else ""), read(text)

    return read_limit


def _limits(items: Iterable[tuple[str, Any]]) -> Limits[Any]:
    found: dict[str, Any] = {}
    for glob, limit in items:
        # Figures have a limit each, and add up.
        found[glob] = found.get(glob, ()) + limit if isinstance(limit, tuple) else limit
    return Limits(overall=found.pop("", None), libraries=found)


def _path_rule(given: Any) -> tuple[str, str]:
    """A glob on paths of other machines, and the path here; see ``globs.PathRules``."""
    glob, equals, path = given.rpartition("=") if isinstance(given, str) else ("", "", "")
    if not equals:
        _refuse(given, "GLOB=PATH")
    return _path_glob(glob), _path(path)


def _report(given: Any) -> Report:
    """A format, or one with a path: ``json:PATH``."""
    name, colon, path = given.strip().partition(":") if isinstance(given, str) else ("", "", "")
    words = [kind.value for kind in ReportFormat]
    if name not in words:
        _refuse(given, one_of(words), did_you_mean(name, words))
    has_path = name in REPORT_FILES
    if colon and not (has_path and path.strip()):
        _refuse(given, f"{name} alone, or with a path" if has_path else f"{name} alone")
    return Report(format=ReportFormat(name), path=_place(path) if colon else None)


_READERS: Mapping[str, _Reader] = {
    "run": _place,
    "config": _path,
    "directory": _path,
    "paths": _path_rule,
    "libraries.include": _library_glob,
    "libraries.exclude": _library_glob,
    "keep.kernels": _glob,
    "keep.libraries": _library_glob,
    "keep.archs": _archs,
    "trace.replay": _path,
    "reports.formats": _report,
    "coverage.libraries": _library_glob,
    "coverage.fail_under": _limit(read_percent),
    "thresholds.max_unused_percent": _limit(read_percent),
    "thresholds.min_used_kernels": _limit(_count),
    "thresholds.max_gpu_code": _limit(read_size),
    "compare.baseline": _place,
    "compare.fail": _limit(_growths),
    "cache_dir": _path,
}
