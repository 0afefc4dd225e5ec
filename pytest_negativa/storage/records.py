"""Records to JSON and back: ``format`` of other releases, file names that are not UTF-8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_origin

import msgspec

from pytest_negativa.arch import SmArch
from pytest_negativa.errors import OptionError, StoreError, refusing
from pytest_negativa.models.base import UNDECODABLE, Listing
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.storage.atomic import write_atomically

_T = TypeVar("_T")


def utf8(text: str) -> str:
    """A text that JSON can hold: file names on Linux may be any bytes, and JSON is UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know."""
    if isinstance(value, SmArch):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_hook(wanted: type, value: Any) -> Any:
    """Decode what ``encode_hook`` encoded."""
    if wanted is SmArch:
        if not isinstance(value, str):
            raise ValueError(f"expected an SM arch like sm_90, got {type(value).__name__}")
        try:
            return SmArch.parse(value)
        except OptionError as e:
            raise ValueError(str(e)) from None
    raise NotImplementedError(f"cannot decode {wanted.__name__}")


_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def format_of(kind: Any) -> int:
    """The ``format`` of a record that is a file."""
    tag: int = (get_origin(kind) or kind).__struct_config__.tag
    return tag


def decode_versioned(data: bytes, kind: type[_T], *, origin: str, what: str, remedy: str) -> _T:
    """A record from JSON.

    The format is checked before the rest, which another release may have in any other form.

    Args:
        origin: where the JSON is from, for messages.
        what: what it should be, for messages: ``a plan``.
        remedy: what to do about another format.

    Raises:
        StoreError: it is something else, or of another format.
    """
    try:
        found = bytes(_decode_keys(data).get("format", b"none"))[:20].decode()
        if found != str(ours := format_of(kind)):
            raise StoreError(f"{origin}: format {found}, this release reads {ours}; {remedy}")
        return msgspec.json.decode(data, type=kind, dec_hook=decode_hook)
    except (*UNDECODABLE, ValueError) as e:
        raise StoreError(f"{origin}: not {what} of this release: {e}; {remedy}") from e


def read_own(path: Path) -> bytes:
    """The bytes of a file that a run or a session left.

    Raises:
        StoreError: it can't be read.
    """
    with refusing(path, "read"):
        return path.read_bytes()


def load_record(path: Path, kind: type[_T], what: str, remedy: str) -> _T:
    """A record from a file; see ``decode_versioned``.

    Raises:
        StoreError: it can't be read, is something else, or of another format.
    """
    return decode_versioned(read_own(path), kind, origin=str(path), what=what, remedy=remedy)


def load_if_there(path: Path, kind: type[_T], what: str, remedy: str) -> _T | None:
    """As ``load_record``; None if there is no file."""
    return load_record(path, kind, what, remedy) if path.exists() else None


def load_rows(path: Path, row: type[_T], what: str, remedy: str) -> tuple[_T, ...]:
    """As ``load_record``: the rows of a ``Listing``; none if there is no file."""
    listing = Listing[row]  # type: ignore[valid-type]
    found = load_if_there(path, listing, what, remedy)
    return () if found is None else found.rows


def write_rows(path: Path, rows: Iterable[object], *, indent: int = 0) -> None:
    """Write what ``load_rows`` reads; see ``write_record``."""
    write_record(path, Listing(rows=tuple(rows)), indent=indent)


def write_record(path: Path, record: object, *, indent: int = 0) -> None:
    """Write a record or plain value as JSON.

    Raises:
        StoreError: it can't be written.
    """
    write_atomically(path, encode_record(record, indent=indent))


def encode_record(record: object, *, indent: int = 0) -> bytes:
    """The JSON of a record or plain value; in one line without ``indent``."""
    data = msgspec.json.encode(record, enc_hook=encode_hook)
    return msgspec.json.format(data, indent=indent) if indent else data


def decode_map(data: bytes, origin: str) -> LibraryMap:
    """The map in ``data``; ``origin`` (a path) is for messages.

    Raises:
        StoreError: not a map, or of a version that this release does not read.
    """
    return decode_versioned(
        data, LibraryMap, origin=origin, what="a library map", remedy="make the map again"
    )


def load_map(path: Path) -> LibraryMap:
    """Read a map file.

    Raises:
        StoreError: the file can't be read, is no map, or of another format.
    """
    return decode_map(read_own(path), str(path))
