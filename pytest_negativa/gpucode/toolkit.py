"""The CUDA release that compiled a library's GPU code, by the headers of its elements."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_negativa.arch import ElementKind
from pytest_negativa.gpucode.fatbin import ELEMENT_HEADER
from pytest_negativa.gpucode.source import Readable
from pytest_negativa.models.library import LibraryMap

# PTX ISA, "Release History": 6.0 is of CUDA 9.0, 7.0 of 11.0, 8.0 of 12.0, 9.0 of 13.0.
_BY_PTX = {6: 9, 7: 11, 8: 12, 9: 13}
# ptxas 12 writes version 1.7 for archs before sm_100, ptxas 13 writes 1.8. Source: cubins of ptxas
# 12.8 and 13.0 for all archs.
_CUBIN_OF_13 = (1, 8)
_FIRST_WITH_1_8 = 10


def cuda_major(source: Readable, library_map: LibraryMap) -> int | None:
    """The major version of the latest CUDA that compiled an element; None if no header tells.

    Args:
        source: the bytes of the library.
        library_map: what lies where in it.
    """
    return max(_majors(source, library_map), default=None)


def _majors(source: Readable, library_map: LibraryMap) -> Iterator[int]:
    for element in library_map.iter_elements():
        header = ELEMENT_HEADER.unpack_from(
            source.read(element.header_offset, ELEMENT_HEADER.size), 0
        )
        if element.kind is ElementKind.PTX and header.major in _BY_PTX:
            yield _BY_PTX[header.major]
        elif (
            element.kind is ElementKind.CUBIN
            and element.arch.major < _FIRST_WITH_1_8
            and (header.major, header.minor) == _CUBIN_OF_13
        ):
            yield 13
