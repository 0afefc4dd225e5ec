"""Recipes, from a file to its compacted form."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.slimming.recipes import Removal, by_archs, plan_library, slim_library
from tests.support.compacting import needs_compiler
from tests.support.reading import LITTLE, bytes_read, counts_bytes, large_library


@needs_compiler
@counts_bytes
def test_library_is_read_once_beside_copying(tmp_path: Path) -> None:
    library = large_library(tmp_path)
    recipe = by_archs((ComputeCapability(9, 0),), keep_ptx=False, strip=True, strip_others=True)
    with bytes_read() as count, ByteSource(library) as source:
        removal = plan_library(recipe, source)
        made = slim_library(recipe, source, tmp_path / "x.so", "x.so", removal, strip=True)
        read = count()
    assert isinstance(made, Removal)
    assert read < library.stat().st_size + 2 * made.size_after + LITTLE
