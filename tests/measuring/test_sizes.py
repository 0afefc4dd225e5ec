"""Page cache and sizes of real files."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError
from pytest_negativa.measuring.files import cached_bytes, evict, measure_sizes

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(8 * MIB + 100))
    return path


def on_disk(path: Path) -> bool:
    """False in memory file systems, whose pages have no other place to be."""
    evict([path])
    return cached_bytes([path]) == 0


@pytest.mark.skipif(
    cached_bytes([Path(__file__)]) is None, reason="the kernel does not report cached pages"
)
def test_what_was_read_is_in_the_page_cache(large: Path) -> None:
    whole = -(-(8 * MIB + 100) // PAGE) * PAGE
    assert cached_bytes([large]) == whole
    if not on_disk(large):
        pytest.skip("the temporary folder is in memory")
    with large.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(MIB)
    assert cached_bytes([large]) == MIB
    assert cached_bytes([large, large]) == 2 * MIB


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    evict([missing])
    assert cached_bytes([missing]) is None
    with pytest.raises(NegativaError, match=r"missing: cannot be read: No such file"):
        measure_sizes([("/missing", missing)])


def test_sizes(tmp_path: Path, large: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(4 * MIB)
    files = [("/lib/large", large), ("/lib/sparse", sparse)]

    sizes = measure_sizes(files)

    assert sizes.files == 2
    assert sizes.apparent_bytes == 12 * MIB + 100
    assert 8 * MIB + 100 <= sizes.allocated_bytes < 9 * MIB
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files:
            tar.add(path, name)
    assert sizes.tar_bytes == len(archive.getvalue())
    # Random bytes can't be compressed, zeros to nearly nothing.
    assert 8 * MIB < sizes.tar_zstd_bytes < 8.1 * MIB


def test_sizes_depend_on_names_and_contents_alone(tmp_path: Path, large: Path) -> None:
    other = tmp_path / "elsewhere" / "other"
    other.parent.mkdir()
    other.write_bytes(large.read_bytes())
    other.chmod(0o600)
    os.utime(other, (1, 1))
    assert measure_sizes([("/a", large)]) == measure_sizes([("/a", other)])
