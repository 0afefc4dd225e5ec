"""What is unpacked of a library, and what is only listed."""

from __future__ import annotations

import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import LibraryMap, Scope
from tests.support.libraries import BIN


def names_by_start(library_map: LibraryMap) -> dict[int, list[str]]:
    """The kernels of all that was unpacked."""
    return {
        block.start: [kernel.name for kernel in library_map.kernels_of(block.content)]
        for block in library_map.iter_code()
        if block.content is not None
    }


@pytest.mark.parametrize("library", ["libmode_size.so", "libframes.so", "libcallgraph.so"])
@pytest.mark.parametrize("devices", [None, ("9.0",)])
def test_only_what_is_asked_for_is_unpacked(library: str, devices: tuple[str, ...] | None) -> None:
    every = names_by_start(read_library(BIN / library, Scope(devices=devices)))
    assert every
    for wanted in ([*every][:1], [*every][1:]):
        scope = Scope(devices=devices, starts=frozenset(wanted))
        assert names_by_start(read_library(BIN / library, scope)) == {s: every[s] for s in wanted}
    nothing = Scope(devices=devices, starts=frozenset())
    assert names_by_start(read_library(BIN / library, nothing)) == {}
