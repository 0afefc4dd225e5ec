"""PTX text to a ``Ptx``: the kernels that it declares.

Syntax: PTX ISA, chapter "Directives" (``.entry``, ``.version``, ``.target``); identifiers from
chapter "Syntax".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError
from pytest_negativa.gpucode.search import Find, load_search
from pytest_negativa.models.library import Ptx

# Open repetitions would take quadratic time for a crafted text.
_HEAD = (
    re.compile(rb"^[ \t]*\.version\s{1,9}[\d.]{1,9}", re.MULTILINE),
    re.compile(rb"^[ \t]*\.target\s{1,9}\w{1,32}", re.MULTILINE),
)
# Attributes of other declarations, ".attribute(.managed) .align 4", may come to kernels, too.
_ENTRY = re.compile(
    rb"\.entry\s{1,9}"
    rb"(?:\.\w{1,32}(?:\([^();]{0,99}\))?\s{1,9}(?:\d{1,9}\s{1,9})?){0,9}"
    rb"([a-zA-Z][\w$]*|[_$%][\w$]+)"
)
DIRECTIVES = (b".entry",)
"""Begin the declaration of a kernel, with white space behind them."""

_FIND = load_search(DIRECTIVES, before_space=True)


def find_entries(text: bytes, find: Find = _FIND) -> Iterator[re.Match[bytes]]:
    """The declarations of kernels in PTX; group 1 is the name."""
    at = find(text, len(text), 0)
    while at >= 0:
        match = _ENTRY.match(text, at)
        if match is not None:
            yield match
        at = find(text, len(text), at + 1 if match is None else match.end())


def parse_ptx(text: bytes, names: NameTable) -> Ptx:
    """Read the declarations of kernels in PTX.

    Args:
        text: the PTX, unpacked. The PTX of a library can unpack to 400 MB.
        names: gets the names.

    Raises:
        PayloadError: the text has no ``.version`` and ``.target``, so it is no PTX.
    """
    if not all(pattern.search(text) for pattern in _HEAD):
        raise PayloadError(f"not PTX: no .version and .target; starts with {text[:20]!r}")
    kernels = (names.index(match[1]) for match in find_entries(text))
    return Ptx(kernels=tuple(dict.fromkeys(kernels)))
