"""What is left in libraries that were compacted: the original's map without what is unused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.cubin import parse_cubin, section_headers
from pytest_negativa.gpucode.elf_tables import PT_LOAD, SHT_SYMTAB, STT_FUNC, SYM, ProgramHeader
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.slimmed import AddressSpace, is_slimmed
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import (
    Cubin,
    LibraryMap,
    Removed,
    Scope,
)
from pytest_negativa.models.spans import size as span_size
from pytest_negativa.planning.reachable import reachable_code
from pytest_negativa.rewriting.compact.cut import cut_library
from pytest_negativa.rewriting.layout import Edits, Fill
from pytest_negativa.rewriting.plan_edits import overwrite, trim_kernels
from tests.support.builders import CubinSpec, build_cubin, zstd_frame
from tests.support.compacting import (
    COMPACTABLE,
    SHAPES,
    build,
    content,
    gpu_code,
    needs_compiler,
    plan_of,
)
from tests.support.cutting import needs_stub
from tests.support.libraries import BIN
from tests.support.slimmed import (
    check_left,
    check_slimmed,
    compact,
    cut,
    plan_for,
    read,
    read_slimmed,
    rows,
    with_digest,
)

ALL = Scope()
# Of ``.nv_fatbin`` in libraries that ``build`` makes.
ELEMENTS = sum(map(len, SHAPES))


class TestFixtures:
    @pytest.mark.parametrize("library", COMPACTABLE, ids=lambda path: path.stem)
    @pytest.mark.parametrize("every", [2, 3, 1000])
    def test_the_rest_is_as_it_was(self, library: Path, every: int, tmp_path: Path) -> None:
        before = read(library)
        plan = plan_of(before, lambda number: number % every == 1)
        target = tmp_path / library.name
        done = compact(before, plan, target)
        after, removed = read_slimmed(target, ALL)
        check_slimmed(after)
        assert rows(after) == rows(before, plan)
        assert after.problems == before.problems
        assert removed.size_before == before.library.size
        assert removed.gone_bytes == span_size(done.holes)
        assert after.library.build_id == before.library.build_id

    @pytest.mark.parametrize("name", ["libcallgraph.so", "libmode_none.so", "libmode_all_lz4.so"])
    def test_functions_that_are_gone(self, name: str, tmp_path: Path) -> None:
        library = BIN / name
        before = with_digest(read_library(library, Scope(devices=("9.0",))))
        plan = plan_for(before, min(k.name for k in all_kernels(before)))
        assert plan.trimmed
        with ByteSource(library) as source:
            edits, trimmed = trim_kernels(source, before, plan, 1)
        filled = {c.start: {code.start for code in c.filled} for c in trimmed}
        assert any(filled.values())
        compact(before, plan, tmp_path / "lib.so", edits)
        after, _ = read_slimmed(tmp_path / "lib.so", Scope(devices=("9.0",)))

        gone = 0
        expected = {}
        for address, element in cubins(before):
            code = filled.get(element.payload.start, set())
            kernels_left = [k for k in element.content.kernels if k.offset_in_cubin not in code]
            gone += len(element.content.kernels) - len(kernels_left)
            expected[address] = [before.names[kernel.name] for kernel in kernels_left]
        left = {
            address: [after.names[kernel.name] for kernel in element.content.kernels]
            for address, element in cubins(after)
        }
        assert left == {address: expected[address] for address in left}
        assert gone > 0
        assert any(left.values())
        assert "" not in {kernel.name for kernel in all_kernels(after)}


def cubins(library_map: LibraryMap) -> Iterator[tuple[int, Any]]:
    for section in library_map.sections:
        shift = section.vaddr - section.span.start
        for region in section.regions:
            for element in region.elements:
                if isinstance(element.content, Cubin):
                    yield element.header_offset + shift, element


def all_kernels(library_map: LibraryMap) -> Iterator[Any]:
    for element in library_map.iter_code():
        yield from library_map.kernels_of(element.content)


@needs_compiler
class TestHoles:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Path:
        return build(tmp_path / "built")

    @pytest.mark.slow
    @pytest.mark.parametrize("kept", [{0}, {2, 6}, {10}, {13}, set(range(0, 28, 3)), set()])
    def test_pieces_are_one_section(self, library: Path, kept: set[int], tmp_path: Path) -> None:
        before = read(library)
        plan = plan_of(before, kept.__contains__)
        done = compact(before, plan, tmp_path / "lib.so")
        assert len(done.holes)
        after, removed = read_slimmed(tmp_path / "lib.so", ALL)
        check_slimmed(after)
        assert rows(after) == rows(before, plan)
        assert after.problems == ()
        assert removed.gone_bytes == span_size(done.holes)
        assert removed.stored_bytes == sum(d.size for d in plan.decisions if d.kept)
        names = [section.name for section in after.sections]
        assert len(names) == len(set(names))

    def test_overwritten_elements_are_removed_ones(self, library: Path, tmp_path: Path) -> None:
        """As in copies that were overwritten before: their headers say sm_999."""
        before = read(library)
        plan = plan_of(before, {0, 3, 4, 8, 20}.__contains__)
        kept = plan_of(before, lambda number: True)
        before = msgspec.structs.replace(
            read_library(library, Scope(headers_only=True)), library=before.library
        )
        compact(before, kept, tmp_path / "lib.so", overwrite(before, plan, 1))
        after, _ = read_slimmed(tmp_path / "lib.so", ALL)
        assert rows(after).keys() == rows(before, plan).keys()
        assert after.problems == ()
        assert {element.kind.value for element in after.iter_code()} == {"cubin"}

    def test_kept_code_may_have_holes(self, tmp_path: Path) -> None:
        """The last region's payload ends in zeros that went, and so does its section."""
        library = build(tmp_path / "built", ldata=gpu_code(2, ((64,), (50_000,))))
        before = read(library)
        plan = plan_of(before, lambda number: True)
        last = [section.regions[-1].elements[-1] for section in before.sections]
        edits = Edits.of(
            before.library.size,
            [Fill(e.payload.start + 5000, e.payload.end, 0) for e in last],
        )
        done = compact(before, plan, tmp_path / "lib.so", edits)
        assert len(done.holes) == 2
        after, removed = read_slimmed(tmp_path / "lib.so", ALL)
        # The content is no cubin, here.
        assert {a: r[:12] for a, r in rows(after).items()} == {
            a: r[:12] for a, r in rows(before).items()
        }
        assert removed.gone_bytes == span_size(done.holes) > 40_000
        code = sum(decision.size for decision in plan.decisions)
        assert removed.stored_bytes == code - removed.gone_bytes

    @needs_stub
    @pytest.mark.parametrize("kept", range(3))
    def test_frames_of_which_the_middle_is_in_a_spare(self, kept: int, tmp_path: Path) -> None:
        """The zeros of a hole would be an empty block every three bytes."""
        image = build_cubin(CubinSpec(kernels={"kernel": content(3 << 20, 7)})).data
        library = build(tmp_path / "built", ldata=zstd_frame(image) * 3)
        before = read(library)
        assert len(list(before.iter_frames())) == 3
        plan = plan_of(before, lambda number: number >= ELEMENTS and number - ELEMENTS == kept)
        (tmp_path / "cut").mkdir()
        done = cut(before, plan, tmp_path / "cut")
        removed = check_left(before, plan, done)
        assert removed.gone_bytes > 5 << 20

    @needs_stub
    def test_cpu_code_in_a_spare_is_no_gpu_code(self, tmp_path: Path) -> None:
        extra = ".text\n.fill 200000, 1, 0x90\n.data\n.fill 100000, 1, 7\n"
        library = build(tmp_path / "built", extra=extra)
        (tmp_path / "cut").mkdir()
        needed = [section.span for section in read(library).sections]
        done = cut_library(library, tmp_path / "cut" / library.name, tmp_path / "cut", needed)
        assert span_size(done.holes) > 100_000
        _, removed = read_slimmed(done.library, ALL)
        assert removed.gone_bytes == 0

    def test_not_slimmed(self, library: Path) -> None:
        assert not is_slimmed(library)
        with pytest.raises(FormatError, match=r"has no section \.negativa"):
            read_slimmed(library, ALL)


