"""The bases of all records. Records are also the files: no I/O here."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of ``msgspec.json.decode`` for damaged bytes."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of the records: immutable, so without cycles; checked when read from a file."""


class Line(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="record"):
    """Base of the lines of a file that processes append to as things happen."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="format", tag=1):
    """The first base of the records that are files: their first key is ``format``.

    A record whose format changes raises its own ``tag``. Files of other formats are refused.
    """


_T = TypeVar("_T")


class Listing(Versioned, Record, Generic[_T], frozen=True, kw_only=True, omit_defaults=True):
    """Rows of one kind: a file of a run, or what a command prints with ``--json``.

    Attributes:
        rows: in an order that their writer chooses.
        run_id: the run that they are of.
        listed: which rows these are, for people: ``unused`` kernels, or tests compared by
            ``module``.
    """

    rows: tuple[_T, ...]
    run_id: str | None = None
    listed: str | None = None


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of records that a library has hundreds of thousands of: arrays in JSON."""
