"""Rewriting cubins in place: every kind of compression, on libraries compiled by nvcc."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
import zstandard
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Compression, Cubin, Element, LibraryMap, Scope
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import RepackedCubin
from pytest_negativa.models.spans import Span
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.rewriting.cubin_code import overwrite_code
from pytest_negativa.rewriting.layout import Edits, Patch
from pytest_negativa.rewriting.plan_edits import trim_kernels
from pytest_negativa.rewriting.repack import RepackError, repack, repack_frame
from tests.support.libraries import BIN
from tests.support.slimmed import H200, plan_for
from tests.support.usages import library_usage, usage_of


def read(path: Path) -> LibraryMap:
    return read_library(path, Scope(devices=("9.0",)))


def applied(data: bytes, edits: Edits) -> bytes:
    result = bytearray(data)
    for change in edits.changes:
        size = change.end - change.start
        new = change.data if isinstance(change, Patch) else bytes([change.value]) * size
        result[change.start : change.end] = new
    assert len(result) == edits.size == len(data)
    return bytes(result)


def trim(
    path: Path, library_map: LibraryMap, plan: LibraryPlan, value: int = 1
) -> tuple[Edits, tuple[RepackedCubin, ...]]:
    with ByteSource(path) as source:
        return trim_kernels(source, library_map, plan, value)


def content_of(data: bytes, element: Element) -> bytes:
    start = element.payload.start
    stored = data[start : start + element.stored_size]
    return unpack(stored, element.compression, element.unpacked_size)


def without(content: bytes, unused: tuple[Span, ...], value: int) -> bytes:
    edits = overwrite_code(content, unused, value)
    assert tuple(Span(fill.start, fill.end) for fill in edits.fills) == unused
    return bytes(edits.applied_to(content, 0))


def cubin_element(library_map: LibraryMap, start: int) -> Element:
    return next(e for e in library_map.iter_code() if e.payload.start == start)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize(
    ("name", "kernel", "compression"),
    [
        ("libmode_none.so", "shift", Compression.NONE),
        ("libmode_all_lz4.so", "shift", Compression.LZ4),
        ("libmode_all_zstd.so", "shift", Compression.ZSTD),
        ("libmode_size.so", "scale", Compression.ZSTD),
        ("libcallgraph.so", "calls_chain", Compression.ZSTD),
        ("libpointers.so", "plain", Compression.ZSTD),
    ],
)
def test_elements(
    tmp_path: Path, name: str, kernel: str, compression: Compression, value: int
) -> None:
    library_map = read(BIN / name)
    plan = plan_for(library_map, kernel)
    [trimmed] = plan.trimmed
    element = cubin_element(library_map, trimmed.start)
    assert element.compression is compression
    original = (BIN / name).read_bytes()

    edits, [cubin] = trim(BIN / name, library_map, plan, value)

    changed = applied(original, edits)
    (tmp_path / name).write_bytes(changed)
    assert (cubin.start, cubin.filled) == (trimmed.start, trimmed.unused)
    assert cubin.left_alone is None
    assert cubin.stored_before == element.stored_size
    # Only the payload and the field for its size change.
    outside = set(range(len(original))) - set(range(element.payload.start, element.payload.end))
    field = range(element.header_offset + 0x10, element.header_offset + 0x14)
    assert {i for i in outside if changed[i] != original[i]} <= set(field)
    # Whoever reads the library anew finds the same, and the content that was meant.
    again = read(tmp_path / name)
    found = cubin_element(again, trimmed.start)
    assert replace(found, content=None) == replace(
        element, stored_size=cubin.stored_after, content=None
    )
    assert again.sections[0].regions != ()
    assert isinstance(found.content, Cubin)
    assert kernel in {k.name for k in again.kernels_of(found.content)}
    content = content_of(original, element)
    assert content_of(changed, found) == without(content, trimmed.unused, value) != content
    end = element.payload.start + cubin.stored_after
    assert not any(changed[end : element.payload.end])
    if compression is Compression.NONE:
        assert cubin.stored_after == cubin.stored_before
        # Code as fills, of any size; tables as they are now.
        assert [f.end - f.start for f in edits.fills] == [c.size for c in trimmed.unused]
    else:
        assert cubin.stored_after <= cubin.stored_before


def frame_with(library_map: LibraryMap, kernel: str) -> Element:
    return next(
        f
        for f in library_map.iter_frames()
        if kernel in {k.name for k in library_map.kernels_of(f.content)}
    )


def test_frames_keep_their_length(tmp_path: Path) -> None:
    path = BIN / "libframes.so"
    library_map = read(path)
    frame = frame_with(library_map, "calls_chain")
    assert frame.digest is not None
    memory = {frame.digest: (frame.unpacked_size, ["calls_chain"])}
    usage = usage_of(library_usage(library_map, {}), memory=memory)
    located = locate_library(library_map, usage.libraries[0], usage)
    plan = plan_library(located, (H200,), KeepPolicy(granularity="kernel"))
    original = path.read_bytes()

    edits, [cubin] = trim(path, library_map, plan)

    changed = applied(original, edits)
    [trimmed] = plan.trimmed
    old = original[frame.span.start : frame.span.end]
    new = changed[frame.span.start : frame.span.end]
    content = zstandard.ZstdDecompressor().decompress(old)
    expected = without(content, trimmed.unused, 1)
    # As its reader does: the old length, frame after frame.
    with zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(new), read_across_frames=True
    ) as reader:
        assert reader.read() == expected != content
    parameters = [zstandard.get_frame_parameters(frame) for frame in (old, new)]
    assert len({(p.content_size, p.window_size, p.has_checksum) for p in parameters}) == 1
    magic, length = struct.unpack_from("<II", new, cubin.stored_after - 8)
    assert (magic, length) == (0x184D2A50, len(new) - cubin.stored_after)
    assert not any(new[cubin.stored_after :])
    (tmp_path / path.name).write_bytes(changed)
    again = frame_with(read(tmp_path / path.name), "calls_chain")
    assert again.span.start == frame.span.start
    assert again.span.end == frame.span.start + cubin.stored_after - 8


def test_what_contradicts_the_cubin_stays() -> None:
    path = BIN / "libpointers.so"
    library_map = read(path)
    plan = plan_for(library_map, "plain")
    [trimmed] = plan.trimmed
    content = cubin_element(library_map, trimmed.start).content
    assert isinstance(content, Cubin)
    code = {library_map.names[f.name]: f for f in content.device_functions}["_Z9in_globalf"]
    in_table = Span(code.offset_in_cubin, code.offset_in_cubin + code.code_size)
    both = tuple(sorted([in_table, *trimmed.unused]))

    _, [cubin] = trim(path, library_map, replace(plan, trimmed=(replace(trimmed, unused=both),)))
    no_edits, [alone] = trim(
        path, library_map, replace(plan, trimmed=(replace(trimmed, unused=(in_table,)),))
    )

    assert cubin.filled == trimmed.unused
    assert not no_edits.changes
    assert alone.left_alone == "all its code is referred to by what stays"
    assert alone.filled == ()
    assert alone.stored_after == alone.stored_before


def test_a_cubin_that_cant_be_read_is_left_alone(tmp_path: Path) -> None:
    path = BIN / "libmode_size.so"
    library_map = read(path)
    plan = plan_for(library_map, "shift")
    [trimmed] = plan.trimmed
    data = bytearray(path.read_bytes())
    data[trimmed.start + 40 : trimmed.start + 60] = bytes(20)
    damaged = tmp_path / path.name
    damaged.write_bytes(data)

    edits, [cubin] = trim(damaged, library_map, plan)

    assert not edits.changes
    assert cubin.left_alone is not None
    assert cubin.left_alone.startswith("damaged zstd payload")


def test_plan_of_another_map() -> None:
    path = BIN / "libcallgraph.so"
    library_map = read(path)
    plan = plan_for(library_map, "calls_chain")
    [trimmed] = plan.trimmed

    with pytest.raises(ReconstructError, match="where its map has none"):
        trim(path, library_map, replace(plan, trimmed=(replace(trimmed, start=1),)))


CONTENT = (BIN / "callgraph.sm_90.cubin").read_bytes()


def packed_by(level: int, **options: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=len(CONTENT),
        **options,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(CONTENT)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("window_log", [10, 12, 20])
def test_frame_parameters_stay(window_log: int, checksum: bool) -> None:
    packed = packed_by(1, window_log=window_log, write_checksum=checksum)
    before = zstandard.get_frame_parameters(packed)

    after = zstandard.get_frame_parameters(repack(CONTENT, packed, Compression.ZSTD, len(packed)))

    assert after.content_size == before.content_size == len(CONTENT)
    assert after.window_size == before.window_size
    assert after.has_checksum == before.has_checksum == checksum


def test_repacking_is_deterministic() -> None:
    packed = packed_by(3)

    first, second = (repack(CONTENT, packed, Compression.ZSTD, len(packed)) for _ in range(2))

    assert first == second


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.LZ4])
def test_space_is_the_limit(compression: Compression) -> None:
    packed = packed_by(3)
    least = len(repack(CONTENT, packed, compression, len(CONTENT)))

    assert len(repack(CONTENT, packed, compression, least)) == least
    with pytest.raises(RepackError, match="does not fit"):
        repack(CONTENT, packed, compression, least // 2)


@pytest.mark.parametrize("left", [0, 8, 9, 4000])
def test_frame_is_padded(left: int) -> None:
    packed = packed_by(3)

    frame, zeros = repack_frame(CONTENT, packed + bytes(left), levels=(3,))

    assert len(frame) == len(packed) + left
    assert zeros == max(0, left - 8)
    assert frame.startswith(packed)


@pytest.mark.parametrize("left", [1, 7])
def test_gap_too_small_for_a_frame(left: int) -> None:
    packed = packed_by(9) + bytes(left)
    other, _ = repack_frame(CONTENT, packed)

    # A tighter level leaves more room.
    assert len(other) == len(packed)
    assert not other.startswith(packed_by(9))
    with pytest.raises(RepackError, match="does not fit"):
        repack_frame(CONTENT, packed, levels=(9,))
