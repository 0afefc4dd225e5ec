"""What kernels of a cubin can reach: on compiled call graphs, and on made-up bad ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from pytest_negativa.arch import SmArch
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Cubin, Function, LibraryMap, Scope
from pytest_negativa.models.spans import Span
from pytest_negativa.planning.reachable import Reach, launchable_kernels, reachable_code
from tests.support.libraries import BIN

POINTED_AT = {
    "_Z7in_codef",
    "_Z9in_globalf",
    "_Z11in_constantf",
    "_Z6unreadf",
    "_Z8calls_onf",
    "_Z14behind_pointerf",  # called by the one before
    "_ZN6Square4areaEf",
}


def cubins(library_map: LibraryMap) -> Iterator[Cubin]:
    for element in library_map.iter_code():
        if isinstance(element.content, Cubin) and not element.content.relocatable:
            yield element.content


def kept_of(name: str, *kernels: str) -> set[str]:
    """Functions of a fixture's sm_90 code that stay, by name."""
    library_map = read_library(BIN / name, Scope(devices=("9.0",)))
    [cubin] = cubins(library_map)
    names = library_map.names
    found = reachable_code(cubin, [names.index(kernel) for kernel in kernels])
    assert isinstance(found, Reach)
    kept = {names[index] for index in found.kept}
    code = {
        names[f.name]: Span(f.offset_in_cubin, f.offset_in_cubin + f.code_size)
        for f in (*cubin.kernels, *cubin.device_functions)
    }
    # Every function is in the one or in the other, and its code with it.
    for function, span in code.items():
        inside = any(u.start <= span.start and span.end <= u.end for u in found.unused)
        outside = all(span.end <= u.start or u.end <= span.start for u in found.unused)
        assert (inside, outside) == (function not in kept, function in kept)
    assert sum(u.size for u in found.unused) < found.code_size
    return kept


@pytest.mark.parametrize(
    ("kernels", "kept"),
    [
        ((), set()),
        (("plain",), {"plain"}),
        (
            ("calls_directly",),
            {"calls_directly", "_Z6calledf", "__cuda_sm3x_div_rn_noftz_f32_slowpath"},
        ),
        (("reads_global", "calls_virtual"), {"reads_global", "calls_virtual"}),
    ],
)
def test_linked_code_keeps_what_is_called_and_all_that_is_pointed_at(
    kernels: tuple[str, ...], kept: set[str]
) -> None:
    assert kept_of("libpointers.so", *kernels) == kept | POINTED_AT


def test_chain_and_recursion() -> None:
    pointed_at = {"_Z7add_onef", "_Z7add_twof", "_ZN6Square4areaEf", "_ZN6Circle4areaEf"}

    assert kept_of("libcallgraph_rdc.so", "calls_chain") == pointed_at | {
        "calls_chain",
        "_Z12chain_middlef",
        "_Z9chain_endf",
        "_Z13shared_by_twof",
    }
    assert kept_of("libcallgraph_rdc.so", "calls_recursive") == pointed_at | {
        "calls_recursive",
        "_Z9recursivei",
    }


def test_copies_in_a_kernels_section_stay_and_go_with_it() -> None:
    kept = kept_of("libcallgraph.so", "calls_chain")

    assert kept == {"calls_chain"} | {
        f"$calls_chain${name}"
        for name in ("_Z12chain_middlef", "_Z9chain_endf", "_Z13shared_by_twof")
    }


def cubin(**changes: object) -> Cubin:
    """Kernels 0 to 2 and functions 3 to 5, 16 bytes each, by name and by place."""
    base = Cubin(
        arch=SmArch.parse("sm_90"),
        relocatable=False,
        kernels=tuple(Function(n, 0x100 + n * 16, 16) for n in range(3)),
        device_functions=tuple(Function(n, 0x100 + n * 16, 16) for n in range(3, 6)),
        externals=(9,),
        calls=((0, 3), (3, 4), (1, 5), (1, 9)),
    )
    return replace(base, **changes)


def ranges(*indices: int) -> tuple[Span, ...]:
    return tuple(Span(0x100 + n * 16, 0x110 + n * 16) for n in indices)


@pytest.mark.parametrize(
    ("changes", "roots", "unused"),
    [
        ({}, (0,), (1, 2, 5)),
        ({}, (1,), (0, 2, 3, 4)),
        ({}, (2,), (0, 1, 3, 4, 5)),
        ({}, (), (0, 1, 2, 3, 4, 5)),
        ({}, (0, 1, 2), ()),
        # Local functions of two files share a name: which of them is called can't be told.
        (
            {
                "device_functions": tuple(Function(3, 0x100 + n * 16, 16) for n in range(3, 6)),
                "calls": ((0, 3), (1, 9)),
            },
            (0,),
            (1, 2),
        ),
        # Kernel 2 launches kernel 1 from the device.
        ({"references": ((2, 1),)}, (2,), (0, 3, 4)),
        # A kernel in a table, for whoever launches from there.
        ({"address_taken": ((1, 8),)}, (2,), (0, 3, 4)),
        ({"indirect_calls": ((2, 8),)}, (2,), (0, 1, 3, 4, 5)),
    ],
)
def test_closure(
    changes: dict[str, object], roots: tuple[int, ...], unused: tuple[int, ...]
) -> None:
    found = reachable_code(cubin(**changes), roots)

    assert isinstance(found, Reach)
    assert found.unused == ranges(*unused)
    assert found.code_size == 6 * 16


@pytest.mark.parametrize(
    ("changes", "launched"),
    [
        ({}, set()),
        ({"references": ((0, 4),)}, set()),
        ({"references": ((0, 1), (1, 0))}, {1}),
        # A function that the kernel calls launches kernel 1, and that launches kernel 2.
        ({"references": ((4, 1), (5, 2))}, {1, 2}),
        # An address in a table doesn't tell who launches from there.
        ({"references": ((1, 2),), "address_taken": ((1, 8),)}, set()),
    ],
)
def test_launches_from_the_device(changes: dict[str, object], launched: set[int]) -> None:
    assert launchable_kernels(cubin(**changes), 0) == launched


def test_two_names_of_one_code_stay_if_one_does() -> None:
    aliases = (Function(0, 0x100, 16), Function(1, 0x100, 16), Function(2, 0x110, 16))
    found = reachable_code(cubin(kernels=aliases, device_functions=(), calls=((1, 9),)), (1,))

    assert found == Reach(frozenset({0, 1}), (Span(0x110, 0x120),), 32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"relocatable": True}, "relocatable"),
        ({"calls": ((0, 3), (3, 4), (0, 9))}, "a device function that nothing calls"),
        ({"calls": (), "externals": ()}, "a device function that nothing calls"),
        ({"externals": (9, 10)}, "a function of the driver that nothing calls"),
        # As a linker of CUDA 9 leaves a kernel that launches another.
        ({"device_functions": (), "calls": ()}, "a function of the driver that nothing calls"),
        ({"externals": ()}, "calls of functions that are not in its tables"),
        (
            {"device_functions": (Function(3, 0x400, 0),), "calls": ()},
            "a function of unknown size",
        ),
    ],
)
def test_what_cant_be_told(changes: dict[str, object], reason: str) -> None:
    found = reachable_code(cubin(**changes), (1,))

    assert isinstance(found, str)
    assert reason in found
