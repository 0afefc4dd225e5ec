"""Recipes, from a file to its compacted form."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.rewriting.compact.records import Compacted
from pytest_negativa.slimming.recipes import ByArchs, apply
from tests.support.compacting import needs_compiler
from tests.support.reading import LITTLE, bytes_read, counts_bytes, large_library


@needs_compiler
@counts_bytes
def test_library_is_read_once_beside_copying(tmp_path: Path) -> None:
    library = large_library(tmp_path)
    recipe = ByArchs((ComputeCapability(9, 0),), keep_ptx=False, strip=True, strip_others=True)
    with bytes_read() as count:
        prepared = recipe.prepare(library)
        assert not isinstance(prepared, str)
        result = apply(prepared, library, tmp_path / "x.so", strip=True, load_check=False)
        read = count()
    assert isinstance(result, Compacted)
    assert read < result.size_before + 2 * result.size_after + LITTLE
