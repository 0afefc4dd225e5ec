"""Rows of binary tables, as named tuples."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Buffer = bytes | bytearray | memoryview
"""Bytes that hold a table."""

_Row = TypeVar("_Row", bound=tuple[Any, ...])


class RowLayout(Generic[_Row]):
    """Layout of a row in a file: a ``struct.Struct`` whose rows have names.

    Args:
        layout: the format, as of ``struct``.
        make: ``_make`` of the rows' ``NamedTuple``.

    Attributes:
        size: bytes of a row.
        struct: for a hot loop that unpacks each row into names of its own.
    """

    def __init__(self, layout: str, make: Callable[[Iterable[Any]], _Row]) -> None:
        self.struct = struct.Struct(layout)
        self.size = self.struct.size
        self._make = make

    def unpack_from(self, data: Buffer, offset: int = 0) -> _Row:
        """The row at ``offset``.

        Raises:
            struct.error: ``data`` ends before the row.
        """
        return self._make(self.struct.unpack_from(data, offset))

    def iter_unpack(self, data: Buffer) -> Iterator[_Row]:
        """All rows of a table.

        Raises:
            struct.error: ``data`` has no whole number of rows.
        """
        return map(self._make, self.struct.iter_unpack(data))

    def pack(self, row: _Row) -> bytes:
        """The bytes of a row."""
        return self.struct.pack(*row)
