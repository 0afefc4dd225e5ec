"""Wheels are unpacked; damaged and huge ones are refused."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.installed.wheels import unpack_libraries

NAME = "ours/lib/one.so"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "ours-1.0.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME, os.urandom(2000) + bytes(8000))
        archive.writestr("ours/data.bin", bytes(50000))
    return path


def test_libraries_alone_are_unpacked(wheel: Path, tmp_path: Path) -> None:
    unpack_libraries(wheel, tmp_path / "out", limit=10000)
    assert [p.name for p in (tmp_path / "out").rglob("*.*")] == ["one.so"]


def test_a_limit_on_what_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="would take 10,000 bytes, the limit is 9,999 bytes"):
        unpack_libraries(wheel, tmp_path / "out", limit=9999)
    assert not (tmp_path / "out").exists()


def test_a_size_that_lies(wheel: Path, tmp_path: Path) -> None:
    data = wheel.read_bytes()
    wheel.write_bytes(data.replace((10000).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    with pytest.raises(StoreError, match="cannot be unpacked"):
        unpack_libraries(wheel, tmp_path / "out", limit=50000)
    assert (tmp_path / "out" / NAME).stat().st_size <= 100


@pytest.mark.parametrize("at", [0.05, 0.3, 0.5, 0.7])
def test_a_damaged_wheel(wheel: Path, tmp_path: Path, at: float) -> None:
    data = bytearray(wheel.read_bytes())
    begin = int(len(data) * at)
    data[begin : begin + 60] = b"\xff" * 60
    wheel.write_bytes(data)
    with pytest.raises(StoreError, match=r"ours-1\.0\.whl: cannot be unpacked to"):
        unpack_libraries(wheel, tmp_path / "out")


def test_a_wheel_that_ends_early(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(NAME, os.urandom(10000))
    # The archive says that the library is longer than the file.
    size, longer = (n.to_bytes(4, "little") for n in (10000, 10**6))
    wheel.write_bytes(wheel.read_bytes().replace(size, longer))
    with pytest.raises(StoreError, match=r"ours-1\.0\.whl: cannot be unpacked to"):
        unpack_libraries(wheel, tmp_path / "out")


def test_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        unpack_libraries(tmp_path / "no.whl", tmp_path)
    assert str(caught.value) == f"{tmp_path / 'no.whl'}: not found"
