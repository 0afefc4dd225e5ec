"""Which CUDA compiled a library, read from the headers of its elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.arch import ElementKind
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.toolkit import cuda_major
from pytest_negativa.models.library import Scope
from tests.support.libraries import BIN, MULTIARCH


def major_of(path: Path) -> int | None:
    with ByteSource(path) as source:
        return cuda_major(source, read_library(path, Scope(headers_only=True)))


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libmultiarch.so", 13),  # PTX and cubins
        ("libptx_only.so", 13),
        ("libpointers.so", 13),  # cubins alone
        ("libabi7.so", None),  # cubins of ptxas 12, which writes 1.8 from sm_100 on, too
        ("liblto_none.so", None),
        ("libframes.so", None),
    ],
)
def test_fixtures(name: str, major: int | None) -> None:
    assert major_of(BIN / name) == major


@pytest.mark.parametrize(
    ("isa", "major"), [((9, 2), 13), ((8, 8), 12), ((7, 0), 11), ((6, 5), 9), ((99, 0), None)]
)
def test_ptx(tmp_path: Path, isa: tuple[int, int], major: int | None) -> None:
    assert major_of(with_isa(tmp_path / "lib.so", isa)) == major


def with_isa(target: Path, isa: tuple[int, int]) -> Path:
    """A library without versions of cubins, and with this version of PTX."""
    data = bytearray(MULTIARCH.read_bytes())
    for element in read_library(MULTIARCH, Scope(headers_only=True)).iter_elements():
        major, minor = isa if element.kind is ElementKind.PTX else (1, 7)
        at = element.header_offset + 0x18
        data[at : at + 4] = minor.to_bytes(2, "little") + major.to_bytes(2, "little")
    target.write_bytes(data)
    return target