@pytest.fixture(scope="module")
def slimmed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    before = read(BIN / "libmultiarch.so")
    target = tmp_path_factory.mktemp("slimmed") / "lib.so"
    compact(before, plan_of(before, lambda number: number in (3, 9, 10)), target)
    return target.read_bytes()


def header_of(data: bytes, name: bytes) -> int:
    """Where the last section header of that name stands."""
    shoff: int = struct.unpack_from("<Q", data, 0x28)[0]
    count, index = struct.unpack_from("<HH", data, 0x3C)
    names = struct.unpack_from("<Q", data, shoff + 64 * index + 24)[0]
    found = [
        shoff + 64 * i
        for i in range(count)
        if data.startswith(name + b"\0", names + struct.unpack_from("<I", data, shoff + 64 * i)[0])
    ]
    return found[-1]


def loads_of(data: bytes) -> list[int]:
    """Where the program headers of the PT_LOADs stand."""
    phoff = struct.unpack_from("<Q", data, 0x20)[0]
    count = struct.unpack_from("<H", data, 0x38)[0]
    at = [phoff + 56 * i for i in range(count)]
    return [a for a in at if struct.unpack_from("<I", data, a)[0] == 1]


class TestDamaged:
    def read(self, data: bytes, tmp_path: Path) -> tuple[LibraryMap, Removed]:
        path = tmp_path / "lib.so"
        path.write_bytes(data)
        return read_slimmed(path, ALL)

    def changed(self, data: bytes, offset: int, value: int, size: int = 8) -> bytes:
        return data[:offset] + value.to_bytes(size, "little") + data[offset + size :]

    def marked(self, data: bytes, text: bytes) -> bytes:
        """With another marker, at the end of the file."""
        header = header_of(data, b".negativa")
        data = self.changed(data, header + 24, len(data))
        return self.changed(data, header + 32, len(text)) + text

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"{", "damaged, or slimmed by another release .*: undo or reinstall, and slim again"),
            (b"\xff\xfe", "section .negativa: .*; damaged"),
            (b"[" * 60_000, "section .negativa: .*; damaged"),
            (b"[]", "Expected `object`, got `array`; damaged"),
            (b'{"format": 1}', "missing required field `size_before`; damaged"),
            (b'{"format": 1, "size_before": -1}', "size_before`; damaged"),
            (
                b'{"format": 9, "size_before": 9}',
                r"value 9 - at `\$.format`; .* another release",
            ),
            (
                b'{"compacted": 2, "size_before": 9}',
                "field `compacted`; .* another release",
            ),
            (b" " * 70_000, "has 70,000 bytes"),
        ],
    )
    def test_marker(self, slimmed: bytes, text: bytes, message: str, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=message):
            self.read(self.marked(slimmed, text), tmp_path)

    def test_section_that_is_elsewhere(self, slimmed: bytes, tmp_path: Path) -> None:
        header = header_of(slimmed, b".nv_fatbin")
        vaddr = struct.unpack_from("<Q", slimmed, header + 16)[0]
        data = self.changed(slimmed, header + 16, vaddr + 8)
        with pytest.raises(FormatError, match=r"section \.nv_fatbin: its bytes are not those at"):
            self.read(data, tmp_path)

    def test_segments_that_overlap(self, slimmed: bytes, tmp_path: Path) -> None:
        first, *_ = loads_of(slimmed)
        data = self.changed(slimmed, first + 40, 1 << 40)
        with pytest.raises(FormatError, match="begins before the one at 0x0 ends"):
            self.read(data, tmp_path)

    def test_segment_that_leaves_the_file(self, slimmed: bytes, tmp_path: Path) -> None:
        last = loads_of(slimmed)[-1]
        data = self.changed(slimmed, last + 32, 1 << 30)
        with pytest.raises(FormatError, match="past the end of the file at"):
            self.read(data, tmp_path)

    def test_truncated(self, slimmed: bytes, tmp_path: Path) -> None:
        for size in range(0, len(slimmed) - 1, 997):
            with pytest.raises(FormatError):
                self.read(slimmed[:size], tmp_path)

    def test_hole_of_exabytes_takes_no_time(self, slimmed: bytes, tmp_path: Path) -> None:
        last = loads_of(slimmed)[-1]
        data = self.changed(slimmed, last + 40, 1 << 62)
        expected = self.read(slimmed, tmp_path)[0]
        found = self.read(data, tmp_path)[0]
        assert rows(found) == rows(expected)

    @given(data=st.data())
    def test_changed_bytes_lead_to_a_map_or_to_our_error(
        self, slimmed: bytes, data: st.DataObject, tmp_path: Path
    ) -> None:
        # Half of the changes are made where the tables are.
        tables = struct.unpack_from("<Q", slimmed, 0x20)[0]
        place = st.one_of(
            st.integers(0, 63),
            st.integers(tables, len(slimmed) - 1),
            st.integers(0, len(slimmed) - 1),
        )
        value = st.one_of(
            st.binary(min_size=1, max_size=8), st.sampled_from([bytes(8), b"\xff" * 4, b"\xff" * 8])
        )
        changed = bytearray(slimmed)
        for at, new in data.draw(st.lists(st.tuples(place, value), min_size=1, max_size=4)):
            changed[at : at + len(new)] = new
        path = tmp_path / "lib.so"
        path.write_bytes(changed[: len(slimmed)])
        try:
            library_map, _ = read_slimmed(path, ALL)
        except FormatError as e:
            assert str(e).startswith(f"{path}:")
        else:
            check_slimmed(library_map)


