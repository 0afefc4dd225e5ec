"""No library is read, hashed, trimmed or packed more often than it must be."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FrameType

import pytest

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.rewriting.compact.compact import compact_library
from pytest_negativa.rewriting.compact.records import CompactOptions
from pytest_negativa.rewriting.cubin_code import overwrite_code
from pytest_negativa.rewriting.reconstruct import reconstruct
from tests.support import slimmed
from tests.support.compacting import needs_compiler, plan_of, read
from tests.support.libraries import BIN
from tests.support.reading import LITTLE, MB, bytes_read, counts_bytes, large_library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_library(tmp_path_factory.mktemp("library"))


def half(path: Path) -> AnalyzedLibrary:
    library_map = read(path)
    return AnalyzedLibrary(library_map, plan_of(library_map, lambda number: number % 2 == 0))


@needs_compiler
@counts_bytes
def test_compaction_reads_both_files_once_beside_copying(library: Path, tmp_path: Path) -> None:
    one = half(library)
    options = CompactOptions()
    with bytes_read() as count:
        result = compact_library(
            library, tmp_path / "small.so", one.library_map, one.plan, options=options
        )
        read = count()
    kept = result.size_after
    assert 0.4 * result.size_before < kept < 0.6 * result.size_before
    assert read < result.size_before + 2 * kept + LITTLE


@needs_compiler
@counts_bytes
def test_copy_is_read_once_beside_copying(library: Path, tmp_path: Path) -> None:
    one = half(library)
    size = one.plan.library.size
    with bytes_read() as count:
        reconstruct([one], tmp_path / "copies")
        read = count()
    assert read < 2 * size + (size - one.plan.unused_bytes) + LITTLE


@pytest.mark.parametrize("gain", [-MB, 1 << 40])
def test_cubins_are_trimmed_once(tmp_path: Path, gain: int) -> None:
    """Whether the library is compacted, or compaction refuses it."""
    path = BIN / "libcallgraph.so"
    library_map = slimmed.read(path)
    one = AnalyzedLibrary(library_map, slimmed.plan_for(library_map, "calls_chain"))
    assert len(one.plan.trimmed) == 1
    trims = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is overwrite_code.__code__:
            trims.append(frame)

    options = CompactOptions(min_gain=gain)
    threading.setprofile(count)
    try:
        [made] = reconstruct([one], tmp_path / "copies", compact=options).libraries
    finally:
        threading.setprofile(None)
    assert (made.compaction is None) == (gain > 0)
    assert made.repacked[0].filled
    assert len(trims) == 1
