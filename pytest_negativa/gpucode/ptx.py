"""PTX text to a ``Ptx``: the entry points and functions it declares.

Syntax: PTX ISA, chapter "Directives" (``.entry``, ``.func``, ``.global``, ``.version``,
``.target``); identifiers from chapter "Syntax".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.search import Find, load_search
from pytest_negativa.models.library import Ptx

# Open repetitions would take quadratic time for a crafted text.
_VERSION = re.compile(rb"^[ \t]*\.version\s{1,9}([\d.]{1,9})", re.MULTILINE)
_TARGET = re.compile(rb"^[ \t]*\.target\s{1,9}(\w{1,32})", re.MULTILINE)
# One expression makes one pass: the PTX of a library can unpack to 400 MB. A function's result,
# "(.param .b32 out)", and attributes, ".align 4 .b8", may stand between the directive and the name.
# Instructions such as "ld.global.u32" have no space after the directive.
_DECLARATION = re.compile(
    rb"\.(entry|func|global|const)\s{1,9}"
    rb"(?:\([^(){};]{0,999}\)\s{0,9})?"
    rb"(?:\.\w{1,32}(?:\([^();]{0,99}\))?\s{1,9}(?:\d{1,9}\s{1,9})?){0,9}"
    rb"([a-zA-Z][\w$]*|[_$%][\w$]+)"
)
DIRECTIVES = (b".entry", b".func", b".global", b".const")
"""Begin declarations, with white space behind them."""

_FIND = load_search(DIRECTIVES, before_space=True)


def find_declarations(text: bytes, find: Find = _FIND) -> Iterator[re.Match[bytes]]:
    """The declarations of PTX; group 1 is the directive, group 2 the name."""
    at = find(text, len(text), 0)
    while at >= 0:
        match = _DECLARATION.match(text, at)
        if match is not None:
            yield match
        at = find(text, len(text), at + 1 if match is None else match.end())


def parse_ptx(text: bytes, names: NameTable) -> Ptx:
    """Read the declarations of PTX.

    Args:
        text: the PTX, unpacked.
        names: gets the names.

    Raises:
        PayloadError: the text has no ``.version`` and ``.target``, so it is no PTX.
    """
    version, target = _VERSION.search(text), _TARGET.search(text)
    if not version or not target:
        raise PayloadError(f"not PTX: no .version and .target; starts with {text[:20]!r}")
    declared: dict[bytes, dict[int, None]] = {
        b"entry": {},
        b"func": {},
        b"global": {},
        b"const": {},
    }
    for match in find_declarations(text):
        # A parameter, ".param .u64 .ptr .global .align 4 p", is no variable. A look-behind in the
        # expression would slow the search down.
        if text.endswith((b".ptr ", b".ptr\t"), max(0, match.start() - 5), match.start()):
            continue
        declared[match[1]][names.index(match[2])] = None
    return Ptx(
        version=version[1].decode("ascii"),
        target=target[1].decode("ascii", "backslashreplace"),
        kernels=tuple(declared[b"entry"]),
        device_functions=tuple(declared[b"func"]),
        global_data=tuple(declared[b"global"]),
        constant_data=tuple(declared[b"const"]),
    )
