"""The note and the trailer: what was written is read, and damage is told."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.errors import FormatError
from pytest_negativa.models.spans import MovedSpan
from pytest_negativa.pages.note import (
    MAGIC,
    Hole,
    Note,
    Trailer,
    trailer_offset,
    unpack_note,
    unpack_trailer,
)

NOTE = Note(
    original=bytes(range(32)),
    original_size=123_456,
    holes=(Hole(0x4000, 0x8000, 0x3000, 5), Hole(0x9000, 0xA000, 0x8000, 1)),
    name="libé.so",
    folders=("/one", "/two folders"),
    remedy="Do something.",
)
TRAILER = Trailer(NOTE.pair, NOTE.original, NOTE.original_size, (MovedSpan(4096, 8192, 4096),))


@pytest.mark.parametrize("folders", [(), ("/one",), ("/one", "/two")])
def test_a_note_is_read_as_it_was_written(folders: tuple[str, ...]) -> None:
    note = dataclasses.replace(NOTE, folders=folders, restartable=bool(folders))
    assert unpack_note(note.pack() + b"more", "lib", 0) == note


def test_a_trailer_is_read_as_it_was_written() -> None:
    assert unpack_trailer(TRAILER.pack(), "spare", 0) == TRAILER
    assert [trailer_offset(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_the_pair_knows_the_original_and_the_holes() -> None:
    others = (
        dataclasses.replace(NOTE, original=bytes(32)),
        dataclasses.replace(NOTE, holes=NOTE.holes[:1]),
    )
    assert len({NOTE.pair, *(other.pair for other in others)}) == 3
    assert dataclasses.replace(NOTE, folders=()).pair == NOTE.pair


@given(st.data())
def test_a_damaged_note_is_an_error_or_a_note(data: st.DataObject) -> None:
    packed = bytearray(NOTE.pack())
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut])):
        try:
            note = unpack_note(damaged, "lib", 0)
        except FormatError as e:
            assert str(e).startswith("lib: at offset") or "note" in str(e)
        else:
            # The digest covers what decides where a page comes from.
            assert (note.original, note.holes) == (NOTE.original, NOTE.holes)


def test_a_note_of_another_format() -> None:
    old = NOTE.pack().replace(MAGIC, b"NEGSPARE")
    with pytest.raises(FormatError, match=r"b'NEGSPARE' of version 1, expected .*; install the"):
        unpack_note(old, "lib", 0)


@given(st.binary(max_size=400))
def test_any_bytes_are_no_trailer(data: bytes) -> None:
    with pytest.raises(FormatError):
        unpack_trailer(data, "spare", 0)
