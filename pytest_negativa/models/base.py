"""The bases of all records. Records are also the files: no I/O here."""

from __future__ import annotations

from typing import Annotated

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What ``msgspec.json.decode`` raises for damaged bytes."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of the records: immutable, so without cycles; checked when read from a file."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of records that a library has hundreds of thousands of: arrays in JSON."""
