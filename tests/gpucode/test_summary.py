"""Sums against the fixtures' golden headers, and against maps made by hand."""

from __future__ import annotations

import pytest

from pytest_negativa.arch import ComputeCapability, ElementKind, SmArch
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.library import (
    Compression,
    Element,
    LibraryIdentity,
    LibraryMap,
    Region,
    Scope,
    Section,
)
from pytest_negativa.models.spans import Span
from tests.support.libraries import BIN, MULTIARCH


@pytest.mark.parametrize(
    ("device", "arch", "kind", "loaded_bytes"),
    [
        ("7.5", "sm_75", "cubin", 880 + 944 + 1072),
        ("8.0", "sm_80", "cubin", 904 + 952 + 1104),
        ("8.9", "sm_86", "cubin", 904 + 952 + 1096),
        ("9.0", "sm_90", "cubin", 992 + 1032 + 1160),
        ("12.1", "sm_120", "cubin", 1376 + 1440 + 1592),
        ("13.0", "sm_120", "ptx", 296 + 312 + 384),
        ("7.0", None, None, 0),
    ],
)
def test_what_a_device_loads(
    device: str, arch: str | None, kind: str | None, loaded_bytes: int
) -> None:
    capability = ComputeCapability.parse(device)
    summary = summarize(read_library(MULTIARCH, Scope(devices=(device,))), (capability,))
    assert summary.devices == (device,)
    assert summary.loaded_bytes == loaded_bytes
    for row in summary.code:
        chosen = (row.arch, row.kind) == (arch, kind)
        assert row.loaded == (3 if chosen else 0)
        assert row.kernels == (6 if chosen else None)


def test_frames() -> None:
    summary = summarize(
        read_library(BIN / "libframes.so", Scope(devices=("8.6",))), (ComputeCapability(8, 6),)
    )
    rows = {r.arch: r for r in summary.code}
    assert {r.kind for r in summary.code} == {"frame"}
    assert (rows["sm_80"].elements, rows["sm_80"].stored_bytes) == (1, 897)
    assert (rows["sm_90"].elements, rows["sm_90"].stored_bytes) == (2, 991 + 4067)
    assert (rows["sm_80"].unpacked_bytes, rows["sm_90"].unpacked_bytes) == (4584, 5200 + 28664)
    assert (rows["sm_80"].loaded_bytes, rows["sm_90"].loaded_bytes) == (897, 0)
    assert summary.loaded_bytes == 897
    assert [(s.name, s.frames, s.code_bytes) for s in summary.sections] == [
        (".data", 1, 4067),
        (".ldata", 2, 897 + 991),
    ]


def made_by_hand() -> LibraryMap:
    def element(offset: int, kind: ElementKind, arch: str, unreadable: str | None) -> Element:
        return Element(
            header_offset=offset,
            payload=Span(offset + 64, offset + 100),
            stored_size=36,
            unpacked_size=36,
            kind=kind,
            arch=SmArch.parse(arch),
            compression=Compression.NONE,
            kind_number=2,
            unreadable=unreadable,
        )

    elements = (
        element(116, ElementKind.CUBIN, "sm_90", "damaged"),
        element(216, ElementKind.UNKNOWN, "sm_80", "element kind 16 is not known"),
    )
    frame = Element.bare(
        Span(400, 450), unpacked_size=99, arch=SmArch(9, 0), unreadable="cut short"
    )
    return LibraryMap(
        library=LibraryIdentity(path="/lib.so", size=1000, mtime_ns=0, build_id=None, soname=None),
        scope=Scope(),
        sections=(
            Section(
                name=".nv_fatbin",
                span=Span(100, 500),
                vaddr=0,
                regions=(Region(span=Span(100, 316), elements=elements),),
                frames=(frame,),
            ),
        ),
        problems=("at offset 0x140: 8 bytes are not understood",),
        names=(),
    )


def test_what_is_not_understood_is_told_and_counts_as_loaded() -> None:
    summary = summarize(made_by_hand(), (ComputeCapability(7, 5),))
    assert summary.problems == (
        "at offset 0x140: 8 bytes are not understood; kept",
        "element at offset 0x74: damaged; kept",
        "element at offset 0xd8: element kind 16 is not known; kept",
        "frame at offset 0x190: cut short; kept",
    )
    assert [(r.arch, r.kind, r.unreadable, r.loaded) for r in summary.code] == [
        ("sm_80", "unknown", 1, 1),
        ("sm_90", "cubin", 1, 0),
        ("sm_90", "frame", 1, 0),
    ]
    assert summary.loaded_bytes == 36
