"""Files and models: round trips, versions, atomic writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import decode_map, encode_record, load_map, write_record
from tests.support.libraries import MULTIARCH, SHARED_OBJECTS


@pytest.mark.parametrize("library", SHARED_OBJECTS, ids=lambda path: path.stem)
def test_map_survives_the_file(library: Path, tmp_path: Path) -> None:
    library_map = read_library(library, Scope())
    file = tmp_path / "map.json"
    write_record(file, library_map)
    assert load_map(file) == library_map
    assert decode_map(encode_record(library_map), "here") == library_map


def test_other_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"format": 4, "new": []}')
    with pytest.raises(StoreError) as caught:
        load_map(file)
    assert str(caught.value) == (f"{file}: format 4, this release reads 1; make the map again")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a library map"),
        (b"\xff\xfe", "not a library map"),
        (b"[]", "not a library map"),
        (b'{"format": "1"}', 'format "1", this release reads 1; make the map again'),
        (b'{"format": 1}', "not a library map"),
        (b'{"format": 1} trailing', "not a library map"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    file = tmp_path / "map.json"
    file.write_bytes(data)
    with pytest.raises(StoreError, match=problem) as caught:
        load_map(file)
    assert str(file) in str(caught.value)


def test_reversed_span_is_refused() -> None:
    document = json.loads(encode_record(read_library(MULTIARCH, Scope())))
    document["sections"][0]["span"].reverse()
    with pytest.raises(StoreError, match="bad span"):
        decode_map(json.dumps(document).encode(), "here")


def test_a_negative_index_is_refused() -> None:
    """From the end of the names it would lead to another kernel's name."""
    document = json.loads(encode_record(read_library(MULTIARCH, Scope())))
    element = document["sections"][0]["regions"][0]["elements"][0]
    assert element["content"]["kernels"].pop() is not None
    element["content"]["kernels"].append([-1, 0, 0])
    with pytest.raises(StoreError, match=r"not a library map.*`int` >= 0 - at `\$.sections"):
        decode_map(json.dumps(document).encode(), "here")


def test_write_makes_folders_and_honours_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    before = os.umask(0o027)
    try:
        write_atomically(target, b"x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert target.read_bytes() == b"x"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
