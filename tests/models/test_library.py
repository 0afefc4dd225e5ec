"""A library's map, asked for its code by block, against the fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from tests.support.libraries import SHARED_OBJECTS


@pytest.mark.parametrize("path", SHARED_OBJECTS, ids=lambda path: path.name)
def test_every_element_and_frame_is_one_block(path: Path) -> None:
    library_map = read_library(path, Scope(headers_only=True))
    records = list(library_map.iter_code())
    elements = [e for region in library_map.iter_regions() for e in region.elements]
    assert [r for r in records if r.region is not None] == elements
    assert [r for r in records if r.region is None] == list(library_map.iter_frames())
    by_section = [b for section in library_map.sections for b in section.iter_code()]
    assert by_section == records
