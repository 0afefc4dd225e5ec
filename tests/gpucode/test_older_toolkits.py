"""Programs of CUDA 11.8 and 12.4, linked on the device and with the runtime inside."""

from __future__ import annotations

import tarfile
from pathlib import Path

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from tests.support.libraries import TESTS
from tests.support.scanner import scan

PREBUILT = TESTS / "gpu" / "corpus" / "prebuilt.tar.xz"


def test_both_readers_see_the_same(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    seen = []
    with tarfile.open(PREBUILT) as archive:
        for member in archive:
            if (content := archive.extractfile(member)) is not None:
                library.write_bytes(content.read())
                library_map, scanned = read_library(library, Scope()), scan(library)
                assert len(list(library_map.iter_regions())) == scanned.regions
                assert len(list(library_map.iter_code())) == scanned.elements.total()
                assert not library_map.problems
                names = {
                    kernel.name
                    for code in library_map.iter_code()
                    for kernel in library_map.kernels_of(code.content)
                }
                assert names == scanned.kernels and "_Z9idle_herePi" in names
                seen.append(member.name)
    assert len(seen) == 20
    assert {"11.8/libunits.so", "12.4/libsymbols_static.so"} < {*seen}