class TestNamelessFunctions:
    """They are what ``rewriting.cubin_code`` leaves of a function."""

    def test_are_not_listed(self) -> None:
        spec = CubinSpec(
            kernels={"stays": bytes(16), "goes": bytes(16)},
            device_functions={"helper": bytes(16)},
            calls=[("stays", "helper"), ("goes", "helper")],
        )
        image = bytearray(build_cubin(spec).data)
        assert len(parse_cubin(bytes(image), NameTable()).kernels) == 2
        for name in (b"goes", b"helper"):
            symbol = symbol_of(image, name)
            image[symbol : symbol + 4] = bytes(4)
        after = parse_cubin(bytes(image), names := NameTable())
        assert [names.names()[kernel.name] for kernel in after.kernels] == ["stays"]
        assert after.device_functions == ()
        # Whoever plans must still see that more is called than is listed.
        assert len(after.calls) == 2
        assert reachable_code(after, [after.kernels[0].name]) == (
            "calls of functions that are not in its tables"
        )


def symbol_of(image: bytearray, name: bytes) -> int:
    """Where the function's symbol stands."""
    sections = section_headers(bytes(image))
    [table] = [section for section in sections if section.sh_type == SHT_SYMTAB]
    strings = sections[table.sh_link].sh_offset
    for at in range(table.sh_offset, table.file_end, SYM.size):
        symbol = SYM.unpack_from(image, at)
        if symbol.type == STT_FUNC and image.startswith(name + b"\0", strings + symbol.st_name):
            return at
    raise AssertionError(name)


