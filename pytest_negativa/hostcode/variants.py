"""Functions for single instruction sets, by the names of symbols.

Libraries hold copies of hot functions for several instruction sets and choose one when they run. A
name such as ``at::native::AVX512::add_kernel`` or ``dgemm_kernel_HASWELL`` tells which copy it is.
Names that tell nothing are not counted, so this is no list of all copies.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.functions import named_functions
from pytest_negativa.models.hostcode import HostVariant
from pytest_negativa.models.spans import intersection

# The instruction set, the flag of /proc/cpuinfo that it needs, and its marks in names. OpenBLAS
# names cores (its cpuid_x86.c), Intel MKL and others the instruction set.
_SETS = (
    ("AMX", "amx_tile", rb"amx|SAPPHIRERAPIDS"),
    ("AVX-512", "avx512f", rb"avx512|SKYLAKEX|COOPERLAKE"),
    ("AVX2", "avx2", rb"avx2|HASWELL|ZEN(?![a-z])|EXCAVATOR"),
    ("AVX", "avx", rb"avx(?![25])|SANDYBRIDGE|BULLDOZER|PILEDRIVER|STEAMROLLER"),
    ("SSE4", "sse4_1", rb"sse4|NEHALEM"),
)
_MARKS = tuple(
    (name, flag, re.compile(rb"(?:^|[^A-Za-z])(?:%s)" % marks, re.IGNORECASE))
    for name, flag, marks in _SETS
)
# The words that marks begin with. A mark that begins with another one's needs no search of its own.
_WORDS = {
    re.split(rb"[(\d]", mark)[0].lower() for _, _, marks in _SETS for mark in marks.split(b"|")
}


def find_variants(
    source: ByteSource, path: str, used: Sequence[tuple[int, int]], flags: Collection[str]
) -> Iterator[HostVariant]:
    """Amount of a library's code for each instruction set in its symbols' names.

    Args:
        path: for the rows.
        used: addresses that may have been touched, sorted.
        flags: what the CPU can do.

    Raises:
        FormatError: the file is truncated.
    """
    functions = _with_words(dict(named_functions(source)))
    for name, flag, marks in _MARKS:
        own = {at: size for at, (size, symbol) in functions.items() if marks.search(symbol)}
        functions = {at: rest for at, rest in functions.items() if at not in own}
        if own:
            touched = [at for at, size in own.items() if any(intersection([(at, at + size)], used))]
            yield HostVariant(
                path=path,
                instructions=name,
                functions=len(own),
                bytes=sum(own.values()),
                touched_functions=len(touched),
                runs_here=flag in flags,
            )


def _with_words(functions: Mapping[int, tuple[int, bytes]]) -> dict[int, tuple[int, bytes]]:
    """The functions whose names have one of the words: of a million, a few thousand have.

    A search in all names at once takes less time than regular expressions for each.
    """
    rows = list(functions.items())
    text = b"\n".join(name for _, (_, name) in rows).lower()
    ends = list(accumulate(len(name) + 1 for _, (_, name) in rows))
    found = set()
    for word in _WORDS:
        at = text.find(word)
        while at >= 0:
            number = bisect.bisect_right(ends, at)
            found.add(number)
            at = text.find(word, ends[number])
    return dict(rows[number] for number in sorted(found))
