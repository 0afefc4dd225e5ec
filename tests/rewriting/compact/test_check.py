"""Faults of a compacted library that no change of one thing in ``test_certify`` makes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.compact import certify, compact_library, declared_code
from pytest_negativa.rewriting.compact.records import CheckError
from pytest_negativa.rewriting.layout import Edits, Fill
from tests.support.compacting import (
    build,
    image,
    needs_compiler,
    plan_of,
    read,
    run_loaded,
)

pytestmark = needs_compiler

PHDR = struct.Struct("<IIQQQQQQ")
PT_LOAD = 1
KEPT = 2


class Case(NamedTuple):
    """A library, its plan, and the sound result."""

    path: Path
    library_map: LibraryMap
    plan: LibraryPlan
    result: bytes


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    for size in (8, 1024, 2048, 3072):
        path = build(
            folder / f"build-{size}",
            "-Wl,-z,noseparate-code",
            extra=f"    .data\n    .fill {size}, 1, 7\n",
        )
        library_map = read(path)
        plan = plan_of(library_map, lambda i: i % 13 == KEPT)
        compact_library(path, folder / "small.so", library_map, plan)
        # For pulled_up.
        if room_behind_data((folder / "small.so").read_bytes()) is not None:
            break
    return Case(path, library_map, plan, (folder / "small.so").read_bytes())


def check(case: Case, folder: Path, data: bytes, edits: Edits | None = None) -> None:
    target = folder / "changed.so"
    target.write_bytes(data)
    with ByteSource(case.path) as original:
        declared = declared_code(original, case.library_map, case.plan, edits)
    certify(case.path, target, declared=declared)


def rows(data: bytes) -> list[tuple[int, list[int]]]:
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    return [(offset + 56 * i, list(PHDR.unpack_from(data, offset + 56 * i))) for i in range(count)]


def with_header(kind: int, number: int, field: int, value: int) -> Callable[[bytes], bytes]:
    """Add to a field of the number-th program header of a type."""

    def changed(data: bytes) -> bytes:
        at, row = [found for found in rows(data) if found[1][0] == kind][number]
        row[field] += value
        return data[:at] + PHDR.pack(*row) + data[at + 56 :]

    return changed


def flip(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0x55]) + data[offset + 1 :]


def first_hole(data: bytes) -> int:
    loads = [row for _, row in rows(data) if row[0] == PT_LOAD]
    return next(i for i, row in enumerate(loads) if row[6] > row[5] > 0)


def test_hole_must_not_become_executable(case: Case, tmp_path: Path) -> None:
    number = first_hole(case.result)
    with pytest.raises(CheckError):
        check(case, tmp_path, with_header(PT_LOAD, number, 1, 1)(case.result))


def test_load_address_must_stay_as_aligned(case: Case, tmp_path: Path) -> None:
    original = tmp_path / "original.so"
    data = case.path.read_bytes()
    original.write_bytes(with_header(PT_LOAD, -1, 7, 0x200000 - 0x1000)(data))
    with pytest.raises(CheckError):
        check(case._replace(path=original), tmp_path, case.result)


def test_elf_header_outside_of_all_segments(case: Case, tmp_path: Path) -> None:
    # Nothing of the first page is in a segment then, in both.
    drop = with_header(PT_LOAD, 0, 0, 5)
    original = tmp_path / "original.so"
    original.write_bytes(drop(case.path.read_bytes()))
    with pytest.raises(CheckError):
        check(case._replace(path=original), tmp_path, flip(drop(case.result), 0x18))


def test_congruence_and_size(case: Case, tmp_path: Path) -> None:
    with pytest.raises(CheckError):
        check(case, tmp_path, with_header(PT_LOAD, first_hole(case.result) + 1, 2, 8)(case.result))
    with pytest.raises(CheckError):
        check(case, tmp_path, with_header(PT_LOAD, -1, 2, 1 << 30)(case.result))


def test_edits_must_be_in_the_result(case: Case, tmp_path: Path) -> None:
    kept = case.library_map.sections[0].regions[1].elements[1].payload
    edits = Edits.of(case.path.stat().st_size, [Fill(kept.start, kept.start + 8, 0)])
    with pytest.raises(CheckError, match="trimmed cubin"):
        check(case, tmp_path, case.result, edits=edits)


# --- What ld.so would fail on --------------------------------------------------------------


def test_program_headers_that_ld_so_clears(case: Case, tmp_path: Path) -> None:
    # What llvm-objcopy does. It loads, and the headers are overwritten while it does.
    moved = pulled_up(case.result)
    with pytest.raises(CheckError, match="program headers share a page"):
        check(case, tmp_path, moved)
    with pytest.raises(AssertionError):
        run_loaded(tmp_path / "changed.so", image(case.path), tmp_path / "dump")


def pulled_up(data: bytes) -> bytes:
    """The program headers moved behind the bytes of a segment with .bss, in the same page."""
    table = b"".join(PHDR.pack(*row) for _, row in rows(data))
    start = room_behind_data(data)
    assert start is not None
    changed = data[:start] + table + data[start + len(table) :]
    return changed[:32] + struct.pack("<Q", start) + changed[40:]


def room_behind_data(data: bytes) -> int | None:
    """Where the program headers fit between the bytes of a segment with .bss and the page's end."""
    table = 56 * len(rows(data))
    for _, row in rows(data):
        start = -(-(row[2] + row[5]) // 8) * 8
        # A hole's run ends with a page.
        if row[0] == PT_LOAD and row[6] > row[5] and start % 4096 and start % 4096 + table <= 4096:
            assert not any(data[start : start + table])
            return int(start)
    return None