def load(vaddr: int, offset: int, file_size: int, memory_size: int) -> ProgramHeader:
    return ProgramHeader(PT_LOAD, 0, offset, vaddr, 0, file_size, memory_size, 4096)


class TestAddresses:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[ByteSource]:
        path = tmp_path / "bytes"
        path.write_bytes(bytes(range(1, 101)))
        with ByteSource(path) as source:
            yield source

    @pytest.fixture
    def space(self, source: ByteSource) -> AddressSpace:
        """Bytes at 100 to 110, zeros to 200, bytes to 220 in two segments; nothing to 300."""
        return AddressSpace(
            source,
            [
                load(100, 0, 10, 100),
                load(200, 10, 10, 10),
                load(210, 20, 10, 10),
                load(300, 50, 5, 9),
            ],
        )

    @pytest.mark.parametrize(
        ("address", "length", "expected"),
        [
            (100, 10, bytes(range(1, 11))),
            (105, 10, bytes([6, 7, 8, 9, 10]) + bytes(5)),
            (110, 90, bytes(90)),
            (109, 93, bytes([10]) + bytes(90) + bytes([11, 12])),
            (205, 10, bytes(range(16, 26))),
            (303, 6, bytes([54, 55]) + bytes(4)),
            (220, 0, b""),
        ],
    )
    def test_read(self, space: AddressSpace, address: int, length: int, expected: bytes) -> None:
        assert space.read(address, length) == expected

    @pytest.mark.parametrize(
        ("address", "length"), [(0, 1), (99, 2), (215, 10), (230, 1), (305, 9), (300, -1)]
    )
    def test_outside(self, space: AddressSpace, address: int, length: int) -> None:
        with pytest.raises(FormatError, match="in no segment"):
            space.read(address, length)

    def test_what_the_file_holds(self, space: AddressSpace) -> None:
        assert [space.next_stored(a) for a in (0, 105, 110, 215, 299, 305)] == [
            *((100, 110), (105, 110), (200, 220), (215, 220), (300, 305), None),
        ]
        assert list(space.parts(105, 305)) == [(105, 110, -100), (200, 220, -190), (300, 305, -250)]
        assert space.stored_size(105, 305) == 5 + 20 + 5

    def test_zeros_have_an_end(self, source: ByteSource) -> None:
        limited = AddressSpace(source, [load(100, 0, 10, 100)], max_zeros=150)
        limited.read(110, 90)
        with pytest.raises(FormatError, match="states more zeros"):
            limited.read(110, 90)
