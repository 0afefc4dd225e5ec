"""What is unpacked of a library, and what is only listed."""

from __future__ import annotations

import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.library import Cubin, LibraryMap, Scope
from pytest_negativa.planning.locate import locate_library
from tests.support.libraries import BIN
from tests.support.usages import library_usage, usage_of


def names_by_start(library_map: LibraryMap) -> dict[int, list[str]]:
    """The kernels of all that was unpacked."""
    return {
        block.payload.start: [kernel.name for kernel in library_map.kernels_of(block.content)]
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


def test_call_graphs_are_read_for_plans_alone() -> None:
    """All that inspect shows is the same without; a plan would take functions for unreachable."""
    path = BIN / "libcallgraph.so"
    with_calls, without = read_library(path, Scope()), read_library(path, Scope(calls=False))
    assert any(cubin.calls for cubin in cubins(with_calls))
    assert not any(
        (c.calls, c.references, c.address_taken, c.indirect_calls) != ((),) * 4
        for c in cubins(without)
    )
    assert names_by_start(with_calls) == names_by_start(without)
    assert summarize(with_calls, ()) == summarize(without, ())
    usage = usage_of(library_usage(without, {}))
    with pytest.raises(ValueError, match="a plan needs the call graphs"):
        locate_library(without, usage.libraries[0], usage)


def cubins(library_map: LibraryMap) -> list[Cubin]:
    return [b.content for b in library_map.iter_code() if isinstance(b.content, Cubin)]
