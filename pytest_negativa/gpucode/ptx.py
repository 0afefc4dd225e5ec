"""PTX text to a ``Ptx``: the entry points and functions it declares.

Syntax: PTX ISA, chapter "Directives" (``.entry``, ``.func``, ``.global``, ``.version``,
``.target``); identifiers from chapter "Syntax".
"""

from __future__ import annotations

import re

from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.models.library import Ptx

# All repetitions are bounded: with open ones a crafted text takes quadratic time.
_IDENTIFIER = rb"([a-zA-Z][\w$]*|[_$%][\w$]+)"
_VERSION = re.compile(rb"^[ \t]*\.version\s{1,9}([\d.]{1,9})", re.MULTILINE)
_TARGET = re.compile(rb"^[ \t]*\.target\s{1,9}(\w{1,32})", re.MULTILINE)
_ENTRY = re.compile(rb"\.entry\s{1,9}" + _IDENTIFIER)
# A function may state its result before its name: ".func (.param .b32 out) name (".
_FUNC = re.compile(rb"\.func\s{1,9}(?:\([^(){};]{0,999}\)\s{0,9})?" + _IDENTIFIER)
# ".global .align 4 .b8 table[64];": up to some attributes, then the name.
_GLOBAL = re.compile(
    rb"\.(?:global|const)\s{1,9}(?:\.\w{1,32}(?:\([^();]{0,99}\))?\s{1,9}(?:\d{1,9}\s{1,9})?){0,9}"
    + _IDENTIFIER
)


def parse_ptx(text: bytes, names: NameTable) -> Ptx:
    """Read what PTX declares at its top level; add the names to ``names``.

    Raises:
        PayloadError: the text has no ``.version`` and ``.target``, so it is no PTX.
    """
    version, target = _VERSION.search(text), _TARGET.search(text)
    if not version or not target:
        raise PayloadError(f"not PTX: no .version and .target; starts with {text[:20]!r}")
    return Ptx(
        version=version[1].decode("ascii"),
        target=target[1].decode("ascii", "backslashreplace"),
        kernels=_unique(_ENTRY, text, names),
        device_functions=_unique(_FUNC, text, names),
        global_data=_unique(_GLOBAL, text, names),
    )


def _unique(pattern: re.Pattern[bytes], text: bytes, names: NameTable) -> tuple[int, ...]:
    return tuple(dict.fromkeys(names.index(m[1]) for m in pattern.finditer(text)))
